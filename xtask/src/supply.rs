//! Where the dependencies come from, and under which licences: the two parts
//! of `deny.toml` that need no network and no further tool. `cargo deny check`
//! does all of it.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::shell;

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Checks the packages of the lock file that Linux builds have.
pub(crate) fn check() -> Result<()> {
    shell::stage("licences and sources of the dependencies");
    let text = std::fs::read_to_string(shell::root().join("deny.toml"))?;
    let allowed = allowed(&text).context("deny.toml has no list of licences")?;
    let mut metadata = shell::cargo();
    metadata.args(["metadata", "--locked", "--format-version", "1"]);
    for platform in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"] {
        metadata.args(["--filter-platform", platform]);
    }
    let output = metadata.output()?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout)?;
    let packages = document["packages"].as_array().context("cargo metadata lists packages")?;
    let mut wrong = Vec::new();
    for package in packages {
        let name =
            format!("{} {}", package["name"].as_str().unwrap_or("?"), package["version"].as_str().unwrap_or("?"));
        match package["license"].as_str() {
            Some(licence) if permits(licence, &allowed) => {}
            Some(licence) => wrong.push(format!("{name}: the licence {licence} is not one that deny.toml allows")),
            None => wrong.push(format!("{name}: it names no licence")),
        }
        if package["source"].as_str().is_some_and(|source| source != REGISTRY) {
            wrong.push(format!("{name}: it comes from {}", package["source"]));
        }
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n  "));
    }
    println!("  {} packages, all from crates.io or here, all under licences that deny.toml allows", packages.len());
    Ok(())
}

/// The strings of `allow` in the section `[licenses]`.
fn allowed(deny: &str) -> Option<BTreeSet<&str>> {
    let section = deny.split_once("[licenses]")?.1;
    let list = section.split_once("allow = [")?.1.split_once(']')?.0;
    Some(list.split('"').skip(1).step_by(2).collect())
}

/// Whether a licence expression can be met with what is allowed.
fn permits(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    either(&words, &mut at, allowed).is_some_and(|met| met && at == words.len())
}

fn either(words: &[&str], at: &mut usize, allowed: &BTreeSet<&str>) -> Option<bool> {
    let mut met = both(words, at, allowed)?;
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        met |= both(words, at, allowed)?;
    }
    Some(met)
}

fn both(words: &[&str], at: &mut usize, allowed: &BTreeSet<&str>) -> Option<bool> {
    let mut met = one(words, at, allowed)?;
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        met &= one(words, at, allowed)?;
    }
    Some(met)
}

fn one(words: &[&str], at: &mut usize, allowed: &BTreeSet<&str>) -> Option<bool> {
    let word = *words.get(*at)?;
    *at += 1;
    if word == "(" {
        let met = either(words, at, allowed)?;
        *at += 1;
        return (words.get(*at - 1) == Some(&")")).then_some(met);
    }
    if words.get(*at) == Some(&"WITH") {
        let with = format!("{word} WITH {}", words.get(*at + 1)?);
        *at += 2;
        return Some(allowed.contains(with.as_str()));
    }
    Some(allowed.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_or_not() {
        let allowed = BTreeSet::from(["MIT", "Apache-2.0", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"]);
        for met in ["MIT", "MIT/GPL-3.0", "GPL-3.0 OR (MIT AND Unicode-3.0)", "Apache-2.0 WITH LLVM-exception OR X"] {
            assert!(permits(met, &allowed), "{met}");
        }
        for not in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR X) AND Y", "MIT WITH Z", "", "MIT MIT", "(MIT", "OR MIT"] {
            assert!(!permits(not, &allowed), "{not}");
        }
    }

    #[test]
    fn the_list_is_read_from_the_file() {
        let text = "[bans]\nallow = [\"x\"]\n[licenses]\nversion = 2\nallow = [\n  \"MIT\",\n  \"ISC\",\n]\n";
        assert_eq!(allowed(text), Some(BTreeSet::from(["ISC", "MIT"])));
    }
}
