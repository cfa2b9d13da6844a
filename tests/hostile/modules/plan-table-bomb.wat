;; Grows a table to a million elements.
(module
  (@custom "weightmill" "{\"abi\":1,\"name\":\"hostile\",\"version\":\"1.0.0\"}")
  (table $t 1 funcref)
  (memory (export "memory") 2)
  (global (export "wm_panic") i32 (i32.const 1024))
  (func (export "wm_abi_v1"))
  (func (export "wm_alloc") (param $len i32) (result i32)
    (i32.const 65536))
  (func (export "wm_plan") (param $ptr i32) (param $len i32) (result i64)
    (drop (table.grow $t (ref.null func) (i32.const 1000000)))
    unreachable)
  (func (export "wm_run") (param $block i32) (result i64)
    unreachable))
