//! Whatever could make two runs differ, one test for each, on every engine.

mod bench;

use std::sync::atomic::{AtomicBool, Ordering};

use bench::{Bench, ENGINES, Tile, compute, module, one_tile};
use weightmill::error::Code;
use weightmill::progress::Progress;
use weightmill::sandbox::{Limits, Module, engine_with};
use weightmill_tests::execution::Setting;
use weightmill_tests::seeded_bytes;

const CANONICAL: u32 = 0x7FC0_0000;

/// Computes each expression over each input, on every engine; X is the input
/// and Y the one behind it, as f32. Rows are expressions.
fn floats(inputs: &[u32], expressions: &[&str]) -> Vec<Vec<u32>> {
    let mut run = String::new();
    for (row, expression) in expressions.iter().enumerate() {
        for column in 0..inputs.len() {
            let load = |i: usize| format!("(f32.load offset={} (local.get $in))", 4 * (i % inputs.len()));
            let value = expression.replace('X', &load(column)).replace('Y', &load(column + 1));
            run += &format!("(f32.store offset={} (local.get $out) {value})\n", 4 * (row * inputs.len() + column));
        }
    }
    let module = module("", &run, "");
    let input: Vec<u8> = inputs.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let outcomes = compute(&module, &Tile::of(&input, 4 * inputs.len() * expressions.len()));
    let words: Vec<u32> = outcomes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    words.chunks(inputs.len()).map(<[u32]>::to_vec).collect()
}

/// What an instruction that only moves does to the bits.
type Move = fn(u32) -> u32;

#[test]
fn nan_payloads() {
    // Quiet and signalling, of either sign, with payloads.
    let corpus = [0x7FC0_0001, 0xFFC1_2345, 0x7F80_0001, 0xFFA5_5AA5, 0x7FC0_0000, 0xFFC0_0000, 0x7FFF_FFFF];
    let lanes = |op: &str| format!("(f32x4.extract_lane 0 ({op} (f32x4.splat X) (f32x4.splat (f32.const 1))))");
    let lane = |op: &str| format!("(f32x4.extract_lane 3 ({op} (f32x4.splat X)))");
    let wide = |op: &str| {
        format!(
            "(f32.demote_f64 (f64x2.extract_lane 1 ({op} (f64x2.splat (f64.promote_f32 X)) (v128.const f64x2 1 1))))"
        )
    };
    let mut arithmetic: Vec<String> = ["f32.add", "f32.sub", "f32.mul", "f32.div", "f32.min", "f32.max"]
        .iter()
        .flat_map(|op| [format!("({op} X (f32.const 1))"), format!("({op} (f32.const 1) X)"), format!("({op} X Y)")])
        .collect();
    arithmetic.extend(["f32.sqrt", "f32.ceil", "f32.floor", "f32.trunc", "f32.nearest"].map(|op| format!("({op} X)")));
    arithmetic.push("(f32.demote_f64 (f64.promote_f32 X))".into());
    arithmetic.push("(f32.demote_f64 (f64.sqrt (f64.promote_f32 X)))".into());
    arithmetic.extend(["f32x4.add", "f32x4.mul", "f32x4.div", "f32x4.min", "f32x4.max"].map(lanes));
    arithmetic.extend(["f32x4.sqrt", "f32x4.ceil", "f32x4.nearest"].map(lane));
    arithmetic.extend(["f64x2.add", "f64x2.sub", "f64x2.min", "f64x2.max"].map(wide));
    arithmetic
        .push("(f32x4.extract_lane 0 (f32x4.demote_f64x2_zero (f64x2.promote_low_f32x4 (f32x4.splat X))))".into());
    let expressions: Vec<&str> = arithmetic.iter().map(String::as_str).collect();
    for (expression, row) in expressions.iter().zip(floats(&corpus, &expressions)) {
        assert_eq!(row, vec![CANONICAL; corpus.len()], "{expression}");
    }

    // NaNs that arithmetic makes of numbers, which processors give other signs.
    let made = [
        "(f32.div (f32.sub X X) (f32.sub X X))",
        "(f32.sqrt (f32.neg X))",
        "(f32.sub (f32.div X (f32.const 0)) (f32.div X (f32.const 0)))",
    ];
    for (expression, row) in made.iter().zip(floats(&[0x3F80_0000, 0x4049_0FDB], &made)) {
        assert_eq!(row, [CANONICAL; 2], "{expression}");
    }

    // What only moves keeps every bit.
    let moves: [(&str, Move); 7] = [
        ("X", |x| x),
        ("(f32.neg X)", |x| x ^ 0x8000_0000),
        ("(f32.abs X)", |x| x & 0x7FFF_FFFF),
        ("(f32.copysign X (f32.const -1))", |x| x | 0x8000_0000),
        ("(f32.reinterpret_i32 (i32.reinterpret_f32 X))", |x| x),
        ("(f32x4.extract_lane 2 (f32x4.splat X))", |x| x),
        ("(f32x4.extract_lane 0 (f32x4.pmin (f32x4.splat X) (f32x4.splat (f32.const 1))))", |x| x),
    ];
    for ((expression, expected), row) in moves.iter().zip(floats(&corpus, &moves.map(|(expression, _)| expression))) {
        assert_eq!(row, corpus.map(expected), "{expression}");
    }
}

#[test]
fn float_min_max_and_signed_zero() {
    let (plus, minus, one, infinity) = (0_u32, 0x8000_0000_u32, 0x3F80_0000_u32, 0x7F80_0000_u32);
    let inputs = [plus, minus, plus, one, minus, infinity, 0xFF80_0000, one];
    let vector = |op: &str| format!("(f32x4.extract_lane 1 ({op} (f32x4.splat X) (f32x4.splat Y)))");
    let texts = [
        "(f32.min X Y)".to_string(),
        vector("f32x4.min"),
        "(f32.max X Y)".to_string(),
        vector("f32x4.max"),
        vector("f32x4.pmin"),
        vector("f32x4.pmax"),
        "(f32.demote_f64 (f64.min (f64.promote_f32 X) (f64.promote_f32 Y)))".to_string(),
        "(f32.add X Y)".to_string(),
    ];
    let rows = floats(&inputs, &texts.each_ref().map(String::as_str));
    let pairs: Vec<(u32, u32)> = (0..inputs.len()).map(|i| (inputs[i], inputs[(i + 1) % inputs.len()])).collect();
    let of = |f: fn(f32, f32) -> f32| {
        pairs.iter().map(|(x, y)| f(f32::from_bits(*x), f32::from_bits(*y)).to_bits()).collect::<Vec<_>>()
    };
    // A negative zero is smaller than a positive one.
    let min = of(|x, y| {
        if x == y {
            f32::from_bits(x.to_bits() | y.to_bits())
        } else if x < y {
            x
        } else {
            y
        }
    });
    let max = of(|x, y| {
        if x == y {
            f32::from_bits(x.to_bits() & y.to_bits())
        } else if x > y {
            x
        } else {
            y
        }
    });
    // The pseudo ones are comparisons: the first operand unless the other is beyond it.
    let pmin = of(|x, y| if y < x { y } else { x });
    let pmax = of(|x, y| if x < y { y } else { x });
    assert_eq!(
        rows,
        [
            min.clone(),
            min.clone(),
            max.clone(),
            max,
            pmin,
            pmax,
            min,
            of(|x, y| if (x + y).is_nan() { f32::from_bits(CANONICAL) } else { x + y })
        ]
    );
}

#[test]
fn subnormals_are_kept() {
    let inputs = [1, 0x007F_FFFF, 0x8000_0003, 0x0080_0000, 0x0080_0001];
    let rows = floats(
        &inputs,
        &[
            "(f32.mul X (f32.const 0.5))",
            "(f32.add X Y)",
            "(f32x4.extract_lane 0 (f32x4.mul (f32x4.splat X) (f32x4.splat (f32.const 0.5))))",
        ],
    );
    let half: Vec<u32> = inputs.iter().map(|x| (f32::from_bits(*x) * 0.5).to_bits()).collect();
    assert_eq!((&rows[0], &rows[2]), (&half, &half));
    let sum = |i: usize| (f32::from_bits(inputs[i]) + f32::from_bits(inputs[(i + 1) % inputs.len()])).to_bits();
    assert_eq!(rows[1], (0..inputs.len()).map(sum).collect::<Vec<_>>());
    assert_eq!(half[3], 0x0040_0000, "this machine computes with subnormals");
}

#[test]
fn relaxed_simd_is_rejected() {
    for instruction in [
        "(f32x4.relaxed_madd (v128.const i64x2 0 0) (v128.const i64x2 0 0) (v128.const i64x2 0 0))",
        "(i8x16.relaxed_swizzle (v128.const i64x2 0 0) (v128.const i64x2 0 0))",
        "(f32x4.relaxed_min (v128.const i64x2 0 0) (v128.const i64x2 0 0))",
        "(i32x4.relaxed_trunc_f32x4_s (v128.const i64x2 0 0))",
    ] {
        let bytes = module(&one_tile(64, 64), &format!("(drop {instruction})"), "");
        let error = Module::parse(bytes.as_slice()).unwrap_err();
        assert_eq!(error.code(), Code::ModuleUnsupportedFeature, "{instruction}: {error}");
        assert!(error.message().contains("relaxed SIMD"), "{error}");
    }
}

/// A module that asks whether memory could grow gets no answer that depends on
/// a limit: it grows, or the call fails.
#[test]
fn memory_growth_under_different_limits() {
    let run = "(i32.store (local.get $out) (memory.grow (i32.const 40)))
               (i32.store offset=4 (local.get $out) (memory.size))";
    let module = Module::parse(module("", run, "")).unwrap();
    for engine in ENGINES {
        let under = |bytes: u64| {
            let mut limits = Limits::default();
            limits.memory_bytes = bytes;
            Tile::of(&[0; 4], 8).run(engine_with(engine, limits).unwrap().compile(&module).unwrap().as_ref())
        };
        let grown = [4_u32.to_le_bytes(), 44_u32.to_le_bytes()].concat();
        for limit in [44 * 65_536, 64 << 20, Limits::MEMORY_BYTES] {
            assert_eq!(under(limit).unwrap(), grown, "{engine:?} under {limit}");
        }
        for limit in [4 * 65_536, 43 * 65_536] {
            assert_eq!(under(limit).unwrap_err().code(), Code::ModuleOutOfMemory, "{engine:?} under {limit}");
        }
    }
}

/// A module can write down its addresses; they are the same everywhere.
#[test]
fn pointer_values() {
    let run = "(i32.store (local.get $out) (local.get $b))
               (i32.store offset=4 (local.get $out) (local.get $out))
               (i32.store offset=8 (local.get $out) (local.get $in))
               (i32.store offset=12 (local.get $out) (i32.load offset=48 (local.get $b)))";
    let bench = Bench::new(&module(
        r#"{"outputs":[{"role":"w","dtype":"U8","shape":[4096],"tiles":[{"count":256,"len":16,"inputs":[[{"copy":0,"len":16,"strides":[16]}]]}]}]}"#,
        run,
        "",
    ));
    bench.write(&[("t", seeded_bytes(1, 4096))]);
    bench.same_everywhere();
}

#[test]
fn file_offsets() {
    let bench = Bench::new(&module(
        &one_tile(1024, 1024),
        "(memory.copy (local.get $out) (local.get $in) (i32.const 1024))",
        "",
    ));
    let tensor = seeded_bytes(2, 1024);
    let mut seen = Vec::new();
    // The tensor's first byte in the file, modulo a page.
    for offset in [8, 16, 4088, 4096, 4097, 5] {
        bench.write_at(8192 + offset, &tensor);
        seen.push((bench.key(), bench.same_everywhere()));
    }
    seen.dedup();
    assert_eq!(seen.len(), 1, "{seen:?}");
}

#[test]
fn neighbouring_bytes() {
    let bench =
        Bench::new(&module(&one_tile(512, 512), "(memory.copy (local.get $out) (local.get $in) (i32.const 512))", ""));
    let mut seen = Vec::new();
    for seed in 0..4 {
        // Names that are dropped; in the file they lie around the tensor.
        bench.write(&[
            ("a.dropped", seeded_bytes(seed, 333)),
            ("t", seeded_bytes(9, 512)),
            ("z.dropped", seeded_bytes(seed + 50, 77)),
        ]);
        seen.push((bench.key(), bench.same_everywhere()));
    }
    seen.dedup();
    assert_eq!(seen.len(), 1, "{seen:?}");
}

/// What a plan did not name is not there: not for the tile that is computed,
/// and not for a byte of the tensor beside the one that was named.
#[test]
fn undeclared_dependencies() {
    let plan = r#"{"outputs":[{"role":"w","dtype":"U8","shape":[64],"tiles":[{"len":64,"inputs":[[{"copy":0,"offset":64,"len":64}]]}]}]}"#;
    // It also looks for more behind its window.
    let run = "(memory.copy (local.get $out) (local.get $in) (i32.const 64))
               (i64.store (local.get $out) (i64.or (i64.load offset=64 (local.get $in)) (i64.load offset=4096 (local.get $in))))";
    let bench = Bench::new(&module(plan, run, "")).with_inputs("a = \"t\", b = \"u\"");
    let named = |t: Vec<u8>, u: Vec<u8>| {
        bench.write(&[("t", t), ("u", u)]);
        bench.same_everywhere()
    };
    let t = seeded_bytes(3, 192);
    let digest = named(t.clone(), seeded_bytes(4, 100));
    assert_eq!(named(t.clone(), seeded_bytes(5, 100)), digest, "another tensor");
    let mut changed = t.clone();
    changed[..64].fill(0xEE);
    changed[128..].fill(0xEE);
    assert_eq!(named(changed, seeded_bytes(4, 100)), digest, "other bytes of the tensor");
    let mut changed = t;
    changed[100] ^= 1;
    assert_ne!(named(changed, seeded_bytes(4, 100)), digest, "what was named counts");
}

#[test]
fn hidden_state_between_tiles() {
    // Counts calls in a global, in memory and in a table, and writes the counts.
    let run = "(global.set $calls (i32.add (global.get $calls) (i32.const 1)))
               (i32.store (i32.const 512) (i32.add (i32.load (i32.const 512)) (i32.const 1)))
               (i32.store (local.get $out) (global.get $calls))
               (i32.store offset=4 (local.get $out) (i32.load (i32.const 512)))
               (i32.store offset=8 (local.get $out) (ref.is_null (table.get $t (i32.const 0))))
               (i32.store offset=12 (local.get $out) (memory.grow (i32.const 1)))
               (table.set $t (i32.const 0) (ref.func $f))";
    let more = "(global $calls (mut i32) (i32.const 0)) (table $t 1 funcref) (elem declare func $f) (func $f)";
    let plan = r#"{"outputs":[{"role":"w","dtype":"U8","shape":[2048],"tiles":[{"count":128,"len":16}]}]}"#;
    let bench = Bench::new(&module(plan, run, more));
    bench.write(&[("t", seeded_bytes(6, 16))]);
    let one: Vec<u8> = [1_u32, 1, 1, 4].iter().flat_map(|n| n.to_le_bytes()).collect();
    assert_eq!(bench.same_everywhere(), bench.digest_of(&one.repeat(128)));
}

#[test]
fn unwritten_output() {
    // Even tiles dirty all memory that they can reach, odd ones write nothing.
    let run = "(if (i32.eqz (i32.and (i32.load offset=56 (local.get $b)) (i32.const 1)))
                 (then (memory.fill (i32.const 66000) (i32.const 255) (i32.const 190000))))";
    let plan = r#"{"outputs":[{"role":"w","dtype":"U8","shape":[65536],"tiles":[{"count":64,"len":1024,"inputs":[[{"copy":0,"len":16}]]}]}]}"#;
    let bench = Bench::new(&module(plan, run, ""));
    bench.write(&[("t", seeded_bytes(7, 16))]);
    // The output window begins below 66000, so its first bytes stay zero.
    let start = 66_000 - 65_536 - 64 * 3;
    let dirty: Vec<u8> = (0..1024).map(|i| if i < start { 0 } else { 255 }).collect();
    assert_eq!(bench.same_everywhere(), bench.digest_of(&[dirty, vec![0; 1024]].concat().repeat(32)));
}

/// Recursion, endless loops and endless growth fail on every engine, each time
/// anew, and leave no entry. Where exactly they end is the engine's business.
#[test]
fn stack_fuel_and_memory_limits_are_failures_and_never_results() {
    let cases = [
        ("(call $deeper (i32.const 0))", Code::ModuleTrapped, "nest deeper"),
        ("(loop $l (br $l))", Code::ModuleOutOfFuel, "fuel"),
        ("(loop $l (drop (memory.grow (i32.const 1))) (br $l))", Code::ModuleOutOfMemory, "memory"),
    ];
    let more = "(func $deeper (param i32) (call $deeper (i32.add (local.get 0) (i32.const 1))) (drop (i32.load (local.get 0))))";
    for (run, code, what) in cases {
        let bench = Bench::new(&module(&one_tile(64, 64), run, more));
        bench.write(&[("t", seeded_bytes(8, 64))]);
        for engine in ENGINES {
            for attempt in 0..2 {
                let error = bench.build(engine, &weightmill::progress::Silent).unwrap_err();
                assert_eq!(error.code(), code, "{run} on {engine:?}, attempt {attempt}: {error}");
                assert!(error.message().contains(what), "{error}");
                assert_eq!(bench.left_in_store(), 0, "{run} on {engine:?}");
            }
        }
    }
}

#[test]
fn thread_count_and_tile_order() {
    // Every tile is different work: its own number of rounds.
    let run = "(local.set $n (i32.add (i32.mul (i32.load offset=56 (local.get $b)) (i32.const 37)) (i32.const 1)))
               (loop $l
                 (f32.store (local.get $out) (f32.add (f32.load (local.get $out)) (f32.div (f32.load (local.get $in)) (f32.convert_i32_u (local.get $n)))))
                 (br_if $l (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))";
    let plan = r#"{"outputs":[{"role":"w","dtype":"F32","shape":[256],"tiles":[{"count":256,"len":4,"inputs":[[{"copy":0,"len":4,"strides":[4]}]]}]}]}"#;
    let bench = Bench::new(&module(plan, run, ""));
    let values: Vec<u8> = (1..=256).flat_map(|i| (i as f32 * 0.37).to_le_bytes()).collect();
    bench.write(&[("t", values)]);
    assert!(Setting::ALL.iter().any(|s| s.jobs == 8 && s.seed.is_some()));
    bench.same_everywhere();
}

/// Writes to the source when the transform begins, after it was hashed.
struct Writer<'a> {
    bench: &'a Bench,
    written: AtomicBool,
}

impl Progress for Writer<'_> {
    fn stage(&self, what: &str, _: u64) {
        if what == "transform" && !self.written.swap(true, Ordering::Relaxed) {
            // The same size, one byte changed, in the same file.
            self.bench.change_a_byte();
        }
    }
}

#[test]
fn source_changing_during_a_run() {
    let bench =
        Bench::new(&module(&one_tile(64, 64), "(memory.copy (local.get $out) (local.get $in) (i32.const 64))", ""));
    bench.write(&[("t", seeded_bytes(10, 64))]);
    for engine in ENGINES {
        let writer = Writer { bench: &bench, written: AtomicBool::new(false) };
        let error = bench.build(engine, &writer).unwrap_err();
        assert!(writer.written.into_inner());
        assert_eq!(error.code(), Code::SourceChanged, "{engine:?}: {error}");
        assert_eq!(bench.left_in_store(), 0);
    }
    assert!(bench.build(ENGINES[0], &weightmill::progress::Silent).is_ok(), "the next run takes the file as it is");
}
