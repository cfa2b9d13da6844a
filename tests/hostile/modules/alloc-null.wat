;; Never has any memory.
(module
  (@custom "weightmill" "{\"abi\":1,\"name\":\"hostile\",\"version\":\"1.0.0\"}")
  (memory (export "memory") 2)
  (global (export "wm_panic") i32 (i32.const 1024))
  (func (export "wm_abi_v1"))
  (func (export "wm_alloc") (param $len i32) (result i32)
    (i32.const 0))
  (func (export "wm_plan") (param $ptr i32) (param $len i32) (result i64)
    unreachable)
  (func (export "wm_run") (param $block i32) (result i64)
    unreachable))
