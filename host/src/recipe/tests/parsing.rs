//! What a recipe may say.

use serde_json::json;

use super::*;
use crate::recipe::{Layout, ModuleRef};

const CAST: &str = "[[step]]\nmodule = 'cast'\ninputs = { w = 'a' }\noutputs = { w = 'a' }\n";

#[track_caller]
fn refused(body: &str, place: (u32, u32)) -> Error {
    expect_error(parse(body), Code::RecipeInvalid, place)
}

#[test]
fn a_whole_recipe_is_read() {
    let recipe = parse(
        r#"
[[step]]
module = "sha256:abababababababababababababababababababababababababababababababab"
inputs = { w = "l.{i}.w", "b?" = "l.{i}.b" }
outputs = { w = "l.{i}.w" }
params = { n = 3, x = { y = [1.5, true, "$$config.z"] } }
tp = false

[layout]
max_shard = "512MiB"

[guards]
sequence_parallel = "ulysses:2"
"#,
    )
    .unwrap();
    assert_eq!((recipe.name(), recipe.file()), ("t", Path::new("r.toml")));
    let step = &recipe.steps()[0];
    assert!(matches!(step.module(), ModuleRef::Stored(_)));
    assert_eq!(step.input_roles().collect::<Vec<_>>(), [("b", "l.{i}.b"), ("w", "l.{i}.w")]);
    assert_eq!(step.output_roles().collect::<Vec<_>>(), [("w", "l.{i}.w")]);
    assert!(!step.tp());
    let resolution = resolve(&recipe, &sources(&["l.0.w"]), None, &mut Flat::default()).unwrap();
    assert_eq!(resolution.layout.max_shard_bytes, 512 << 20);
    assert_eq!(resolution.guards["sequence_parallel"], "ulysses:2");
    assert_eq!(resolution.applications[0].params, json!({"n": 3, "x": {"y": [1.5, true, "$config.z"]}}));
}

#[test]
fn places_of_steps_parameters_and_roles_can_be_asked_for() {
    let recipe = parse("[[step]]\nmodule = 'é'\ninputs = {}\n");
    assert!(recipe.is_err());
    let recipe = parse("\n[[step]]\nmodule = 'cast'\ninputs = { w = 'é', \"v?\" = 'v' }\noutputs = { w = 'a' }\nparams = { a = 1, b = 'x' }\n[step.where]\n").unwrap();
    let place = |location: crate::error::Location| (location.line - 2, location.column);
    assert_eq!(place(recipe.steps()[0].at().clone()), (2, 1));
    assert_eq!(place(recipe.steps()[0].module_at().clone()), (3, 10));
    assert_eq!(place(recipe.param_location(0, "b")), (6, 23));
    assert_eq!(place(recipe.param_location(0, "nope")), (2, 1));
    assert_eq!(place(recipe.input_location(0, "v")), (4, 28), "columns are characters");
    assert_eq!(place(recipe.input_location(0, "nope")), (2, 1));
    assert_eq!(place(recipe.output_location(0, "w")), (5, 17));
    assert_eq!(recipe.param_location(0, "b").file, Path::new("r.toml"));
}

#[test]
fn the_format_comes_first() {
    for (text, column) in
        [("name = 'x'", 1), ("", 1), ("recipe = 2\nfuture = 1", 10), ("recipe = '1'", 10), ("recipe = 1.0", 10)]
    {
        let error = Recipe::parse(text, Path::new("r.toml")).unwrap_err();
        assert_eq!(error.code(), Code::RecipeInvalid, "{text}");
        let at = error.location().unwrap();
        assert_eq!((at.line, at.column), (1, column), "{text}");
    }
    let error = Recipe::parse("recipe = 2", Path::new("r.toml")).unwrap_err();
    assert!(error.message().contains("format 2") && error.message().contains("format 1"), "{error}");
    assert_eq!(Recipe::parse("recipe = 1", Path::new("r.toml")).unwrap_err().code(), Code::RecipeInvalid, "no name");
}

#[test]
fn toml_errors_have_their_place() {
    refused("[[step]\n", (1, 8));
    refused("guards = 1\nguards = 2\n", (2, 1));
    refused("x = 'a", (1, 7));
}

#[test]
fn unknown_fields_name_the_nearest_known_one() {
    for (body, place, near) in [
        ("[blokcs]\npatterns = []\n", (1, 2), "blocks"),
        (&format!("{CAST}input = 1\n"), (5, 1), "inputs"),
        (&format!("{CAST}where = {{ dtypes = [] }}\n"), (5, 11), "dtype"),
        ("[names]\ndrops = []\n", (2, 1), "drop"),
        ("[blocks]\npattern = []\n", (2, 1), "patterns"),
        ("[layout]\nmaxshard = 1\n", (2, 1), "max_shard"),
        ("[[tie]]\nalias = 'a'\nfo = 'b'\n", (3, 1), "of"),
    ] {
        assert_eq!(refused(body, place).hint_text(), Some(format!("did you mean '{near}'?").as_str()), "{body}");
    }
    assert!(refused("zzzzzzzz = 1\n", (1, 1)).hint_text().unwrap().contains("guards"));
}

#[test]
fn wrong_types_are_refused_where_they_stand() {
    for (body, place) in [
        ("step = 1", (1, 8)),
        ("step = [1]", (1, 9)),
        ("[step]\nmodule = 'a'\n", (1, 1)),
        ("tie = {}", (1, 7)),
        ("names = []", (1, 9)),
        ("[names]\ndrop = 'a'", (2, 8)),
        ("[names]\ndrop = [1]", (2, 9)),
        ("[names]\nunmatched = 'kep'", (2, 13)),
        ("[names]\nunmatched = true", (2, 13)),
        ("[names]\nrename = ['a']", (2, 11)),
        ("[names]\nrename = [['a']]", (2, 11)),
        ("[names]\nrename = [['a', 1]]", (2, 17)),
        ("[names]\nrename = [['a', 'b', 'c']]", (2, 11)),
        ("[names]\nrename = [['(', 'b']]", (2, 12)),
        ("[names]\nrename = [['a', '$1']]", (2, 17)),
        ("[names]\nrename = [['(a)', '$1x']]", (2, 19)),
        ("[blocks]\npatterns = 'a'", (2, 12)),
        ("[blocks]\npatterns = ['{*e}.']", (2, 13)),
        ("[blocks]\npatterns = ['{']", (2, 13)),
        ("[layout]\nmax_shard = '4Gi'", (2, 13)),
        ("[layout]\nmax_shard = 0", (2, 13)),
        ("[layout]\nmax_shard = -1", (2, 13)),
        ("[layout]\nmax_shard = 1.5", (2, 13)),
        ("[guards]\na = 1", (2, 5)),
        ("guards = 'a'", (1, 10)),
        ("[[tie]]\nalias = 'a'", (1, 1)),
        ("[[tie]]\nalias = 'a'\nof = 1", (3, 6)),
    ] {
        refused(body, place);
    }
    for (field, column) in [
        ("where = []", 9),
        ("where = { dtype = 'F32' }", 19),
        ("where = { dtype = ['F31'] }", 20),
        ("where = { ndim = 'x' }", 18),
        ("where = { ndim = [-1] }", 19),
        ("where = { only = 'x' }", 18),
        ("where = { not = [1] }", 18),
        ("each = 'v'", 8),
        ("each = 1", 8),
        ("optional = 1", 12),
        ("keep_inputs = 'yes'", 15),
        ("tp = 0", 6),
        ("sparse = true", 10),
        ("count = 2", 9),
        ("params = []", 10),
        ("params = { a = 9007199254740992 }", 16),
        ("params = { a = -9007199254740992 }", 16),
        ("params = { a = 0xFFFFFFFFFFFFFFFFFF }", 16),
        ("params = { a = [1, { b = nan }] }", 26),
        ("params = { a = -inf }", 16),
        ("params = { a = 1e999 }", 16),
        ("params = { a = 2020-01-01 }", 16),
        ("params = { a = '$config.x +' }", 16),
        ("params = { a = ['$config.'] }", 17),
    ] {
        refused(&format!("{CAST}{field}\n"), (5, column));
    }
    assert_eq!(
        refused(&format!("{CAST}where = {{ dtype = ['bf16'] }}\n"), (5, 20)).hint_text(),
        Some("did you mean 'BF16'?")
    );
    expect_error(parse("[[tie]]\nalias = ''\nof = 'a'"), Code::BadTensorName, (2, 9));
}

#[test]
fn integers_up_to_the_exact_range_are_taken() {
    let params = "params = { a = 9007199254740991, b = -9_007_199_254_740_991, c = 0xff, d = 1.0, e = 1e20 }\n";
    let resolution = run(&format!("{CAST}{params}"), &["a"]).unwrap();
    let want = json!({"a": 9_007_199_254_740_991_u64, "b": -9_007_199_254_740_991_i64, "c": 255, "d": 1.0, "e": 1e20});
    assert_eq!(resolution.applications[0].params, want);
}

#[test]
fn steps_are_checked() {
    let step = |inputs: &str, outputs: &str, more: &str| {
        parse(&format!("[[step]]\nmodule = 'm'\ninputs = {inputs}\noutputs = {outputs}\n{more}\n"))
    };
    #[track_caller]
    fn no(result: Result<Recipe>, place: (u32, u32)) {
        expect_error(result, Code::RecipeInvalid, place);
    }
    no(parse("[[step]]\nmodule = 'two words'\n"), (2, 10));
    no(parse("[[step]]\nmodule = 'm'\n"), (1, 1));
    no(parse("[[step]]\nmodule = 'm'\ninputs = { w = 'a' }\n"), (1, 1));
    no(step("{}", "{ w = 'a' }", ""), (3, 10));
    no(step("{ w = 'a' }", "{}", ""), (4, 11));
    no(step("{ w = 1 }", "{ w = 'a' }", ""), (3, 16));
    no(step("{ w = 'a{' }", "{ w = 'a' }", ""), (3, 16));
    no(step("{ w = 'a', \"w?\" = 'b' }", "{ w = 'a' }", ""), (3, 21));
    no(step("{ '?' = 'a' }", "{ w = 'a' }", ""), (3, 12));
    no(step("{ w = 'a' }", "{ 'w?' = 'a' }", ""), (4, 13));
    no(step("{ w = '{*a}.{*b}' }", "{ w = 'a' }", ""), (3, 16));
    no(step("{ v = '{i}', w = 'w.{*i}' }", "{ w = 'a' }", ""), (3, 27));
    no(step("{ w = 'a.{i}' }", "{ w = 'a.{j}' }", ""), (4, 17));
    no(step("{ w = 'a.{*e}' }", "{ w = 'a.{*e}' }", ""), (4, 17));
    no(step("{ w = 'a.{*e}' }", "{ w = 'a.{e}' }", ""), (4, 17));
    no(step("{ v = 'v.{i}', w = 'w.{j}' }", "{ w = 'a' }", ""), (1, 1));
    no(step("{ v = 'v.{i}.{j}', w = 'w.{j}' }", "{ w = 'a' }", "each = 'w'"), (5, 8));
    no(step("{ w = 'w.{*j}' }", "{ w = 'a' }", "count = -1"), (5, 9));
    no(step("{ w = 'w.{*j}' }", "{ w = 'a' }", "count = '8'"), (5, 9));
    no(step("{ w = 'w.{*j}' }", "{ w = 'a' }", "count = '$config.a +'"), (5, 9));
    assert!(step("{ v = 'v.{i}.{j}', w = 'w.{j}' }", "{ w = 'a.{i}.{j}' }", "each = 'v'").is_ok());
    assert!(step("{ v = 'v.{*e}', w = 'w.{*f}' }", "{ w = 'a' }", "sparse = true\ncount = '$config.n'").is_ok());
    let error = step("{ w = 'a.{layer}' }", "{ w = 'a.{layre}' }", "").unwrap_err();
    assert_eq!(error.hint_text(), Some("did you mean 'layer'?"));
}

#[test]
fn an_empty_recipe_passes_everything_through() {
    let resolution = run("", &["a", "b"]).unwrap();
    assert_eq!(names(&resolution), ["a", "b"]);
    assert!(resolution.applications.is_empty());
    assert_eq!(resolution.layout, Layout::default());
    assert_eq!(resolution.layout.max_shard_bytes, 4 << 30);
    assert_eq!(resolution.sources.passed_through.len(), 2);
}

#[test]
fn files_are_read_with_care() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.toml");
    assert_eq!(Recipe::load(&path).unwrap_err().code(), Code::IoError);
    std::fs::write(&path, format!("{HEAD}# é \u{feff}\n")).unwrap();
    assert_eq!(Recipe::load(&path).unwrap().name(), "t");
    std::fs::write(&path, b"recipe = 1\nname = '\xff'\n").unwrap();
    let error = Recipe::load(&path).unwrap_err();
    assert_eq!(error.code(), Code::RecipeInvalid);
    assert_eq!(error.location().map(|at| (at.line, at.column)), Some((2, 9)));
    std::fs::write(&path, format!("{HEAD}#{}", "x".repeat(4 << 20))).unwrap();
    assert_eq!(Recipe::load(&path).unwrap_err().code(), Code::RecipeInvalid);
}

#[test]
fn what_could_take_for_ever_is_bounded() {
    let many = |item: &str, n: usize| vec![item; n].join(",");
    refused(&format!("[names]\nrename = [{}]", many("['a','b']", 257)), (2, 10));
    refused(&format!("step = [{}]", many("{}", 4097)), (1, 8));
    refused(&format!("[blocks]\npatterns = [{}]", many("'a'", 4097)), (2, 12));
    refused("[names]\nrename = [['(a{1000}){1000}', 'b']]", (2, 12));
    assert!(parse(&format!("x = {}{}", "[".repeat(1000), "]".repeat(1000))).is_err());
    assert_eq!(parse(&" ".repeat(4 << 20)).unwrap_err().code(), Code::RecipeInvalid);
}
