//! The custom section `weightmill`.

use weightmill_guest::abi::{ABI_VERSION, METADATA_SECTION, Metadata, limits};

use crate::error::{Code, Error, Result};

/// The longest name of a module, in bytes.
const NAME_BYTES: usize = 64;

/// Reads the metadata of a module.
///
/// # Errors
/// `module_too_large` beyond the section's limit, else `module_bad_abi`.
pub(super) fn parse(section: &[u8]) -> Result<Metadata> {
    if section.len() > limits::METADATA_BYTES {
        return Err(Error::new(
            Code::ModuleTooLarge,
            format!(
                "the custom section '{METADATA_SECTION}' has {} bytes, at most {} are allowed",
                section.len(),
                limits::METADATA_BYTES
            ),
        ));
    }
    let bad = |what: String| {
        Error::new(Code::ModuleBadAbi, format!("the custom section '{METADATA_SECTION}' {what}"))
            .hint("weightmill module pack --meta writes it")
    };
    let metadata: Metadata =
        serde_json::from_slice(section).map_err(|e| bad(format!("is not the JSON that the ABI asks for: {e}")))?;
    if metadata.abi != ABI_VERSION {
        return Err(bad(format!("says abi {}, this host speaks abi {ABI_VERSION}", metadata.abi)));
    }
    if !is_name(&metadata.name) {
        return Err(bad(format!(
            "says name '{}', which is not 1 to {NAME_BYTES} lower-case letters, digits and dashes",
            shown(&metadata.name)
        )));
    }
    if !is_version(&metadata.version) {
        return Err(bad(format!("says version '{}', which is not three numbers", shown(&metadata.version))));
    }
    for (field, text) in [("summary", &metadata.summary), ("source", &metadata.source), ("licence", &metadata.licence)]
    {
        if text.chars().any(char::is_control) {
            return Err(bad(format!("has a control character in '{field}'")));
        }
    }
    Ok(metadata)
}

fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

fn is_version(version: &str) -> bool {
    let is_number = |part: &str| {
        (1..=9).contains(&part.len())
            && part.bytes().all(|b| b.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    version.split('.').count() == 3 && version.split('.').all(is_number)
}

/// The beginning of a text from a module, safe to print.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Metadata> {
        parse(text.as_bytes())
    }

    #[test]
    fn defaults_are_those_of_the_abi() {
        let metadata = parse_text(r#"{"abi":1,"name":"qkv-regroup","version":"1.0.12","extra":[1]}"#).unwrap();
        assert_eq!(metadata.fuel_per_byte, 64);
        assert!(!metadata.uses_tp);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("", "EOF"),
            ("[]", "JSON"),
            (r#"{"abi":2,"name":"a","version":"1.0.0"}"#, "abi 2"),
            (r#"{"abi":1,"name":"","version":"1.0.0"}"#, "name ''"),
            (r#"{"abi":1,"name":"A","version":"1.0.0"}"#, "name 'A'"),
            (r#"{"abi":1,"name":"a\u001b[2J","version":"1.0.0"}"#, r"name 'a\u{1b}[2J'"),
            (r#"{"abi":1,"name":"a","version":"1.0"}"#, "version '1.0'"),
            (r#"{"abi":1,"name":"a","version":"1.0.01"}"#, "version"),
            (r#"{"abi":1,"name":"a","version":"1.0.0-rc1"}"#, "version"),
            (r#"{"abi":1,"name":"a","version":"1.0.0","summary":"x\ny"}"#, "'summary'"),
            (r#"{"abi":1,"name":"a","name":"b","version":"1.0.0"}"#, "duplicate field"),
            (r#"{"abi":1,"name":"a","version":"1.0.0"}x"#, "trailing"),
        ] {
            let error = parse_text(text).unwrap_err();
            assert_eq!(error.code(), Code::ModuleBadAbi, "{text}");
            assert!(error.message().contains(part), "{text}: {error}");
        }
        assert!(parse(b"\xFF").is_err());
        assert_eq!(parse(&[b' '; limits::METADATA_BYTES + 1]).unwrap_err().code(), Code::ModuleTooLarge);
    }
}
