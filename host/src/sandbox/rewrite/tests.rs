use super::*;

const EVERYWHERE: Rewrite = Rewrite { nans: Some(Nans::Everywhere), fuel: false };
const WHERE_SEEN: Rewrite = Rewrite { nans: Some(Nans::WhereSeen), fuel: false };
const FUEL: Rewrite = Rewrite { nans: None, fuel: true };

/// What makes the F32 on the stack canonical, with local 9.
const F32_NAN: &str = " local.tee 9 f32.const nan local.get 9 local.get 9 f32.eq select ";
/// The same for four lanes.
const F32X4_NAN: &str = " local.tee 9 v128.const i32x4 0x7fc00000 0x7fc00000 0x7fc00000 0x7fc00000 local.get 9 local.get 9 f32x4.eq v128.bitselect ";

fn module(locals: &str, body: &str) -> Vec<u8> {
    let text = format!(
        "(module (memory 1) (global $g (mut f32) (f32.const 0))
           (func $f (param f32 f32 v128) (result f32)
             (local f32 f32 v128 v128 v128 i32) {locals}
             {body}))"
    );
    wat::parse_str(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// In `body`, `(*)` marks where a value is to be made canonical.
fn is_canonical_where_marked(ty: &str, body: &str) {
    let (original, code) = (body.replace("(*)", ""), if ty == "f32" { F32_NAN } else { F32X4_NAN });
    let local = if body.contains("(*)") { format!("(local {ty})") } else { String::new() };
    let expected = module(&local, &body.replace("(*)", code));
    wasmparser::validate(&expected).unwrap();
    let found = WHERE_SEEN.apply(&module("", &original)).unwrap().into_owned();
    assert_eq!(found, expected, "{body}");
}

#[test]
fn only_what_may_make_a_nan_changes() {
    let plain = "(module (memory 1) (func (param f32) (result f32) local.get 0 f32.neg) (data \"x\"))";
    assert!(matches!(EVERYWHERE.apply(&wat::parse_str(plain).unwrap()).unwrap(), Cow::Borrowed(_)));
    let wat = |locals: &str, f32: &str, f64x2: &str| {
        format!(
            "(module (memory 1)
               (func (param f32 i32) (result f32) (local f64 f64) {locals}
                 local.get 0 local.get 0 f32.add {f32} local.get 0 f32.div {f32}
                 v128.const i64x2 1 2 v128.const i64x2 3 4 f64x2.mul {f64x2} drop)
               (func) (data (i32.const 3) \"x\"))"
        )
    };
    let by_hand = wat::parse_str(wat(
        "(local f32) (local v128)",
        "local.tee 4 f32.const nan local.get 4 local.get 4 f32.eq select",
        "local.tee 5 v128.const i64x2 0x7FF8000000000000 0x7FF8000000000000 local.get 5 local.get 5 f64x2.eq v128.bitselect",
    ));
    let module = wat::parse_str(wat("", "", "")).unwrap();
    assert_eq!(EVERYWHERE.apply(&module).unwrap(), by_hand.unwrap());
}

#[test]
fn of_a_chain_only_the_end_is_seen() {
    for body in [
        "local.get 0 local.get 1 f32.mul local.get 0 f32.add f32.sqrt (*)",
        // Comparisons and conversions do not see which NaN it is, nor does nobody.
        "local.get 0 local.get 1 f32.mul local.get 0 f32.lt drop local.get 0",
        "local.get 0 local.get 1 f32.mul i32.trunc_sat_f32_s drop local.get 0",
        "local.get 0 local.get 1 f32.mul drop local.get 0",
        // Everything that sees bits.
        "i32.const 0 local.get 0 local.get 1 f32.mul (*) f32.store local.get 0",
        "local.get 0 local.get 1 f32.mul (*) i32.reinterpret_f32 drop local.get 0",
        "local.get 0 local.get 1 f32.mul (*) f32.neg",
        "local.get 0 local.get 1 f32.mul (*) global.set $g local.get 0",
        "local.get 0 local.get 1 f32.mul (*) return",
        "local.get 0 local.get 1 f32.mul (*) br 0",
        "block (result f32) local.get 0 local.get 1 f32.mul (*) end local.get 0 f32.add (*)",
        "local.get 0 local.get 1 f32.mul (*) local.get 0 i32.const 1 select",
        "local.get 0 local.get 1 f32.mul (*) local.get 1 local.get 2 call $f",
        "local.get 0 local.get 1 f32.mul (*) i32.const 0 br_if 0 f32.abs",
    ] {
        is_canonical_where_marked("f32", body);
    }
    for body in [
        "local.get 2 local.get 2 f32x4.mul local.get 2 f32x4.add local.set 5 local.get 0",
        "i32.const 0 local.get 2 local.get 2 f32x4.mul local.get 2 f32x4.add (*) v128.store local.get 0",
        "local.get 2 local.get 2 f32x4.mul (*) f32x4.extract_lane 0",
        "local.get 2 local.get 2 f32x4.mul (*) local.get 2 f32x4.pmin drop local.get 0",
        // Other lanes are other numbers.
        "local.get 2 local.get 2 f32x4.mul (*) local.get 2 f64x2.eq drop local.get 0",
    ] {
        is_canonical_where_marked("v128", body);
    }
}

#[test]
fn a_sum_in_a_loop_is_seen_after_it() {
    let turn = "local.get 5 local.get 2 local.get 2 f32x4.mul f32x4.add MADE local.set 5 SEEN i32.const 0 br_if 0";
    let sum = |begin: &str, made: &str, seen: &str, after: &str| {
        format!(
            "{begin} loop {} end i32.const 0 local.get 5 {after} v128.store local.get 0",
            turn.replace("MADE", made).replace("SEEN", seen)
        )
    };
    // It begins at zero, at a number, at another result.
    is_canonical_where_marked("v128", &sum("", "", "", "(*)"));
    is_canonical_where_marked("v128", &sum("v128.const f32x4 1 2 3 4 local.set 5", "", "", "(*)"));
    is_canonical_where_marked("v128", &sum("local.get 2 f32x4.sqrt local.set 5", "", "", "(*)"));
    is_canonical_where_marked(
        "v128",
        &sum("local.get 2 f32x4.sqrt local.set 6 local.get 6 local.set 5", "", "", "(*)"),
    );
    // Whatever else it begins at has to stay what it is.
    is_canonical_where_marked("v128", &sum("local.get 2 local.set 5", "(*)", "", ""));
    is_canonical_where_marked("v128", &sum("i32.const 0 v128.load local.set 5", "(*)", "", ""));
    is_canonical_where_marked("v128", &sum("v128.const f32x4 nan:0x1 0 0 0 local.set 5", "(*)", "", ""));
    is_canonical_where_marked("v128", &sum("local.get 2 f64x2.abs local.set 5", "(*)", "", ""));
    // But not where nothing is seen of it.
    let unseen = sum("local.get 2 local.set 5", "", "", "").replace("v128.store", "local.get 2 f32x4.eq drop drop");
    is_canonical_where_marked("v128", &unseen);
    // Seen at every turn, it is made canonical once a turn.
    is_canonical_where_marked("v128", &sum("", "(*)", "i32.const 0 local.get 5 v128.store", ""));
    is_canonical_where_marked(
        "v128",
        &sum("", "(*)", "i32.const 0 local.get 5 v128.store i32.const 0 local.get 5 v128.store", ""),
    );
}

#[test]
fn a_local_may_serve_two_purposes() {
    // First a vector of bits, then a sum.
    let body = "i32.const 0 v128.load local.set 5 i32.const 0 local.get 5 v128.store
        v128.const i64x2 0 0 local.set 5
        loop local.get 5 local.get 2 f32x4.add local.set 5 i32.const 0 br_if 0 end
        i32.const 0 local.get 5 (*) v128.store local.get 0";
    is_canonical_where_marked("v128", body);
    // What one branch sets is one of the values after both.
    let both = |one: &str, other: &str, after: &str| {
        format!(
            "i32.const 0 if local.get 2 f32x4.sqrt {one} local.set 5 else {other} local.set 5 end
             i32.const 0 local.get 5 {after} v128.store local.get 0"
        )
    };
    is_canonical_where_marked("v128", &both("(*)", "v128.const i64x2 0 0", ""));
    is_canonical_where_marked("v128", &both("(*)", "local.get 2", ""));
    is_canonical_where_marked("v128", &both("", "local.get 2 f32x4.ceil", "(*)"));
    // Of two kinds, each is canonical where it is made.
    let two = module("", &both("", "local.get 2 f64x2.sqrt", ""));
    assert_eq!(WHERE_SEEN.apply(&two).unwrap(), EVERYWHERE.apply(&two).unwrap());
    // A branch out of a block, over a set.
    let body = "block local.get 2 f32x4.sqrt (*) local.set 5 i32.const 0 br_if 0 local.get 2 local.set 5 end
        i32.const 0 local.get 5 v128.store local.get 0";
    is_canonical_where_marked("v128", body);
    // What cannot be reached brings nothing.
    let body = "block br 0 local.get 2 f32x4.sqrt local.set 5 loop br 0 end end
        i32.const 0 local.get 5 v128.store local.get 0";
    is_canonical_where_marked("v128", body);
}

#[test]
fn a_copy_and_its_original_are_seen_apart() {
    // `tee` leaves a copy on the stack: the sum of both is looked at, and the
    // local is not.
    let body = "i32.const 0 local.get 2 f32x4.sqrt local.tee 5 local.get 5 f32x4.add (*) v128.store local.get 0";
    is_canonical_where_marked("v128", body);
    let body = "i32.const 0 local.get 2 f32x4.sqrt (*) local.tee 5 v128.store local.get 5 f32x4.extract_lane 1";
    is_canonical_where_marked("v128", body);
}

#[test]
fn fuel_is_taken_given_back_and_asked_for() {
    // `$…` stands for what is added.
    let text = |added: &[(&str, String)]| {
        let mut text = "(module (memory (export \"m\") 1) (global (export \"g\") i32 (i32.const 7)) $global $export
            (func $f (param i32) (result i32) $locals $enter
              nop i32.const 0 i32.const 0 local.get 0 $fill memory.fill
              loop $ask
                local.get 0 $call call $f $take drop
                local.get 0 local.get 0 $return br_if 1
                drop local.get 0 $stay br_if 0 $end
              end
              local.get 0 $leave))"
            .to_string();
        for name in
            ["global", "export", "locals", "enter", "fill", "ask", "call", "take", "return", "stay", "end", "leave"]
        {
            let code = added.iter().find(|(of, _)| *of == name).map_or("", |(_, code)| code.as_str());
            text = text.replace(&format!("${name}"), code);
        }
        wat::parse_str(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    };
    let pay = |units: u64| format!("local.get 1 i64.const {units} i64.sub local.set 1");
    let (take, give) = ("global.get 1 local.set 1", "local.get 1 global.set 1");
    let ask = format!("local.get 1 i64.const 0 i64.lt_s if {give} unreachable end");
    let operand = "local.tee 2 local.get 1 local.get 2 i64.extend_i32_u i64.const 1 i64.mul i64.sub local.set 1";
    let by_hand = text(&[
        ("global", "(global (mut i64) (i64.const 0))".into()),
        ("export", "(export \"wm_fuel\" (global 1))".into()),
        ("locals", "(local i64) (local i32)".into()),
        ("enter", format!("{take} {ask}")),
        ("fill", format!("{} {operand} {ask}", pay(104))),
        ("ask", ask.clone()),
        ("call", format!("{} {give}", pay(2))),
        ("take", format!("{take} {ask}")),
        ("return", format!("{} {give}", pay(3))),
        ("stay", pay(2)),
        ("leave", format!("{} {give}", pay(1))),
    ]);
    let found = FUEL.apply(&text(&[])).unwrap().into_owned();
    wasmparser::validate(&found).unwrap();
    assert_eq!(found, by_hand);
}

#[test]
fn every_shipped_module_stays_valid() {
    for shipped in crate::modules::SHIPPED {
        for rewrite in [EVERYWHERE, WHERE_SEEN, FUEL, Rewrite { fuel: true, ..WHERE_SEEN }] {
            wasmparser::validate(&rewrite.apply(shipped.bytes).unwrap()).unwrap();
        }
    }
}
