mod hostile;
mod nans;

use std::sync::Arc;

use super::*;
use crate::error::{Code, Error};

/// Every engine, with little fuel so that endless loops end soon.
fn engines() -> Vec<Arc<dyn Engine>> {
    let fast = Limits { plan_fuel: 200_000_000, ..Limits::default() };
    let slow = Limits { plan_fuel: 30_000_000, ..Limits::default() };
    vec![
        engine_with(EngineName::Wasmtime, fast).unwrap(),
        engine_with(EngineName::Wasmi, slow).unwrap(),
        engine_with(EngineName::Pulley, slow).unwrap(),
    ]
}

/// The request that the hostile modules are planned with: one F32 tensor of
/// 16 elements, one output.
const REQUEST: &[u8] = br#"{"abi":1,"inputs":[{"dtype":"F32","index":0,"role":"in","shape":[16]}],"outputs":["out"],"params":{},"tile_bytes":2097152,"tp":{"rank":0,"size":1}}"#;

/// The one tile of their plans.
fn tile() -> TileRequest<'static> {
    TileRequest {
        target: 0,
        group: 0,
        turn: 0,
        tile: 0,
        offset: 0,
        out_len: 64,
        windows: &[64],
        args: &[7],
        params: b"{}",
    }
}

/// Fills every window with 1, 2, 3 … and keeps the output.
#[derive(Default)]
struct Bytes {
    output: Option<Vec<u8>>,
}

impl TileIo for Bytes {
    fn fill(&mut self, _: usize, memory: &mut [u8]) -> Result<()> {
        memory.iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
        Ok(())
    }

    fn take(&mut self, output: &[u8]) -> Result<()> {
        assert!(self.output.replace(output.to_vec()).is_none(), "taken twice");
        Ok(())
    }
}

/// Fills a window with words and keeps the output's.
struct Words<'a> {
    input: &'a [u32],
    output: Vec<u32>,
}

impl TileIo for Words<'_> {
    fn fill(&mut self, _: usize, memory: &mut [u8]) -> Result<()> {
        let words = self.input.iter().flat_map(|word| word.to_le_bytes());
        memory.iter_mut().zip(words).for_each(|(byte, value)| *byte = value);
        Ok(())
    }

    fn take(&mut self, output: &[u8]) -> Result<()> {
        self.output = output.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        Ok(())
    }
}

fn assemble(text: &str) -> Module {
    Module::parse(wat::parse_str(text).unwrap()).unwrap()
}

/// A module with these bodies of `wm_plan` and `wm_run`.
fn module(pages: u32, plan: &str, run: &str, more: &str) -> String {
    format!(
        r#"(module
  (@custom "weightmill" "{{\"abi\":1,\"name\":\"test\",\"version\":\"1.0.0\"}}")
  (memory (export "memory") {pages})
  (global (export "wm_panic") i32 (i32.const 1024))
  (func (export "wm_abi_v1"))
  (func (export "wm_alloc") (param $len i32) (result i32) (i32.const 65536))
  (func (export "wm_plan") (param $ptr i32) (param $len i32) (result i64) {plan})
  (func (export "wm_run") (param $block i32) (result i64) {run})
  {more})"#
    )
}

mod static_rules {
    use super::*;

    fn refused(bytes: impl Into<Arc<[u8]>>) -> Error {
        Module::parse(bytes).expect_err("the module is refused")
    }

    fn refused_text(text: &str) -> Error {
        refused(wat::parse_str(text).unwrap())
    }

    /// A module with `more` in it, which is too much.
    fn too_large(what: &str, more: &str) {
        let error = refused_text(&module(2, "unreachable", "unreachable", more));
        assert_eq!(error.code(), Code::ModuleTooLarge, "{error}");
        assert!(error.message().contains(what), "{error}");
    }

    #[test]
    fn sizes_are_bounded() {
        too_large("locals in one function", &format!("(func (local {}))", "i64 ".repeat(4097)));
        too_large("bytes in one function", &format!("(func {})", "nop ".repeat(300_000)));
        too_large("nested blocks", &format!("(func {} {})", "block ".repeat(4097), "end ".repeat(4097)));
        too_large("nested loops", &format!("(func {} {})", "loop ".repeat(65), "end ".repeat(65)));
        too_large("control flow to compile", &format!("(func {})", "block i32.const 0 br_if 0 end ".repeat(17_000)));
        too_large("control flow to compile", &format!("(func {})", "loop end ".repeat(20_000)));
        too_large(
            "control flow to compile",
            &format!("(func (local {}) {})", "i64 ".repeat(2_000), "loop i32.const 0 br_if 0 end ".repeat(200)),
        );
        too_large("bytes of code", &format!("(func {})", "nop ".repeat(250_000)).repeat(9));
        too_large("targets in one br_table", &format!("(func (br_table {} (i32.const 0)))", "0 ".repeat(4098)));
        too_large("functions", &"(func)".repeat(32_769));
        too_large("globals", &"(global i32 (i32.const 0))".repeat(4_097));
        too_large("element segments", &"(elem func)".repeat(1_025));
        too_large("elements in element segments", &format!("(func $f)(elem func {})", "$f ".repeat(65_537)));
        too_large("data segments", &"(data \"\")".repeat(16_385));
        let exports: String = (0..1_024).map(|i| format!("(func (export \"{i}\"))")).collect();
        too_large("exports", &exports);
        let types: String = (0..4_097).map(|_| "(type (func))").collect();
        too_large("types", &types);
        let long = format!("(@custom \"x\" \"{}\")", "a".repeat(16 << 20));
        too_large("bytes, at most 16777216", &long);
    }

    #[test]
    fn at_the_limits_a_module_is_fine_and_compiles() {
        let more = [
            format!("(func (local {}))", "i64 ".repeat(4_096)),
            format!("(func {})", "nop ".repeat(260_000)),
            format!("(func {} {})", "block ".repeat(4_095), "end ".repeat(4_095)),
            format!("(func (param i32) (br_table {} (local.get 0)))", "0 ".repeat(4_097)),
            "(global i32 (i32.const 0))".repeat(4_000),
        ]
        .concat();
        let module = assemble(&module(4096, "unreachable", "unreachable", &more));
        assert_eq!(module.memory_bytes(), Limits::MEMORY_BYTES);
        for engine in engines() {
            let program = engine.compile(&module).unwrap();
            assert_eq!(program.plan(REQUEST).unwrap_err().code(), Code::ModuleTrapped);
        }
    }

    #[test]
    fn what_is_no_module_is_refused() {
        assert_eq!(refused(*b"").code(), Code::ModuleBadAbi);
        assert_eq!(refused(*b"(module)").code(), Code::ModuleBadAbi);
        assert_eq!(refused(*b"\0asm").code(), Code::ModuleBadAbi);
        assert_eq!(refused(*b"\0asm\x02\0\0\0").code(), Code::ModuleBadAbi);
        let component = refused(wat::parse_str("(component)").unwrap());
        assert_eq!(component.code(), Code::ModuleUnsupportedFeature);
        assert!(component.message().contains("component"), "{component}");
        let text = module(2, "unreachable", "unreachable", "")
            .replace("test", &"n".repeat(weightmill_guest::abi::limits::METADATA_BYTES));
        assert_eq!(refused_text(&text).code(), Code::ModuleTooLarge);
    }

    #[test]
    fn no_truncation_or_flipped_bit_gets_through_unseen() {
        let text = module(2, "(i64.const 0)", "(i64.const 0)", "(table 2 funcref)(data (i32.const 9) \"abc\")");
        let whole = wat::parse_str(&text).unwrap();
        for len in 0..whole.len() {
            // A custom section may be missing at the end; its identifier is 0.
            assert!(Module::parse(&whole[..len]).is_err() || whole[len] == 0, "{len} bytes");
        }
        // What still passes has to be safe to compile and to call.
        let engine = engine_with(EngineName::Wasmtime, Limits { plan_fuel: 10_000, ..Limits::default() }).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(module) = Module::parse(flipped) {
                let program = engine.compile(&module).unwrap();
                let _ = program.plan(REQUEST);
            }
        }
    }

    #[test]
    fn what_a_module_says_can_be_read() {
        let more = "(func (export \"f\") (param f32 i64))(global (export \"g\") (mut i64) (i64.const 0))(data (i32.const 0) \"abc\")";
        let text = module(3, "unreachable", "unreachable", more);
        let bytes = wat::parse_str(&text).unwrap();
        let module = Module::parse(bytes.clone()).unwrap();
        assert_eq!(module.digest(), ModuleDigest::of(&bytes));
        assert_eq!(module.bytes(), bytes);
        assert_eq!(module.metadata().name, "test");
        assert_eq!((module.functions(), module.data_bytes(), module.memory_bytes()), (5, 3, 3 * 65_536));
        let what = |name: &str| module.exports().iter().find(|e| e.name == name).unwrap().what.as_str();
        assert_eq!(what("wm_plan"), "function (i32, i32) -> i64");
        assert_eq!(what("memory"), "memory");
        assert_eq!(what("wm_panic"), "global i32");
        assert_eq!(what("f"), "function (f32, i64) -> ()");
        assert_eq!(what("g"), "mutable global i64");
    }

    #[test]
    fn float_arithmetic_is_found() {
        let has = |body: &str| {
            assemble(&module(2, "unreachable", "unreachable", &format!("(func (param f32 f64 v128) {body})")))
                .has_float_arithmetic()
        };
        for body in [
            "(drop (f32.add (local.get 0) (local.get 0)))",
            "(drop (f64.sqrt (local.get 1)))",
            "(drop (f32.nearest (local.get 0)))",
            "(drop (f32.demote_f64 (local.get 1)))",
            "(drop (f64x2.promote_low_f32x4 (local.get 2)))",
            "(drop (f32x4.min (local.get 2) (local.get 2)))",
            "(if (i32.const 0) (then (drop (f64x2.div (local.get 2) (local.get 2)))))",
        ] {
            assert!(has(body), "{body}");
        }
        for body in [
            "",
            "(drop (f32.neg (local.get 0)))",
            "(drop (f32.copysign (local.get 0) (f32.const nan)))",
            "(drop (f32.lt (local.get 0) (local.get 0)))",
            "(drop (f64.convert_i64_u (i64.reinterpret_f64 (local.get 1))))",
            "(drop (i32.trunc_sat_f32_s (local.get 0)))",
            "(drop (f32x4.pmin (local.get 2) (local.get 2)))",
            "(drop (f32x4.abs (local.get 2)))",
        ] {
            assert!(!has(body), "{body}");
        }
    }
}

mod calls {
    use super::*;

    /// Adds the words of its input windows, as f32, into the output window.
    const ADD: &str = r"
      (local $in i32) (local $out i32) (local $end i32)
      (local.set $in (i32.load (i32.load offset=32 (local.get $block))))
      (local.set $out (i32.load offset=24 (local.get $block)))
      (local.set $end (i32.add (local.get $out) (i32.load offset=28 (local.get $block))))
      (loop $l
        (v128.store (local.get $out)
          (f32x4.add (v128.load (local.get $in)) (f32x4.splat (f32.const 1))))
        (local.set $in (i32.add (local.get $in) (i32.const 16)))
        (br_if $l (i32.lt_u
          (local.tee $out (i32.add (local.get $out) (i32.const 16)))
          (local.get $end))))
      (i64.const 0)";

    #[test]
    fn nans_are_canonical_on_every_engine() {
        let module = assemble(&module(2, "unreachable", ADD, ""));
        assert!(module.has_float_arithmetic());
        let nans = [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFBF_FFFF, 0x7FC1_2345, 0xFFFF_FFFF];
        let mut input: Vec<u32> = nans.to_vec();
        input.extend([0x7F80_0000, 0xFF80_0000, 0, 0x8000_0000, 1, 0x3F80_0000, 0, 0, 0, 0]);
        for engine in engines() {
            let program = engine.compile(&module).unwrap();
            let mut io = Words { input: &input, output: Vec::new() };
            program.run(&tile(), &mut io).unwrap();
            assert_eq!(io.output[..6], [0x7FC0_0000; 6], "{}", engine.name());
            assert_eq!(io.output[6..8], [0x7F80_0000, 0xFF80_0000], "{}", engine.name());
            assert_eq!(io.output[11], 0x4000_0000);
        }
    }

    #[test]
    fn the_same_call_takes_the_same_fuel() {
        let module = assemble(&module(2, "unreachable", ADD, ""));
        for engine in engines() {
            let program = engine.compile(&module).unwrap();
            let fuel: Vec<RunReply> = (0..3).map(|_| program.run(&tile(), &mut Bytes::default()).unwrap()).collect();
            assert!(matches!(fuel[0], RunReply::Done { fuel } if fuel > 0));
            assert!(fuel.iter().all(|reply| *reply == fuel[0]), "{}", engine.name());
        }
    }

    #[test]
    fn a_tiles_fuel_grows_with_its_bytes() {
        let limits = Limits { run_fuel_base: 1000, ..Limits::default() };
        assert_eq!(limits.run_fuel(64, 100), 7400);
        assert_eq!(limits.run_fuel(u64::MAX, 1), 1000 + 65_536);
        assert_eq!(limits.run_fuel(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn what_runs_on_the_way_back_is_paid_for() {
        // Straight code, and the same behind every call of a deep recursion.
        let roots = "f64.sqrt ".repeat(20_000);
        let straight = format!("f64.const 2 {roots} drop i64.const 0");
        let deep = "(call $f (i32.const 1000)) (i64.const 0)";
        let recursion = format!(
            "(global $g (mut f64) (f64.const 2))
             (func $f (param i32)
               local.get 0 if local.get 0 i32.const 1 i32.sub call $f end
               global.get $g {roots} global.set $g)"
        );
        let few = Limits { run_fuel_base: 0, ..Limits::default() };
        let some = Limits { run_fuel_base: 200_000, ..Limits::default() };
        for name in EngineName::ALL {
            for (limits, run, more) in [(few, straight.as_str(), ""), (some, deep, recursion.as_str())] {
                let module = assemble(&module(2, "unreachable", run, more));
                let program = engine_with(*name, limits).unwrap().compile(&module).unwrap();
                let error = program.run(&tile(), &mut Bytes::default()).unwrap_err();
                assert_eq!(error.code(), Code::ModuleOutOfFuel, "{name:?}");
            }
        }
    }

    #[test]
    fn errors_of_the_io_end_the_call() {
        struct Broken;
        impl TileIo for Broken {
            fn fill(&mut self, _: usize, _: &mut [u8]) -> Result<()> {
                Err(Error::new(Code::SourceChanged, "gone"))
            }
            fn take(&mut self, _: &[u8]) -> Result<()> {
                unreachable!("nothing was computed")
            }
        }
        let module = assemble(&module(2, "unreachable", "(i64.const 0)", ""));
        for engine in engines() {
            let error = engine.compile(&module).unwrap().run(&tile(), &mut Broken).unwrap_err();
            assert_eq!(error.code(), Code::SourceChanged);
        }
    }

    #[test]
    fn an_engines_own_memory_limit_holds() {
        let limits = Limits { memory_bytes: 4 * PAGE_BYTES, ..Limits::default() };
        let grow = |pages: u32| format!("(drop (memory.grow (i32.const {pages}))) (i64.const 1)");
        for name in EngineName::ALL {
            let engine = engine_with(*name, limits).unwrap();
            let plan =
                |pages: u32| engine.compile(&assemble(&module(2, &grow(pages), "unreachable", "")))?.plan(REQUEST);
            assert!(plan(2).is_ok());
            assert_eq!(plan(3).unwrap_err().code(), Code::ModuleOutOfMemory);
            let large = engine.compile(&assemble(&module(5, "unreachable", "unreachable", "")));
            assert_eq!(large.err().unwrap().code(), Code::ModuleTooLarge);
        }
    }

    #[test]
    fn threads_share_a_program_and_nothing_else() {
        // Grows, dirties everything, and refuses if anything was dirty before.
        let run = r"
          (local $at i32)
          (drop (memory.grow (i32.const 30)))
          (local.set $at (i32.const 131072))
          (loop $l
            (if (i64.ne (i64.load (local.get $at)) (i64.const 0)) (then unreachable))
            (i64.store (local.get $at) (i64.const -1))
            (br_if $l (i32.lt_u
              (local.tee $at (i32.add (local.get $at) (i32.const 8)))
              (i32.const 2097152))))
          (i32.store (i32.load offset=24 (local.get $block)) (i32.load offset=56 (local.get $block)))
          (i64.const 0)";
        let module = assemble(&module(2, "unreachable", run, ""));
        let program = engine(EngineName::Wasmtime).unwrap().compile(&module).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let program = &program;
                scope.spawn(move || {
                    for turn in 0..50 {
                        let mut io = Bytes::default();
                        let number = thread * 1000 + turn;
                        program.run(&TileRequest { tile: number, ..tile() }, &mut io).unwrap();
                        assert_eq!(io.output.unwrap()[..4], number.to_le_bytes());
                    }
                });
            }
        });
    }

    #[test]
    fn a_program_works_after_every_kind_of_trap() {
        // Traps in the way that the argument says, or copies it.
        let run = r"
          (local $how i32)
          (local.set $how (i32.load (i32.load offset=40 (local.get $block))))
          (if (i32.eq (local.get $how) (i32.const 1)) (then unreachable))
          (if (i32.eq (local.get $how) (i32.const 2)) (then (loop $l (br $l))))
          (if (i32.eq (local.get $how) (i32.const 3)) (then (call $f)))
          (if (i32.eq (local.get $how) (i32.const 4)) (then (drop (memory.grow (i32.const 5000)))))
          (if (i32.eq (local.get $how) (i32.const 5)) (then (drop (i64.load (i32.const -1)))))
          (i32.store (i32.load offset=24 (local.get $block)) (local.get $how))
          (i64.const 0)";
        let text = module(2, "unreachable", run, "(func $f (call $f) (i32.store (i32.const 0) (i32.const 1)))");
        let module = assemble(&text);
        let codes = [
            Code::ModuleTrapped,
            Code::ModuleOutOfFuel,
            Code::ModuleTrapped,
            Code::ModuleOutOfMemory,
            Code::ModuleTrapped,
        ];
        for engine in engines() {
            let program = engine.compile(&module).unwrap();
            for round in 0..2 {
                for (how, code) in (1..).zip(codes) {
                    let error =
                        program.run(&TileRequest { args: &[how], ..tile() }, &mut Bytes::default()).unwrap_err();
                    assert_eq!(error.code(), code, "{} round {round} way {how}: {error}", engine.name());
                    let mut io = Bytes::default();
                    program.run(&TileRequest { args: &[9], ..tile() }, &mut io).unwrap();
                    assert_eq!(io.output.unwrap()[0], 9);
                }
            }
        }
    }
}

#[test]
fn versions_are_those_of_the_lock_file() {
    let lock = include_str!("../../../../Cargo.lock");
    for (name, version) in [("wasmtime", wasmtime::VERSION), ("wasmi", wasmi::VERSION)] {
        let entry = format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n");
        assert!(lock.contains(&entry), "{name} is not {version}");
    }
}

#[test]
fn engines_have_names() {
    for name in EngineName::ALL {
        assert_eq!(EngineName::from_name(name.as_str()), Some(*name));
        assert_eq!(engine(*name).unwrap().name(), name.as_str());
    }
    assert_eq!(EngineName::from_name("v8"), None);
}
