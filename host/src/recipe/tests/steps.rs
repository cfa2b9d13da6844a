//! Which applications a step has.

use serde_json::json;

use super::*;

fn step(inputs: &str, outputs: &str, more: &str) -> String {
    format!("[[step]]\nmodule = 'm'\ninputs = {{ {inputs} }}\noutputs = {{ {outputs} }}\n{more}\n")
}

#[test]
fn one_application_for_each_combination_in_natural_order() {
    let body = step("w = 'l.{i}.{p...}.w'", "w = 'o.{p...}.{i}'", "");
    let resolution = run(&body, &["l.10.b.w", "l.9.a.x.w", "l.9.b.w", "l.x.a.w", "l.2.z", "l.010.b.w"]).unwrap();
    assert_eq!(outputs(&resolution), ["o.a.x.9", "o.b.9", "o.b.010", "o.b.10", "o.a.x"]);
    let first = &resolution.applications[0];
    assert_eq!(first.captures, [("i".to_owned(), "9".to_owned()), ("p".to_owned(), "a.x".to_owned())]);
    assert_eq!((first.step, first.tp, &first.params), (0, true, &json!({})));
    assert_eq!(first.at.line, 3);
    assert_eq!(names(&resolution), ["l.2.z", "o.a.x", "o.a.x.9", "o.b.010", "o.b.10", "o.b.9"]);
    assert_eq!(resolution.tensors["l.2.z"], Origin::Source(TensorName::new("l.2.z").unwrap()));
    assert_eq!(resolution.tensors["o.b.9"], Origin::Output { application: 1, role: "w".into() });
}

#[test]
fn inputs_and_outputs_are_sorted_by_role() {
    let body = step("v = 'v', q = 'q', k = 'k'", "z = 'z', a = 'a'", "");
    let resolution = run(&body, &["k", "q", "v"]).unwrap();
    assert_eq!(inputs(&resolution.applications[0]), ["k=k", "q=q", "v=v"]);
    assert_eq!(outputs(&resolution), ["a", "z"]);
}

#[test]
fn a_combination_in_any_role_makes_an_application() {
    let body = step("q = 'l.{i}.q', k = 'l.{i}.k'", "w = 'l.{i}.w'", "");
    let error = expect_error(run(&body, &["l.0.q", "l.0.k", "l.1.k"]), Code::MissingInput, (3, 16));
    assert!(error.message().contains("'l.1.q'") && error.message().contains("step 1 (m)"), "{error}");
    let plain = step("a = 'a', b = 'b'", "w = 'w'", "");
    let error = expect_error(run(&plain, &["a"]), Code::MissingInput, (3, 25));
    assert!(error.message().contains("'b'"), "{error}");
}

#[test]
fn with_each_one_role_defines_the_applications() {
    let body = step("w = '{p...}.w', a = '{p...}.w.a', b = '{p...}.w.b'", "w = '{p...}.w'", "each = 'a'");
    let resolution = run(&body, &["l.0.w", "l.1.w", "l.1.w.a", "l.1.w.b", "l.2.w.b"]).unwrap();
    assert_eq!(inputs(&resolution.applications[0]), ["a=l.1.w.a", "b=l.1.w.b", "w=l.1.w"]);
    assert_eq!(names(&resolution), ["l.0.w", "l.1.w", "l.2.w.b"]);
    let error = expect_error(run(&body, &["l.0.w", "l.1.w.a", "l.1.w"]), Code::MissingInput, (3, 50));
    assert!(error.message().contains("'l.1.w.b'"), "{error}");
    expect_error(run(&body, &["l.0.w", "l.1.w.b"]), Code::StepMatchedNothing, (1, 1));
}

#[test]
fn roles_with_fewer_captures_are_shared() {
    let body = step("w = 'l.{i}.e.{j}.w', s = 'l.{i}.s', g = 'g'", "w = 'o.{i}.{j}'", "");
    let resolution = run(&body, &["g", "l.0.s", "l.1.s", "l.2.s", "l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w"]).unwrap();
    let all: Vec<_> = resolution.applications.iter().map(inputs).collect();
    assert_eq!(
        all,
        [["g=g", "s=l.0.s", "w=l.0.e.0.w"], ["g=g", "s=l.0.s", "w=l.0.e.1.w"], ["g=g", "s=l.1.s", "w=l.1.e.0.w"]]
    );
    assert_eq!(names(&resolution), ["l.2.s", "o.0.0", "o.0.1", "o.1.0"], "what nothing agrees with stays");
    let error = expect_error(run(&body, &["g", "l.0.s", "l.1.e.0.w"]), Code::MissingInput, (3, 37));
    assert!(error.message().contains("'l.1.s'"), "{error}");
    let error = expect_error(run(&body, &["l.0.s", "l.0.e.0.w"]), Code::MissingInput, (3, 52));
    assert!(error.message().contains("'g'"), "{error}");
    expect_error(run(&body, &["g", "l.0.s"]), Code::StepMatchedNothing, (1, 1));
}

#[test]
fn optional_roles_may_be_absent() {
    let body = step("w = 'l.{i}.w', \"b?\" = 'l.{i}.b'", "w = 'l.{i}.w'", "");
    let resolution = run(&body, &["l.0.w", "l.1.w", "l.1.b"]).unwrap();
    assert_eq!(inputs(&resolution.applications[0]), ["w=l.0.w"]);
    assert_eq!(inputs(&resolution.applications[1]), ["b=l.1.b", "w=l.1.w"]);
    let error = expect_error(run(&body, &["l.0.w", "l.2.b"]), Code::MissingInput, (3, 16));
    assert!(error.message().contains("'l.2.w'"), "any role makes an application: {error}");
}

#[test]
fn nothing_to_do_is_an_error_unless_optional() {
    let body = step("w = 'z.{i}'", "w = 'z.{i}'", "");
    let error = expect_error(run(&body, &["a"]), Code::StepMatchedNothing, (1, 1));
    assert!(error.message().contains("'z.{i}'"), "{error}");
    let body = step("w = 'z.{i}'", "w = 'z.{i}'", "optional = true\nparams = { a = '$config.nope' }");
    assert_eq!(names(&run(&body, &["a"]).unwrap()), ["a"]);
    let body = step("w = 'a'", "w = 'a'", "where = { dtype = ['I8'] }");
    let error = expect_error(run(&body, &["a"]), Code::StepMatchedNothing, (1, 1));
    assert!(error.message().contains("where"), "{error}");
}

const MOE: (&str, &str) = ("w1 = 'l.{i}.e.{*e}.w1', w2 = 'l.{i}.e.{*e}.w2'", "w = 'l.{i}.w'");

fn experts(numbers: &[&str]) -> Vec<String> {
    numbers.iter().flat_map(|e| [format!("l.0.e.{e}.w1"), format!("l.0.e.{e}.w2")]).collect()
}

fn run_experts(numbers: &[&str], more: &str, config: Option<&Value>) -> Result<Resolution> {
    let tensors = experts(numbers);
    let tensors: Vec<&str> = tensors.iter().map(String::as_str).collect();
    run_with(&step(MOE.0, MOE.1, more), &tensors, config)
}

#[test]
fn lists_are_in_numeric_order() {
    let numbers: Vec<String> = (0..12).map(|n| n.to_string()).collect();
    let numbers: Vec<&str> = numbers.iter().map(String::as_str).chain(["shared", "a"]).collect();
    let resolution = run_experts(&numbers, "", None).unwrap();
    assert_eq!(resolution.applications.len(), 1);
    let inputs = inputs(&resolution.applications[0]);
    assert_eq!(inputs.len(), 28);
    assert_eq!(
        inputs[9..14],
        ["w1[9]=l.0.e.9.w1", "w1[10]=l.0.e.10.w1", "w1[11]=l.0.e.11.w1", "w1[12]=l.0.e.a.w1", "w1[13]=l.0.e.shared.w1"]
    );
    assert_eq!(inputs[14], "w2[0]=l.0.e.0.w2");
    assert_eq!(names(&resolution), ["l.0.w"]);
    let padded = run_experts(&["00", "01", "02"], "", None).unwrap();
    assert_eq!(super::inputs(&padded.applications[0])[2], "w1[2]=l.0.e.02.w1");
}

#[test]
fn gaps_and_uneven_lists_name_the_tensor() {
    for (numbers, expected) in [
        (&["0", "1", "3"][..], "'l.0.e.2.w1'"),
        (&["1", "2"], "'l.0.e.0.w1'"),
        (&["00", "02"], "'l.0.e.01.w1'"),
        (&["0", "1", "01"], "'01' and '1' are the same number"),
    ] {
        let error = expect_error(run_experts(numbers, "", None), Code::MissingInput, (3, 17));
        assert!(error.message().contains(expected), "{error}");
    }
    assert_eq!(run_experts(&["1", "3"], "sparse = true", None).unwrap().applications[0].inputs.len(), 4);
    let mut tensors = experts(&["0", "1", "2"]);
    tensors.retain(|name| name != "l.0.e.1.w2");
    let tensors: Vec<&str> = tensors.iter().map(String::as_str).collect();
    for more in ["", "sparse = true"] {
        let error = expect_error(run(&step(MOE.0, MOE.1, more), &tensors), Code::MissingInput, (3, 41));
        assert!(error.message().contains("'l.0.e.1.w2'"), "{error}");
    }
    let error = expect_error(run(&step(MOE.0, MOE.1, ""), &["l.0.e.0.w1", "l.0.e.1.w1"]), Code::MissingInput, (3, 41));
    assert!(error.message().contains("'l.0.e.0.w2'"), "{error}");
}

#[test]
fn count_fixes_how_many() {
    let config = json!({"n": 3, "text": "3", "minus": -1, "half": 1.5});
    assert!(run_experts(&["0", "1", "2"], "count = 3", None).is_ok());
    assert!(run_experts(&["0", "1", "2"], "count = '$config.n'", Some(&config)).is_ok());
    assert!(run_experts(&["0", "1", "2"], "count = '$config.nope ?? 3'", None).is_ok());
    assert!(run_experts(&["4", "6", "9"], "count = 3\nsparse = true", None).is_ok());
    let error = expect_error(run_experts(&["0", "1", "2"], "count = 4", None), Code::MissingInput, (3, 17));
    assert!(error.message().contains("'l.0.e.3.w1'"), "{error}");
    let error = expect_error(run_experts(&["0", "1", "2"], "count = 2", None), Code::MissingInput, (3, 17));
    assert!(error.message().contains("'l.0.e.2.w1'"), "{error}");
    expect_error(run_experts(&["4", "6"], "count = 3\nsparse = true", None), Code::MissingInput, (3, 17));
    for bad in ["text", "minus", "half", "n / 2"] {
        let more = format!("count = '$config.{bad}'");
        expect_error(run_experts(&["0"], &more, Some(&config)), Code::BadParams, (5, 9));
    }
    expect_error(run_experts(&["0"], "count = '$config.n'", None), Code::MissingConfig, (5, 9));
}

#[test]
fn a_list_may_be_shared_or_optional() {
    let body = step("w = 'l.{i}.w', s = 's.{*e}', \"o?\" = 'l.{i}.o.{*e}'", "w = 'l.{i}.o'", "");
    let resolution = run(&body, &["l.0.w", "l.1.w", "s.0", "s.1", "l.1.o.0", "l.1.o.1"]).unwrap();
    assert_eq!(inputs(&resolution.applications[0]), ["s[0]=s.0", "s[1]=s.1", "w=l.0.w"]);
    assert_eq!(inputs(&resolution.applications[1]).len(), 5);
    let error = expect_error(run(&body, &["l.0.w", "s.0", "s.1", "l.0.o.1"]), Code::MissingInput, (3, 48));
    assert!(error.message().contains("'l.0.o.0'"), "{error}");
}

#[test]
fn where_filters_before_grouping() {
    let body = step(
        "w = '{p...}'",
        "w = '{p...}'",
        "where = { dtype = ['F32', 'F16'], ndim = 2, only = ['l.*', 'm'], not = ['*norm*'] }",
    );
    let tensors = ["l.a:F32", "l.b:BF16", "l.c:F16", "l.norm:F32", "m:F32", "n:F32", "l.d:F32:1"];
    let resolution = run(&body, &tensors).unwrap();
    assert_eq!(outputs(&resolution), ["l.a", "l.c", "m"]);
    let body = step("w = '{p...}'", "w = '{p...}'", "where = { ndim = [0, 1] }");
    assert_eq!(outputs(&run(&body, &["a:F32:1", "b:F32:2", "c:F32:0"]).unwrap()), ["a", "c"]);
    let body = step("w = 'l.{i}.w', s = 'l.{i}.s'", "w = 'l.{i}.w'", "where = { dtype = ['F8_E4M3'] }");
    let error = expect_error(run(&body, &["l.0.w:F8_E4M3", "l.0.s:F32"]), Code::MissingInput, (3, 31));
    assert!(error.hint_text().unwrap().contains("'where'"), "{error}");
}

#[test]
fn with_each_where_applies_to_that_role() {
    let body = step("w = 'l.{i}.w', s = 'l.{i}.s'", "w = 'l.{i}.w'", "where = { dtype = ['F8_E4M3'] }\neach = 'w'");
    let resolution = run(&body, &["l.0.w:F8_E4M3", "l.0.s:F32", "l.1.w:F32", "l.1.s:F8_E4M3"]).unwrap();
    assert_eq!(inputs(&resolution.applications[0]), ["s=l.0.s", "w=l.0.w"]);
    assert_eq!(resolution.applications.len(), 1);
}

#[test]
fn facts_are_asked_only_when_needed_and_once() {
    let first = step("w = 'l.{i}'", "w = 'm.{i}', v = 'v.{i}'", "");
    let count = |second: &str, names: &[&str]| {
        let mut facts = Flat::default();
        let resolution =
            resolve(&parse(&format!("{first}{second}")).unwrap(), &sources(names), None, &mut facts).unwrap();
        (facts.asked, resolution.applications.len())
    };
    let tensors = ["l.0", "l.1", "x:F32"];
    assert_eq!(count(&step("w = 'm.{i}'", "w = 'n.{i}'", ""), &tensors), (0, 4), "without where");
    assert_eq!(count(&step("w = 'm.{i}'", "w = 'n.{i}'", "where = { not = ['z'] }"), &tensors), (0, 4), "names only");
    assert_eq!(count(&step("w = 'x'", "w = 'x'", "where = { dtype = ['F32'] }"), &tensors), (0, 3), "a source's");
    assert_eq!(count(&step("w = 'm.{i}'", "w = 'n.{i}'", "where = { ndim = 1, only = ['m.0'] }"), &tensors), (1, 3));
    assert_eq!(
        count(&step("w = '{p...}'", "w = '{p...}'", "where = { dtype = ['F32'] }"), &tensors),
        (2, 7),
        "once for two outputs"
    );
}

#[test]
fn errors_of_facts_get_the_place_of_the_step_that_was_asked_about() {
    struct Broken;
    impl Facts for Broken {
        fn outputs(&mut self, _: &Application, _: &Resolution) -> Result<BTreeMap<String, TensorType>> {
            Err(Error::new(Code::ModuleTrapped, "no"))
        }
    }
    struct Silent;
    impl Facts for Silent {
        fn outputs(&mut self, _: &Application, _: &Resolution) -> Result<BTreeMap<String, TensorType>> {
            Ok(BTreeMap::new())
        }
    }
    let body = step("w = 'a'", "w = 'b'", "") + &step("w = 'b'", "w = 'c'", "where = { ndim = 1 }");
    let recipe = parse(&body).unwrap();
    expect_error(resolve(&recipe, &sources(&["a"]), None, &mut Broken), Code::ModuleTrapped, (1, 1));
    expect_error(resolve(&recipe, &sources(&["a"]), None, &mut Silent), Code::ModuleBadPlan, (6, 1));
}

#[test]
fn later_steps_see_what_earlier_ones_made() {
    let body = step("w = 'a.{i}'", "w = 'b.{i}'", "") + &step("w = 'b.{i}'", "w = 'c.{i}'", "");
    let resolution = run(&body, &["a.0", "a.1"]).unwrap();
    assert_eq!(names(&resolution), ["c.0", "c.1"], "an intermediate leaves the result");
    assert_eq!(resolution.applications[2].inputs[0].origin, Origin::Output { application: 0, role: "w".into() });
    let body = step("w = 'a'", "w = 'b'", "") + &step("w = 'a'", "w = 'c'", "");
    expect_error(run(&body, &["a"]), Code::StepMatchedNothing, (6, 1));
    let body = step("w = 'a'", "w = 'b'", "") + &step("w = 'b', v = 'a'", "w = 'c'", "");
    let error = expect_error(run(&body, &["a"]), Code::MissingInput, (8, 25));
    assert!(error.hint_text().unwrap().contains("step 1"), "{error}");
}

#[test]
fn outputs_may_replace_inputs_and_nothing_else() {
    assert_eq!(names(&run(&step("w = 'a', v = 'b'", "w = 'b'", ""), &["a", "b"]).unwrap()), ["b"]);
    let kept = run(&step("w = 'a'", "w = 'a32'", "keep_inputs = true"), &["a"]).unwrap();
    assert_eq!(names(&kept), ["a", "a32"]);
    let kept = run(&step("w = 'a', v = 'b'", "w = 'a'", "keep_inputs = true"), &["a", "b"]).unwrap();
    assert_eq!(names(&kept), ["a", "b"]);
    assert!(matches!(kept.tensors["a"], Origin::Output { .. }));
    expect_error(run(&step("w = 'l.{i}.q'", "w = 'l.0.k'", ""), &["l.0.q", "l.0.k"]), Code::DuplicateOutput, (4, 17));
    expect_error(run(&step("w = 'l.{i}'", "w = 'x'", ""), &["l.0", "l.1"]), Code::DuplicateOutput, (4, 17));
    expect_error(run(&step("w = 'a'", "v = 'x', w = 'x'", ""), &["a"]), Code::DuplicateOutput, (4, 26));
    expect_error(
        run(&step("w = 'l.{i}'", "w = 'l.{i}.l', v = 'l.1'", "keep_inputs = true"), &["l.0", "l.1"]),
        Code::DuplicateOutput,
        (4, 32),
    );
    let body = step("w = 'a'", "w = 'c'", "") + &step("w = 'b'", "w = 'c'", "");
    let error = expect_error(run(&body, &["a", "b"]), Code::DuplicateOutput, (9, 17));
    assert!(error.message().contains("step 1"), "{error}");
}

#[test]
fn output_names_are_checked() {
    let long = "x".repeat(3000);
    let body = step("w = '{i}'", "w = '{i}{i}'", "");
    expect_error(run(&body, &[&long]), Code::BadTensorName, (4, 17));
    expect_error(run(&step("w = 'a'", "w = '__pad__.a'", ""), &["a"]), Code::BadTensorName, (4, 17));
}

#[test]
fn parameters_are_evaluated_at_any_depth() {
    let config = json!({"hidden": 48, "heads": 8, "act": "silu"});
    let more = "params = { d = '$config.hidden / $config.heads', l = ['$config.act', { x = '$config.nope ?? null' }], s = '$$x', t = '$x', u = 'a$$b' }";
    let resolution = run_with(&step("w = 'a'", "w = 'a'", more), &["a"], Some(&config)).unwrap();
    assert_eq!(
        resolution.applications[0].params,
        json!({"d": 6, "l": ["silu", {"x": null}], "s": "$x", "t": "$x", "u": "a$$b"})
    );
    let bad = |value: &str, code, column| {
        let body = step("w = 'a'", "w = 'a'", &format!("params = {{ p = {value} }}"));
        expect_error(run_with(&body, &["a"], Some(&config)), code, (5, column))
    };
    let error = bad("'$config.haeds'", Code::MissingConfig, 16);
    assert_eq!(error.hint_text(), Some("did you mean 'heads'?"));
    assert!(error.message().contains("parameter 'p'"), "{error}");
    bad("[1, ['$config.hidden / 5']]", Code::BadParams, 21);
    bad("{ q = '$config.act * 2' }", Code::BadParams, 22);
}

#[test]
fn hopeless_patterns_are_refused_not_tried_for_ever() {
    let body = step("w = '{a...}x{b...}x{c...}x{d...}x{e...}y{f}'", "w = '{a...}'", "");
    expect_error(run(&body, &[&"xz".repeat(300)]), Code::RecipeInvalid, (3, 16));
}

#[test]
fn shared_lists_do_not_fill_the_memory() {
    let mut tensors: Vec<String> = (0..3000).flat_map(|i| [format!("w.{i}"), format!("s.{i}")]).collect();
    tensors.sort();
    let tensors: Vec<&str> = tensors.iter().map(String::as_str).collect();
    let body = step("w = 'w.{i}', s = 's.{*e}'", "w = 'o.{i}'", "");
    expect_error(run(&body, &tensors), Code::RecipeInvalid, (3, 29));
}

#[test]
fn the_order_of_fields_is_of_no_account() {
    let tensors = ["l.0.q", "l.0.k", "l.1.q", "l.1.k"];
    let one = run(&step("q = 'l.{i}.q', k = 'l.{i}.k'", "a = 'a.{i}', b = 'b.{i}'", ""), &tensors).unwrap();
    let two = run(&step("k = 'l.{i}.k', q = 'l.{i}.q'", "b = 'b.{i}', a = 'a.{i}'", ""), &tensors).unwrap();
    assert_eq!(format!("{one:?}"), format!("{two:?}"));
}

#[test]
fn a_hundred_thousand_tensors_take_seconds_at_most() {
    let tensors: Vec<String> =
        (0..100).flat_map(|l| (0..1000).map(move |e| format!("model.layers.{l}.mlp.experts.{e}.w.weight"))).collect();
    let tensors: Vec<&str> = tensors.iter().map(String::as_str).collect();
    let mut body = step("w = 'model.layers.{i}.mlp.experts.{*e}.w.weight'", "w = 'model.layers.{i}.w'", "");
    for _ in 0..30 {
        body += &step("w = '{p...}.nope.{i}.weight'", "w = 'x'", "optional = true");
    }
    let begun = std::time::Instant::now();
    let resolution = run(&body, &tensors).unwrap();
    assert_eq!(resolution.applications.len(), 100);
    assert_eq!(resolution.applications[99].inputs[999].name.as_str(), "model.layers.99.mlp.experts.999.w.weight");
    let took = begun.elapsed();
    assert!(took.as_secs() < 60, "{took:?}: something is quadratic");
}
