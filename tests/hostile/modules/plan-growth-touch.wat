;; Doubles its memory and writes to every page of it.
(module
  (@custom "weightmill" "{\"abi\":1,\"name\":\"hostile\",\"version\":\"1.0.0\"}")
  (memory (export "memory") 2)
  (global (export "wm_panic") i32 (i32.const 1024))
  (func (export "wm_abi_v1"))
  (func (export "wm_alloc") (param $len i32) (result i32)
    (i32.const 65536))
  (func (export "wm_plan") (param $ptr i32) (param $len i32) (result i64) (local $at i32)
    (loop $l
      (drop (memory.grow (memory.size)))
      (local.set $at (i32.const 0))
      (loop $touch
        (i32.store (local.get $at) (i32.const 1))
        (br_if $touch (i32.lt_u
          (local.tee $at (i32.add (local.get $at) (i32.const 4096)))
          (i32.mul (memory.size) (i32.const 65536)))))
      (br $l))
    unreachable)
  (func (export "wm_run") (param $block i32) (result i64)
    unreachable))
