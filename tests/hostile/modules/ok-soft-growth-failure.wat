;; Growth beyond the module's own maximum fails softly, as WebAssembly says: it
;; is a property of the module.
(module
  (@custom "weightmill" "{\"abi\":1,\"name\":\"hostile\",\"version\":\"1.0.0\"}")
  (table $t 1 2 funcref)
  (memory (export "memory") 2 3)
  (global (export "wm_panic") i32 (i32.const 1024))
  (func (export "wm_abi_v1"))
  (func (export "wm_alloc") (param $len i32) (result i32)
    (i32.const 65536))
  (func (export "wm_plan") (param $ptr i32) (param $len i32) (result i64)
    (if (i32.ne (memory.grow (i32.const 2)) (i32.const -1)) (then unreachable))
    (if (i32.ne (table.grow $t (ref.null func) (i32.const 2)) (i32.const -1)) (then unreachable))
    (if (i32.ne (memory.grow (i32.const 65535)) (i32.const -1)) (then unreachable))
    (i64.or (i64.shl (i64.const 2048) (i64.const 32)) (i64.const 84)))
  (func (export "wm_run") (param $block i32) (result i64)
    unreachable)
  (data (i32.const 2048) "{\"outputs\":[{\"role\":\"out\",\"dtype\":\"F32\",\"shape\":[16],\"view\":[{\"copy\":0,\"len\":64}]}]}"))
