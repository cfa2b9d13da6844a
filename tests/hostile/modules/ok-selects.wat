;; A tile that copies its input byte by byte, through selects that comparisons
;; with zero decide: an engine has to get each of them right.
(module
  (@custom "weightmill" "{\"abi\":1,\"name\":\"hostile\",\"version\":\"1.0.0\"}")
  (memory (export "memory") 2)
  (global (export "wm_panic") i32 (i32.const 1024))
  (func (export "wm_abi_v1"))
  (func (export "wm_alloc") (param $len i32) (result i32)
    (i32.const 65536))
  (func (export "wm_plan") (param $ptr i32) (param $len i32) (result i64)
    (i64.or (i64.shl (i64.const 2048) (i64.const 32)) (i64.const 120)))
  (func (export "wm_run") (param $block i32) (result i64)
    (local $i i32) (local $odd i32) (local $from i32) (local $to i32) (local $byte i32)
    (local.set $to (i32.load offset=24 (local.get $block)))
    (local.set $from (i32.load (i32.load offset=32 (local.get $block))))
    (loop $l
      (local.set $byte (i32.load8_u (i32.add (local.get $from) (local.get $i))))
      (local.set $odd (i32.and (local.get $i) (i32.const 1)))
      ;; For an even i the first pair of operands counts, for an odd one the second.
      (i32.store8 (i32.add (local.get $to) (local.get $i))
        (i32.or
          (select (local.get $byte) (i32.const 0) (i32.eqz (local.get $odd)))
          (select (local.get $byte) (i32.const 0) (i32.ne (local.get $odd) (i32.const 0)))))
      (if (i64.eq (i64.const 5) (select (i64.const 5) (i64.const 7) (i32.eq (local.get $odd) (i32.const 0))))
        (then (if (local.get $odd) (then unreachable)))
        (else (if (i32.eqz (local.get $odd)) (then unreachable))))
      (if (f32.ne (f32.const 1) (select (result f32) (f32.const 1) (f32.const 2) (i32.eqz (i32.eqz (i32.const 3)))))
        (then unreachable))
      (br_if $l (i32.lt_u
        (local.tee $i (i32.add (local.get $i) (i32.const 1)))
        (i32.load offset=28 (local.get $block)))))
    (i64.const 0))
  (data (i32.const 2048) "{\"outputs\":[{\"role\":\"out\",\"dtype\":\"F32\",\"shape\":[16],\"tiles\":[{\"len\":64,\"inputs\":[[{\"copy\":0,\"len\":64}]],\"args\":[7]}]}]}"))
