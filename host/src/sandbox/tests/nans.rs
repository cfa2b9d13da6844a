//! Made-up arithmetic on every engine. Each has its own way to canonical NaNs:
//! code that is rewritten where bits can be seen, code that is rewritten
//! everywhere, a compiler that does it. So each checks the others.

use std::fmt::Write as _;

use super::*;

/// Bytes of the output, in slots that vectors are stored to.
const OUT: u64 = 64;

/// Writes a body of `wm_run` that computes in locals, in loops and branches,
/// with operands that are NaNs half the time.
struct Author {
    state: u64,
    text: String,
    /// Open loops; each has a counter of its own.
    loops: usize,
    /// Open blocks that a branch may leave.
    blocks: usize,
}

#[derive(Clone, Copy)]
enum Ty {
    F32,
    F64,
    V128,
}

impl Ty {
    fn name(self) -> &'static str {
        match self {
            Ty::F32 => "f32",
            Ty::F64 => "f64",
            Ty::V128 => "v128",
        }
    }
}

const TYPES: [Ty; 3] = [Ty::F32, Ty::F64, Ty::V128];

impl Author {
    fn below(&mut self, n: usize) -> usize {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % n
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn write(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn local(&mut self, ty: Ty) -> String {
        format!("${}{}", ty.name(), self.below(3))
    }

    fn statements(&mut self, depth: usize) {
        for _ in 0..=self.below(4) {
            self.statement(depth);
        }
    }

    fn statement(&mut self, depth: usize) {
        let choice = if depth == 0 { self.below(5) } else { self.below(10) };
        match choice {
            0..=2 => {
                let ty = self.one_of(&TYPES);
                let local = self.local(ty);
                _ = write!(self.text, "(local.set {local} ");
                self.value(ty, 3);
                self.write(")\n");
            }
            3 => {
                let ty = self.one_of(&TYPES);
                let slot = self.below(4) * 16;
                _ = write!(self.text, "({}.store offset={slot} (local.get $out) ", ty.name());
                self.value(ty, 3);
                self.write(")\n");
            }
            4 => {
                self.write("(drop ");
                let ty = self.one_of(&TYPES);
                self.value(ty, 2);
                self.write(")\n");
            }
            5 if self.loops < 2 => {
                let (counter, turns) = (self.loops, 1 + self.below(3));
                _ = writeln!(self.text, "(local.set $i{counter} (i32.const {turns})) (loop $l{counter}");
                self.loops += 1;
                self.statements(depth - 1);
                self.loops -= 1;
                _ = writeln!(
                    self.text,
                    "(br_if $l{counter} (local.tee $i{counter} (i32.sub (local.get $i{counter}) (i32.const 1)))))"
                );
            }
            6 => {
                self.write("(if ");
                self.condition();
                self.write("(then\n");
                self.statements(depth - 1);
                self.write(")");
                if self.below(2) == 0 {
                    self.write("(else\n");
                    self.statements(depth - 1);
                    self.write(")");
                }
                self.write(")\n");
            }
            7 if self.blocks > 0 => {
                let label = self.below(self.blocks);
                if self.below(4) == 0 {
                    _ = writeln!(self.text, "(br $b{label})");
                } else {
                    _ = write!(self.text, "(br_if $b{label} ");
                    self.condition();
                    self.write(")\n");
                }
            }
            8 if self.blocks > 0 => {
                let labels = [self.below(self.blocks), self.below(self.blocks), self.below(self.blocks)];
                _ = write!(self.text, "(br_table $b{} $b{} $b{} ", labels[0], labels[1], labels[2]);
                self.condition();
                self.write(")\n");
            }
            _ => {
                _ = writeln!(self.text, "(block $b{}", self.blocks);
                self.blocks += 1;
                self.statements(depth - 1);
                self.blocks -= 1;
                self.write(")\n");
            }
        }
    }

    /// An i32: about numbers, or about bits.
    fn condition(&mut self) {
        match self.below(3) {
            0 => {
                let op = self.one_of(&["eq", "lt", "ge", "ne"]);
                _ = write!(self.text, "(f32.{op} ");
                self.value(Ty::F32, 1);
                self.value(Ty::F32, 1);
                self.write(")");
            }
            1 => {
                self.write("(i32.and (i32.const 1) (i32.shr_u (i32.reinterpret_f32 ");
                self.value(Ty::F32, 1);
                let shift = self.one_of(&[0, 5, 22, 31]);
                _ = write!(self.text, ") (i32.const {shift})))");
            }
            _ => {
                self.write("(i32.and (i32.trunc_sat_f64_s ");
                self.value(Ty::F64, 1);
                self.write(") (i32.const 3))");
            }
        }
    }

    fn value(&mut self, ty: Ty, depth: usize) {
        let name = ty.name();
        match if depth == 0 { self.below(3) } else { self.below(12) } {
            0 | 1 => {
                let local = self.local(ty);
                _ = write!(self.text, "(local.get {local})");
            }
            2 => match ty {
                Ty::F32 => {
                    let constant = self.one_of(&["nan:0x412345", "-nan:0x1", "-nan", "inf", "1.5", "0"]);
                    _ = write!(self.text, "(f32.const {constant})");
                }
                Ty::F64 => {
                    let constant = self.one_of(&["nan:0x4123456789abc", "-nan", "-inf", "2.5", "0"]);
                    _ = write!(self.text, "(f64.const {constant})");
                }
                Ty::V128 => {
                    let offset = self.below(49);
                    _ = write!(self.text, "(v128.load offset={offset} (local.get $in))");
                }
            },
            3 => {
                let local = self.local(ty);
                _ = write!(self.text, "(local.tee {local} ");
                self.value(ty, depth - 1);
                self.write(")");
            }
            4 => {
                if matches!(ty, Ty::V128) {
                    self.write("(v128.bitselect ");
                    (0..3).for_each(|_| self.value(ty, depth - 1));
                } else {
                    self.write("(select ");
                    (0..2).for_each(|_| self.value(ty, depth - 1));
                    self.condition();
                }
                self.write(")");
            }
            5 => {
                _ = write!(self.text, "(if (result {name}) ");
                self.condition();
                self.write("(then ");
                self.value(ty, depth - 1);
                self.write(")(else ");
                self.value(ty, depth - 1);
                self.write("))");
            }
            6 => {
                _ = write!(self.text, "(call $same_{name} ");
                self.value(ty, depth - 1);
                self.write(")");
            }
            7 => self.other_type(ty, depth - 1),
            _ => self.arithmetic(ty, depth - 1),
        }
    }

    fn other_type(&mut self, ty: Ty, depth: usize) {
        let (op, from) = match ty {
            Ty::F32 => self.one_of(&[
                ("f32.demote_f64", Ty::F64),
                ("f32x4.extract_lane 2", Ty::V128),
                ("f32.neg", Ty::F32),
                ("f32.abs", Ty::F32),
            ]),
            Ty::F64 => {
                self.one_of(&[("f64.promote_f32", Ty::F32), ("f64x2.extract_lane 1", Ty::V128), ("f64.neg", Ty::F64)])
            }
            Ty::V128 => self.one_of(&[
                ("f32x4.splat", Ty::F32),
                ("f64x2.splat", Ty::F64),
                ("f64x2.promote_low_f32x4", Ty::V128),
                ("f32x4.demote_f64x2_zero", Ty::V128),
                ("i32x4.trunc_sat_f32x4_s", Ty::V128),
                ("i32x4.trunc_sat_f64x2_u_zero", Ty::V128),
                ("f32x4.neg", Ty::V128),
                ("v128.not", Ty::V128),
            ]),
        };
        _ = write!(self.text, "({op} ");
        self.value(from, depth);
        self.write(")");
    }

    fn arithmetic(&mut self, ty: Ty, depth: usize) {
        let binary = ["add", "sub", "mul", "div", "min", "max"];
        let unary = ["sqrt", "ceil", "nearest", "trunc", "floor"];
        let lanes = match ty {
            Ty::V128 => self.one_of(&["f32x4", "f32x4", "f64x2"]),
            scalar => scalar.name(),
        };
        if matches!(ty, Ty::V128) && self.below(4) == 0 {
            let ops = ["f32x4.pmin", "f64x2.pmax", "f32x4.lt", "f64x2.eq", "i32x4.add", "v128.xor", "f32x4.ne"];
            let op = self.one_of(&ops);
            _ = write!(self.text, "({op} ");
            self.value(ty, depth);
        } else if self.below(4) == 0 {
            let op = self.one_of(&unary);
            _ = write!(self.text, "({lanes}.{op} ");
        } else {
            let op = self.one_of(&binary);
            _ = write!(self.text, "({lanes}.{op} ");
            self.value(ty, depth);
        }
        self.value(ty, depth);
        self.write(")");
    }
}

fn program(seed: u64) -> String {
    let mut author = Author { state: seed, text: String::new(), loops: 0, blocks: 0 };
    author.statements(4);
    for ty in TYPES {
        for number in 0..3 {
            // Whatever is left is looked at.
            let (name, slot) = (ty.name(), number * 16 + author.below(2) * 16);
            _ = write!(author.text, "({name}.store offset={slot} (local.get $out) (local.get ${name}{number}))");
            author.statements(2);
        }
    }
    let locals: String = TYPES
        .iter()
        .flat_map(|ty| (0..3).map(|i| format!("(local ${0}{i} {0})", ty.name())))
        .chain((0..2).map(|i| format!("(local $i{i} i32)")))
        .collect();
    let same: String =
        TYPES.iter().map(|ty| format!("(func $same_{0} (param {0}) (result {0}) local.get 0)", ty.name())).collect();
    let run = format!(
        "(local $out i32) (local $in i32) {locals}
         (local.set $out (i32.load offset=24 (local.get $block)))
         (local.set $in (i32.load (i32.load offset=32 (local.get $block))))
         {}
         (i64.const 0)",
        author.text
    );
    module(2, "unreachable", &run, &same)
}

#[test]
fn engines_agree_on_made_up_arithmetic() {
    let nans = [0x7FC0_0000_u32, 0xFFC0_0000, 0x7F80_0001, 0xFFF1_2345, 0x7FF8_0000, 0xFFF8_0000];
    let numbers = [1.5_f32, -0.0, f32::INFINITY, f32::MIN_POSITIVE, -2.25, 3e38, 0.0, 7.0, 1e-40, -1.0];
    let input: Vec<u32> = nans.into_iter().chain(numbers.map(f32::to_bits)).collect();
    let engines = engines();
    let mut with_nans = 0;
    for seed in 0..500 {
        let text = program(seed);
        let module = assemble(&text);
        let outputs: Vec<Vec<u32>> = engines
            .iter()
            .map(|engine| {
                let mut io = Words { input: &input, output: Vec::new() };
                engine.compile(&module).unwrap().run(&tile(), &mut io).unwrap();
                io.output
            })
            .collect();
        assert_eq!(outputs[0].len() * 4, OUT as usize);
        for (engine, output) in engines.iter().zip(&outputs) {
            assert_eq!(output, &outputs[1], "seed {seed}, {} and wasmi:\n{text}", engine.name());
        }
        with_nans += usize::from(outputs[0].iter().any(|word| f32::from_bits(*word).is_nan()));
    }
    assert!(with_nans > 200, "{with_nans} programs gave a NaN");
}
