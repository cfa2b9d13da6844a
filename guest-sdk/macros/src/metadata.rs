//! The arguments of `#[transform(…)]`, which become the metadata section.

use std::fmt::Write;

use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprLit, Lit, Meta, Result, Token};

pub(crate) struct Metadata {
    name: String,
    version: String,
    summary: String,
    uses_tp: bool,
    fuel_per_byte: u64,
    source: String,
    licence: String,
}

/// The most fuel per byte that a module may declare.
const MAX_FUEL_PER_BYTE: u64 = 65_536;

impl Parse for Metadata {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let span = input.span();
        let mut metadata = Metadata {
            name: String::new(),
            version: String::new(),
            summary: String::new(),
            uses_tp: false,
            fuel_per_byte: 64,
            source: String::new(),
            licence: String::new(),
        };
        let mut seen = Vec::new();
        for meta in Punctuated::<Meta, Token![,]>::parse_terminated(input)? {
            let key = meta.path().get_ident().map(ToString::to_string).unwrap_or_default();
            if seen.contains(&key) {
                return Err(Error::new(meta.span(), format!("`{key}` stands twice")));
            }
            match key.as_str() {
                "name" => metadata.name = checked(&meta, "lower-case letters, digits and dashes", is_name)?,
                "version" => metadata.version = checked(&meta, "three numbers, such as \"1.0.0\"", is_version)?,
                "summary" => metadata.summary = checked(&meta, "one line", |s| !s.contains('\n'))?,
                "source" => metadata.source = checked(&meta, "text", |_| true)?,
                "licence" => metadata.licence = checked(&meta, "text", |_| true)?,
                "fuel_per_byte" => metadata.fuel_per_byte = fuel(&meta)?,
                "uses_tp" => {
                    meta.require_path_only()?;
                    metadata.uses_tp = true;
                }
                _ => {
                    return Err(Error::new(
                        meta.span(),
                        "expected name, version, summary, uses_tp, fuel_per_byte, source or licence",
                    ));
                }
            }
            seen.push(key);
        }
        for required in ["name", "version"] {
            if !seen.iter().any(|key| key == required) {
                return Err(Error::new(span, format!("`{required} = \"…\"` is missing")));
            }
        }
        Ok(metadata)
    }
}

fn literal(meta: &Meta) -> Result<&Lit> {
    match &meta.require_name_value()?.value {
        Expr::Lit(ExprLit { lit, .. }) => Ok(lit),
        other => Err(Error::new(other.span(), "expected a literal")),
    }
}

fn checked(meta: &Meta, what: &str, check: impl Fn(&str) -> bool) -> Result<String> {
    match literal(meta)? {
        Lit::Str(text) if check(&text.value()) => Ok(text.value()),
        other => Err(Error::new(other.span(), format!("expected {what}"))),
    }
}

fn fuel(meta: &Meta) -> Result<u64> {
    match literal(meta)? {
        Lit::Int(n) if (1..=MAX_FUEL_PER_BYTE).contains(&n.base10_parse()?) => n.base10_parse(),
        other => Err(Error::new(other.span(), format!("expected a number from 1 to {MAX_FUEL_PER_BYTE}"))),
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

fn is_version(version: &str) -> bool {
    let numbers: Vec<_> = version.split('.').collect();
    numbers.len() == 3 && numbers.iter().all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

impl Metadata {
    /// The metadata section.
    pub(crate) fn to_json(&self) -> String {
        let mut json = String::from("{\"abi\":1");
        let mut text = |key: &str, value: &str| {
            if !value.is_empty() {
                json.push_str(",\"");
                json.push_str(key);
                json.push_str("\":");
                push_string(&mut json, value);
            }
        };
        text("name", &self.name);
        text("version", &self.version);
        text("summary", &self.summary);
        text("source", &self.source);
        text("licence", &self.licence);
        let _ = write!(json, ",\"uses_tp\":{},\"fuel_per_byte\":{}}}", self.uses_tp, self.fuel_per_byte);
        json
    }
}

fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(json, "\\u{:04x}", u32::from(c));
            }
            c => json.push(c),
        }
    }
    json.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &str) -> Result<Metadata> {
        syn::parse_str(args)
    }

    #[test]
    fn arguments_become_json() {
        let metadata = parse(r#"name = "a-1", version = "1.2.30", summary = "say \"x\\y\"", uses_tp"#).unwrap();
        let json =
            r#"{"abi":1,"name":"a-1","version":"1.2.30","summary":"say \"x\\y\"","uses_tp":true,"fuel_per_byte":64}"#;
        assert_eq!(metadata.to_json(), json);
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for (args, why) in [
            (r#"version = "1.0.0""#, "`name = \"…\"` is missing"),
            (r#"name = "a""#, "`version = \"…\"` is missing"),
            (r#"name = "A", version = "1.0.0""#, "expected lower-case letters, digits and dashes"),
            (r#"name = "a", version = "1.0""#, "expected three numbers, such as \"1.0.0\""),
            (r#"name = "a", version = "1.0.0", fuel_per_byte = 0"#, "expected a number from 1 to 65536"),
            (r#"name = "a", name = "b", version = "1.0.0""#, "`name` stands twice"),
            (
                r#"name = "a", version = "1.0.0", fuel = 1"#,
                "expected name, version, summary, uses_tp, fuel_per_byte, source or licence",
            ),
        ] {
            assert_eq!(parse(args).err().map(|e| e.to_string()).as_deref(), Some(why), "{args}");
        }
    }
}
