//! What the fuzz targets do with an input. `fuzz/` feeds them with inputs that
//! libFuzzer makes up; the test `fuzz_corpus` with those that are committed.
//!
//! A target never says what is wrong with an input: it panics where a promise
//! of the host is broken. Every error is fine as long as it is typed, has the
//! fault that it should have, and is safe to print.

mod header;
mod host;
mod module;
mod plan;
mod recipe;
mod smith;

use weightmill::error::{Error, Fault};

/// Something to feed bytes to.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name: that of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// What is done with an input.
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target { name: "header", run: header::run },
    Target { name: "host", run: host::run },
    Target { name: "module", run: module::run },
    Target { name: "plan", run: plan::run },
    Target { name: "recipe", run: recipe::run },
];

/// Runs the target called `name`.
///
/// # Panics
/// If there is none, or the input breaks a promise.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("the target exists");
    (target.run)(input);
}

/// Holds an error against what it must look like, whatever the input.
fn check_error(error: &Error, fault: Fault) {
    assert_eq!(error.code().fault(), fault, "{error}");
    for text in [Some(error.message()), error.hint_text()].into_iter().flatten() {
        assert!(!text.is_empty());
        assert!(!text.chars().any(char::is_control), "not safe to print: {text:?}");
    }
}
