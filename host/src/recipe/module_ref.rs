//! How a step names its module.

use std::fmt;
use std::path::PathBuf;

use crate::digest::ModuleDigest;
use crate::error::{Code, Error, Result, nearest};

/// Where a module comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModuleRef {
    /// A module that comes with this program, by name. Whether there is one of
    /// that name is for the caller to find out.
    Shipped(String),
    /// A file, as written: relative to the recipe's folder.
    Path(PathBuf),
    /// A module in the store.
    Stored(ModuleDigest),
    /// `oci://registry/repository[:tag][@sha256:…]`, as written.
    Oci(String),
}

impl ModuleRef {
    /// Reads a reference.
    ///
    /// # Errors
    /// `recipe_invalid`, without a location.
    pub fn parse(text: &str) -> Result<Self> {
        let refuse = |why: &str| {
            Err(Error::new(Code::RecipeInvalid, format!("the module '{text}' {why}"))
                .hint("write a shipped module's name, \"./path.wasm\", \"sha256:<hex>\" or \"oci://registry/repo:tag@sha256:<hex>\""))
        };
        if text.is_empty() || text.chars().any(|c| c.is_control()) {
            return refuse("is empty or has a control character");
        }
        if let Some(hex) = text.strip_prefix("sha256:") {
            return match hex.parse() {
                Ok(digest) => Ok(ModuleRef::Stored(digest)),
                Err(why) => refuse(&format!("is no digest: {why}")),
            };
        }
        if let Some(reference) = text.strip_prefix("oci://") {
            return match check_oci(reference) {
                Ok(()) => Ok(ModuleRef::Oci(text.to_owned())),
                Err(why) => refuse(why),
            };
        }
        if let Some((scheme, _)) = text.split_once("://") {
            let slip = nearest(scheme, ["oci"]).is_some();
            return refuse(if slip { "has an unknown scheme; did you mean oci://?" } else { "has an unknown scheme" });
        }
        if text.contains('/') || text.ends_with(".wasm") {
            return Ok(ModuleRef::Path(PathBuf::from(text)));
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        match text.chars().all(is_name) {
            true => Ok(ModuleRef::Shipped(text.to_owned())),
            false => refuse("is no module's name"),
        }
    }
}

/// The part after `oci://`: which characters a registry takes is for it to
/// say; here only the parts are told apart.
fn check_oci(reference: &str) -> Result<(), &'static str> {
    if reference.chars().any(char::is_whitespace) {
        return Err("has a space in its reference");
    }
    let (named, digest) = match reference.split_once('@') {
        Some((named, digest)) => (named, Some(digest)),
        None => (reference, None),
    };
    if let Some(digest) = digest
        && digest.strip_prefix("sha256:").is_none_or(|hex| hex.parse::<ModuleDigest>().is_err())
    {
        return Err("needs sha256: and 64 lower-case hexadecimal digits after the '@'");
    }
    let Some((registry, path)) = named.split_once('/') else {
        return Err("lacks a repository");
    };
    let (repository, tag) = match path.rsplit_once(':') {
        Some((repository, tag)) => (repository, Some(tag)),
        None => (path, None),
    };
    if registry.is_empty() || repository.split('/').any(str::is_empty) || tag == Some("") {
        return Err("has an empty part in its reference");
    }
    if repository.contains(':') || tag.is_some_and(|tag| tag.contains('/')) {
        return Err("has a misplaced ':' in its reference");
    }
    if tag.is_none() && digest.is_none() {
        return Err("needs a tag or a digest");
    }
    Ok(())
}

impl fmt::Display for ModuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModuleRef::Shipped(name) => f.write_str(name),
            ModuleRef::Path(path) => path.display().fmt(f),
            ModuleRef::Stored(digest) => write!(f, "sha256:{digest}"),
            ModuleRef::Oci(reference) => f.write_str(reference),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_is_told_apart() {
        let hex = "ab".repeat(32);
        assert_eq!(ModuleRef::parse("moe-stack").unwrap(), ModuleRef::Shipped("moe-stack".into()));
        assert_eq!(ModuleRef::parse("./m.wasm").unwrap(), ModuleRef::Path("./m.wasm".into()));
        assert_eq!(ModuleRef::parse("m.wasm").unwrap(), ModuleRef::Path("m.wasm".into()));
        assert_eq!(ModuleRef::parse("/x/y").unwrap(), ModuleRef::Path("/x/y".into()));
        let stored = ModuleRef::parse(&format!("sha256:{hex}")).unwrap();
        assert_eq!(stored, ModuleRef::Stored(hex.parse().unwrap()));
        assert_eq!(stored.to_string(), format!("sha256:{hex}"));
        for oci in [
            "r.io/a/b:v1",
            "r.io:5000/a:v1",
            &format!("r.io/a:v1@sha256:{hex}"),
            &format!("localhost:5000/a@sha256:{hex}"),
        ] {
            let text = format!("oci://{oci}");
            assert_eq!(ModuleRef::parse(&text).unwrap(), ModuleRef::Oci(text));
        }
    }

    #[test]
    fn malformed_references_are_refused() {
        let hex = "AB".repeat(32);
        let bad = [
            "",
            "two words",
            "a\nb",
            "sha256:",
            "sha256:12",
            "oci://",
            "oci://r.io",
            "oci://r.io/",
            "oci://r.io/a",
            "oci://r.io/a:",
            "oci:///a:v",
            "oci://r.io/a:v@sha256:1",
            "oci://r.io/a:v@md5:1",
            "oci://r.io/a b:v",
            "oci://r.io//a:v",
            "oci://r.io/a:b:c",
            "http://r.io/a:v",
            "file:///x.wasm",
        ];
        for text in bad.into_iter().chain([format!("sha256:{hex}").as_str()]) {
            assert_eq!(ModuleRef::parse(text).unwrap_err().code(), Code::RecipeInvalid, "{text}");
        }
    }
}
