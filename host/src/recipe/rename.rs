//! One rule of `names.rename`: a regular expression and its replacement.
//!
//! Both have the syntax of the `regex` crate. The replacement is parsed here,
//! by the same rules, because a reference to a group that does not exist must
//! be an error, not the empty text.

use regex::{Regex, RegexBuilder};

use super::fields::{self, Item};
use super::source::{Source, Spot};
use crate::error::{Code, Error, Result};
use crate::tensor::NAME_MAX_BYTES;

/// How large a compiled expression may be, in bytes.
const MAX_COMPILED_BYTES: usize = 4 << 20;
/// How long a name may be between two rules, in bytes.
const MAX_BETWEEN_BYTES: usize = 4 * NAME_MAX_BYTES;

/// A rule.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    regex: Regex,
    replacement: Vec<Part>,
    pub(super) spot: Spot,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Group(usize),
}

impl Rule {
    pub(super) fn read(source: &Source, item: &Item<'_>) -> Result<Self> {
        let [pattern_item, replacement_item] = fields::array(source, "rename", item)? else {
            return Err(source
                .invalid(Spot::of(item), "a rule of 'rename' is an array of a regular expression and its replacement")
                .hint(r#"such as ["^transformer\\.", "model."]"#));
        };
        let pattern = fields::string(source, "rename", pattern_item)?;
        let replacement = fields::string(source, "rename", replacement_item)?;
        let regex = RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build().map_err(|e| {
            let why = e.to_string();
            let last = why.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it is malformed");
            let last = last.strip_prefix("error: ").unwrap_or(last);
            source.invalid(
                Spot::of(pattern_item),
                format!("'{}' is no regular expression: {last}", fields::shown(pattern)),
            )
        })?;
        let replacement = parse_replacement(replacement, &regex)
            .map_err(|error| error.at(source.locate(Spot::of(replacement_item))))?;
        Ok(Rule { regex, replacement, spot: Spot::of(item) })
    }

    /// The name with all matches replaced; `None` if there are none.
    ///
    /// # Errors
    /// `bad_tensor_name`, without a location, if it becomes far too long.
    pub(super) fn apply(&self, name: &str) -> Result<Option<String>> {
        if !self.regex.is_match(name) {
            return Ok(None);
        }
        let mut result = String::with_capacity(name.len());
        let mut copied = 0;
        for captures in self.regex.captures_iter(name) {
            let Some(whole) = captures.get(0) else { continue };
            result.push_str(&name[copied..whole.start()]);
            for part in &self.replacement {
                match part {
                    Part::Text(text) => result.push_str(text),
                    Part::Group(group) => result.push_str(captures.get(*group).map_or("", |found| found.as_str())),
                }
                if result.len() > MAX_BETWEEN_BYTES {
                    return Err(Error::new(
                        Code::BadTensorName,
                        format!("renaming '{}' gives a name of more than {NAME_MAX_BYTES} bytes", fields::shown(name)),
                    ));
                }
            }
            copied = whole.end();
        }
        result.push_str(&name[copied..]);
        Ok(Some(result))
    }
}

/// Splits a replacement as the `regex` crate does: `$name` takes the longest
/// run of letters, digits and underscores, `${name}` whatever is in the
/// braces, `$$` is a dollar, and a `$` that begins none of these is itself.
fn parse_replacement(text: &str, regex: &Regex) -> Result<Vec<Part>> {
    let mut parts = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        literal.push_str(&rest[..dollar]);
        let after = &rest[dollar + 1..];
        if let Some(behind) = after.strip_prefix('$') {
            literal.push('$');
            rest = behind;
            continue;
        }
        let (name, behind) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some(braced) => braced,
            None => after.split_at(after.bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'_').count()),
        };
        if name.is_empty() && !after.starts_with("{}") {
            literal.push('$');
            rest = after;
            continue;
        }
        if !literal.is_empty() {
            parts.push(Part::Text(std::mem::take(&mut literal)));
        }
        parts.push(Part::Group(find_group(name, text, regex)?));
        rest = behind;
    }
    literal.push_str(rest);
    if !literal.is_empty() {
        parts.push(Part::Text(literal));
    }
    Ok(parts)
}

fn find_group(name: &str, replacement: &str, regex: &Regex) -> Result<usize> {
    let group = match name.parse::<usize>() {
        Ok(number) => Some(number).filter(|number| *number < regex.captures_len()),
        Err(_) => regex.capture_names().position(|known| known == Some(name)),
    };
    group.ok_or_else(|| {
        let replacement = fields::shown(replacement);
        let error = Error::new(
            Code::RecipeInvalid,
            format!(
                "the replacement '{replacement}' refers to the group '{}', which the expression does not have",
                fields::shown(name)
            ),
        );
        let digits = name.bytes().take_while(u8::is_ascii_digit).count();
        match digits > 0 && digits < name.len() {
            true => error.hint(format!(
                "write ${{{}}}{} for group {} and then text",
                &name[..digits],
                &name[digits..],
                &name[..digits]
            )),
            false => error.hint(format!("the expression has {} groups", regex.captures_len() - 1)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(pattern: &str, replacement: &str) -> Result<Rule> {
        let regex = Regex::new(pattern).unwrap();
        let replacement = parse_replacement(replacement, &regex)?;
        Ok(Rule { regex, replacement, spot: Spot::at(0) })
    }

    #[test]
    fn replacements_are_those_of_the_regex_crate() {
        let patterns = ["^t\\.(.*)$", "a(?P<x>.)", "(?<y1>[0-9]+)", "", "a|(b)"];
        let replacements = [
            "m.$1", "${1}a", "$$1", "$", "a$", "$.", "${", "${1", "$0$0", "x", "", "$$", "$$$1", "é$1é", "${1}",
            "$1.$0",
        ];
        let names = ["t.a.0", "abab", "ab.12", "b", "é"];
        for pattern in patterns {
            for replacement in replacements {
                let Ok(ours) = rule(pattern, replacement) else { continue };
                for name in names {
                    let want = ours.regex.replace_all(name, replacement).into_owned();
                    assert_eq!(
                        ours.apply(name).unwrap().unwrap_or(name.to_owned()),
                        want,
                        "{pattern} {replacement} {name}"
                    );
                }
            }
        }
        assert_eq!(rule("a(?P<x>.)", "$x-${x}").unwrap().apply("ab").unwrap().unwrap(), "b-b");
    }

    #[test]
    fn unknown_groups_are_refused() {
        for replacement in ["$2", "${2}", "$nope", "${}", "$1a", "$x_y", "${ 1}", "$99999999999999999999999"] {
            let error = rule("(?P<x>a)", replacement).unwrap_err();
            assert_eq!(error.code(), Code::RecipeInvalid, "{replacement}");
        }
        assert_eq!(rule("(a)", "$1a").unwrap_err().hint_text(), Some("write ${1}a for group 1 and then text"));
    }

    #[test]
    fn growth_is_bounded() {
        let doubling = rule(".*", "$0$0$0$0$0$0$0$0").unwrap();
        assert_eq!(doubling.apply(&"x".repeat(4096)).unwrap_err().code(), Code::BadTensorName);
    }
}
