//! Dropping, ties, renaming, blocks.

use super::*;

const CAST: &str = "[[step]]\nmodule = 'cast'\ninputs = { w = 'a' }\noutputs = { w = 'b' }\n";

fn aliases(resolution: &Resolution) -> Vec<(&str, &str)> {
    resolution.aliases.iter().map(|(alias, of)| (alias.as_str(), of.as_str())).collect()
}

fn blocks(resolution: &Resolution) -> Vec<(&str, Vec<&str>)> {
    resolution.blocks.iter().map(|b| (b.name.as_str(), b.tensors.iter().map(TensorName::as_str).collect())).collect()
}

#[test]
fn dropped_sources_are_seen_by_nothing() {
    let resolution = run("[names]\ndrop = ['*.inv_freq', 'x']\n", &["a.inv_freq", "b", "x", "xy"]).unwrap();
    assert_eq!(names(&resolution), ["b", "xy"]);
    assert_eq!(resolution.sources.dropped.len(), 2);
    let body = format!("{CAST}[names]\ndrop = ['a']\n");
    expect_error(run(&body, &["a"]), Code::StepMatchedNothing, (1, 1));
}

#[test]
fn unmatched_sources_are_kept_dropped_or_refused() {
    let body = |unmatched: &str| format!("{CAST}[names]\nunmatched = '{unmatched}'\n");
    let kept = run(&body("keep"), &["a", "c"]).unwrap();
    assert_eq!((names(&kept), kept.sources.passed_through.len()), (vec!["b", "c"], 1));
    let dropped = run(&body("drop"), &["a", "c", "d"]).unwrap();
    assert_eq!(names(&dropped), ["b"]);
    assert_eq!(dropped.sources.unmatched_dropped.len(), 2);
    let error =
        expect_error(run(&body("error"), &["a", "c1", "c2", "c3", "c4", "c5", "c6"]), Code::UnmatchedTensor, (6, 13));
    assert!(
        error.message().contains("6 of") && error.message().contains("c5") && !error.message().contains("c6"),
        "{error}"
    );
    assert!(run(&body("error"), &["a"]).is_ok());
    let keep_inputs = CAST.replace("module", "keep_inputs = true\nmodule");
    for unmatched in ["drop", "error"] {
        let resolution = run(&format!("{keep_inputs}[names]\nunmatched = '{unmatched}'\n"), &["a"]).unwrap();
        assert_eq!(names(&resolution), ["a", "b"], "a kept input is not unmatched");
    }
}

#[test]
fn ties_make_aliases() {
    let tie = |alias: &str, of: &str| format!("[[tie]]\nalias = '{alias}'\nof = '{of}'\n");
    let resolution = run(&tie("head", "emb"), &["emb"]).unwrap();
    assert_eq!((names(&resolution), aliases(&resolution)), (vec!["emb"], vec![("head", "emb")]));
    assert_eq!(aliases(&run(&(CAST.to_owned() + &tie("x", "b")), &["a"]).unwrap()), [("x", "b")]);
    let error = expect_error(run(&tie("head", "emd"), &["emb"]), Code::TieInvalid, (3, 6));
    assert_eq!(error.hint_text(), Some("did you mean 'emb'?"));
    expect_error(run(&(CAST.to_owned() + &tie("x", "a")), &["a"]), Code::TieInvalid, (7, 6));
    expect_error(run(&(tie("x", "a") + "[names]\ndrop = ['a']\n"), &["a"]), Code::TieInvalid, (3, 6));
    expect_error(run(&(tie("x", "a") + "[names]\nunmatched = 'drop'\n"), &["a"]), Code::TieInvalid, (3, 6));
    for chain in [tie("x", "a") + &tie("y", "x"), tie("x", "a") + &tie("x2", "a") + &tie("y", "x2")] {
        let error = run(&chain, &["a"]).unwrap_err();
        assert_eq!(error.code(), Code::TieInvalid);
        assert!(error.message().contains("alias itself"), "{error}");
    }
    expect_error(run(&(tie("y", "x") + &tie("x", "a")), &["a"]), Code::TieInvalid, (3, 6));
    expect_error(run(&tie("b", "a"), &["a", "b"]), Code::DuplicateOutput, (2, 9));
    expect_error(run(&tie("a", "a"), &["a"]), Code::DuplicateOutput, (2, 9));
    expect_error(run(&(tie("x", "a") + &tie("x", "b")), &["a", "b"]), Code::DuplicateOutput, (5, 9));
}

#[test]
fn rules_run_in_sequence_over_everything() {
    let body = "[[tie]]\nalias = 't.head'\nof = 't.emb'\n[names]\nrename = [['^t\\.', 'm.'], ['^m\\.(h)', 'n.$1'], ['a', 'b']]\n";
    let resolution = run(body, &["t.emb", "t.h.0", "a.a"]).unwrap();
    assert_eq!(names(&resolution), ["b.b", "m.emb", "n.h.0"]);
    assert_eq!(aliases(&resolution), [("n.hebd", "m.emb")], "both sides, all matches");
    assert_eq!(resolution.tensors["b.b"], Origin::Source(TensorName::new("a.a").unwrap()));
    let swap = run("[names]\nrename = [['^a$', '#'], ['^b$', 'a'], ['#', 'b']]\n", &["a", "b"]).unwrap();
    assert_eq!(swap.tensors["a"], Origin::Source(TensorName::new("b").unwrap()));
    assert_eq!(swap.tensors["b"], Origin::Source(TensorName::new("a").unwrap()));
}

#[test]
fn renaming_must_work_out() {
    let rename = |rules: &str| format!("[names]\nrename = [{rules}]\n");
    let error = expect_error(run(&rename("['^a$', 'b']"), &["a", "b"]), Code::DuplicateOutput, (2, 11));
    assert!(error.message().contains("'a' and 'b'"), "{error}");
    expect_error(run(&rename("['x', 'x'], ['[ab]', 'c']"), &["a", "b"]), Code::DuplicateOutput, (2, 23));
    expect_error(run(&rename("['^b$', 'a']"), &["a", "b"]), Code::DuplicateOutput, (2, 11));
    expect_error(run(&rename("['.*', '']"), &["a"]), Code::BadTensorName, (2, 11));
    expect_error(run(&rename("['^', '__pad__.']"), &["a"]), Code::BadTensorName, (2, 11));
    expect_error(run(&rename("['^', '__pad__.'], ['$', 'x']"), &["a"]), Code::BadTensorName, (2, 30));
    assert!(run(&rename("['^', '__pad__.'], ['^_+', '']"), &["a"]).is_ok(), "only the last name counts");
    let doubling = rename(&vec!["['(.*)', '$1$1']"; 40].join(", "));
    assert_eq!(run(&doubling, &["aaaaaaaa"]).unwrap_err().code(), Code::BadTensorName);
    let body = "[[tie]]\nalias = 'x'\nof = 'a'\n[names]\nrename = [['x', 'a']]\n";
    expect_error(run(body, &["a"]), Code::DuplicateOutput, (5, 11));
}

#[test]
fn everything_is_rest_without_blocks() {
    assert_eq!(blocks(&run("", &["b", "a"]).unwrap()), [("rest", vec!["a", "b"])]);
    assert!(run("[names]\ndrop = ['*']\n", &["a"]).unwrap().blocks.is_empty());
}

#[test]
fn blocks_are_in_list_order_then_numeric_order() {
    let body =
        "[names]\nrename = [['^t\\.', '']]\n[blocks]\npatterns = ['v.{i}.', 'h.{i}.', 'h.{i}.x', 'w.{p...}.{i}-']\n";
    let tensors =
        ["t.h.10.w", "t.h.2.w", "t.h.2.x", "t.h.x.w", "t.v.0.w", "emb", "h.2", "w.a.b.1-x", "w.a.b.0-x", "t.h.2.a"];
    assert_eq!(
        blocks(&run(body, &tensors).unwrap()),
        [
            ("rest", vec!["emb", "h.2"]),
            ("v.0.", vec!["v.0.w"]),
            ("h.2.", vec!["h.2.a", "h.2.w", "h.2.x"]),
            ("h.10.", vec!["h.10.w"]),
            ("h.x.", vec!["h.x.w"]),
            ("w.a.b.0-", vec!["w.a.b.0-x"]),
            ("w.a.b.1-", vec!["w.a.b.1-x"]),
        ]
    );
}

#[test]
fn a_block_cannot_be_named_rest() {
    expect_error(run("[blocks]\npatterns = ['{i}']\n", &["rest.a"]), Code::RecipeInvalid, (2, 13));
    expect_error(run("[blocks]\npatterns = ['a', 'rest']\n", &["rest"]), Code::RecipeInvalid, (2, 18));
    assert!(run("[blocks]\npatterns = ['rest.']\n", &["rest.a"]).is_ok());
}

#[test]
fn aliases_are_in_no_block() {
    let body = "[[tie]]\nalias = 'h.0.x'\nof = 'h.1.x'\n[blocks]\npatterns = ['h.{i}.']\n";
    assert_eq!(blocks(&run(body, &["h.1.x"]).unwrap()), [("h.1.", vec!["h.1.x"])]);
}
