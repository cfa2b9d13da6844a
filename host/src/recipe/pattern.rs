//! Name patterns: text with captures.
//!
//! | form | matches |
//! | --- | --- |
//! | `{i}` | one run of characters without a dot, at least one |
//! | `{path...}` | any characters, at least one |
//! | `{*e}` | as `{i}`, and collects all its values into a list |
//!
//! Where several readings are possible the earlier capture takes as much as it
//! can, as in a regular expression. A capture that is written twice matches
//! the same text both times. A brace that opens no capture is refused.

use crate::error::{Code, Error, Result};

/// How many captures a pattern may refer to.
const MAX_REFERENCES: usize = 32;
/// How long a pattern may be, in bytes.
const MAX_BYTES: usize = 4096;
/// How many positions may be tried for one name. A name of 100 characters
/// under a reasonable pattern takes some dozens.
const MAX_TRIES: u32 = 100_000;

/// What a capture matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `{i}`
    Run,
    /// `{path...}`
    Path,
    /// `{*e}`
    List,
}

/// A capture of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Capture {
    pub(super) name: String,
    pub(super) form: Form,
}

#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    /// Position in `captures`.
    Capture(usize),
}

/// A parsed pattern.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    text: String,
    pieces: Vec<Piece>,
    captures: Vec<Capture>,
}

/// How a pattern matched.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found<'n> {
    /// By position in [`Pattern::captures`].
    pub(super) values: Vec<&'n str>,
    /// Where the matched text ends.
    pub(super) end: usize,
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// `recipe_invalid`, without a location.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let refuse = |why: String| Err(Error::new(Code::RecipeInvalid, format!("the pattern '{text}' {why}")));
        if text.is_empty() {
            return refuse("is empty".into());
        }
        if text.len() > MAX_BYTES {
            return Err(Error::new(
                Code::RecipeInvalid,
                format!("a pattern has {} bytes, more than {MAX_BYTES}", text.len()),
            ));
        }
        let mut pattern = Pattern { text: text.to_owned(), pieces: Vec::new(), captures: Vec::new() };
        let mut rest = text;
        while let Some(brace) = rest.find(['{', '}']) {
            pattern.push_text(&rest[..brace]);
            let Some(close) = rest[brace..].strip_prefix('{').and_then(|inner| inner.find('}')) else {
                return refuse(format!("has a '{}' without its counterpart", &rest[brace..=brace]));
            };
            let inner = &rest[brace + 1..brace + 1 + close];
            let Some(capture) = read_capture(inner) else {
                return refuse(format!(
                    "has '{{{inner}}}', which is no capture; expected {{i}}, {{path...}} or {{*e}}"
                ));
            };
            if let Err(why) = pattern.push_capture(capture) {
                return refuse(why);
            }
            rest = &rest[brace + close + 2..];
        }
        pattern.push_text(rest);
        Ok(pattern)
    }

    fn push_text(&mut self, text: &str) {
        if !text.is_empty() {
            self.pieces.push(Piece::Text(text.to_owned()));
        }
    }

    fn push_capture(&mut self, capture: Capture) -> Result<(), String> {
        if self.pieces.iter().filter(|p| matches!(p, Piece::Capture(_))).count() == MAX_REFERENCES {
            return Err(format!("refers to captures more than {MAX_REFERENCES} times"));
        }
        let position = match self.captures.iter().position(|known| known.name == capture.name) {
            Some(known) if self.captures[known].form != capture.form => {
                return Err(format!("has the capture '{}' in two forms", capture.name));
            }
            Some(known) => known,
            None => {
                self.captures.push(capture);
                self.captures.len() - 1
            }
        };
        self.pieces.push(Piece::Capture(position));
        Ok(())
    }

    /// As it was written.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// In order of appearance.
    pub(super) fn captures(&self) -> &[Capture] {
        &self.captures
    }

    /// What every match begins with.
    pub(super) fn literal_prefix(&self) -> &str {
        match self.pieces.first() {
            Some(Piece::Text(text)) => text,
            _ => "",
        }
    }

    /// Matches a whole name.
    ///
    /// # Errors
    /// `recipe_invalid`, without a location, if there are too many ways to try.
    pub(super) fn match_whole<'n>(&self, name: &'n str) -> Result<Option<Found<'n>>> {
        match self.pieces.last() {
            Some(Piece::Text(text)) if !name.ends_with(text.as_str()) => Ok(None),
            _ => self.search(name, true),
        }
    }

    /// Matches the beginning of a name.
    ///
    /// # Errors
    /// As [`match_whole`](Self::match_whole).
    pub(super) fn match_prefix<'n>(&self, name: &'n str) -> Result<Option<Found<'n>>> {
        self.search(name, false)
    }

    fn search<'n>(&self, name: &'n str, whole: bool) -> Result<Option<Found<'n>>> {
        if !name.starts_with(self.literal_prefix()) {
            return Ok(None);
        }
        let mut search = Search { pattern: self, name, whole, values: vec![None; self.captures.len()], tries: 0 };
        let end = search.from(0, 0).map_err(|TooManyWays| {
            Error::new(
                Code::RecipeInvalid,
                format!("the pattern '{}' can be read in too many ways on the name '{name}'", self.text),
            )
            .hint("put text between the captures, or use {i}, which stops at a dot")
        })?;
        Ok(end.map(|end| Found { values: search.values.iter().map(|v| v.unwrap_or("")).collect(), end }))
    }

    /// The name that the captures' values give. A capture without a value is
    /// written as the pattern has it, for messages.
    pub(super) fn render<'v>(&self, value_of: impl Fn(&str) -> Option<&'v str>) -> String {
        let mut name = String::with_capacity(self.text.len());
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => name.push_str(text),
                Piece::Capture(position) => {
                    let capture = &self.captures[*position];
                    match value_of(&capture.name) {
                        Some(value) => name.push_str(value),
                        None => name.push_str(&capture.written()),
                    }
                }
            }
        }
        name
    }
}

impl Capture {
    /// As a pattern has it.
    pub(super) fn written(&self) -> String {
        match self.form {
            Form::Run => format!("{{{}}}", self.name),
            Form::Path => format!("{{{}...}}", self.name),
            Form::List => format!("{{*{}}}", self.name),
        }
    }
}

fn read_capture(inner: &str) -> Option<Capture> {
    let (name, form) = if let Some(name) = inner.strip_prefix('*') {
        (name, Form::List)
    } else if let Some(name) = inner.strip_suffix("...") {
        (name, Form::Path)
    } else {
        (inner, Form::Run)
    };
    let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    plain.then(|| Capture { name: name.to_owned(), form })
}

struct TooManyWays;

/// Backtracking over the pieces. The depth is that of the pattern; the work is
/// bounded by [`MAX_TRIES`].
struct Search<'p, 'n> {
    pattern: &'p Pattern,
    name: &'n str,
    whole: bool,
    values: Vec<Option<&'n str>>,
    tries: u32,
}

impl<'n> Search<'_, 'n> {
    /// Where the match ends if the pieces from `piece` on match from `at` on.
    fn from(&mut self, piece: usize, at: usize) -> Result<Option<usize>, TooManyWays> {
        let rest = &self.name[at..];
        match self.pattern.pieces.get(piece) {
            None => Ok((!self.whole || rest.is_empty()).then_some(at)),
            Some(Piece::Text(text)) => match rest.starts_with(text.as_str()) {
                true => self.from(piece + 1, at + text.len()),
                false => Ok(None),
            },
            Some(Piece::Capture(capture)) => match self.values[*capture] {
                Some(value) if rest.starts_with(value) => self.from(piece + 1, at + value.len()),
                Some(_) => Ok(None),
                None => self.bind(*capture, piece, at),
            },
        }
    }

    /// Tries the values of a capture, the longest first.
    fn bind(&mut self, capture: usize, piece: usize, at: usize) -> Result<Option<usize>, TooManyWays> {
        let longest = match self.pattern.captures[capture].form {
            Form::Path => self.name.len(),
            Form::Run | Form::List => self.name[at..].find('.').map_or(self.name.len(), |dot| at + dot),
        };
        let is_last = piece + 1 == self.pattern.pieces.len();
        let shortest = if is_last && self.whole { self.name.len() } else { at + 1 };
        let next_byte = match self.pattern.pieces.get(piece + 1) {
            Some(Piece::Text(text)) => text.bytes().next(),
            _ => None,
        };
        for end in (shortest..=longest).rev() {
            let fits_next = next_byte.is_none() || self.name.as_bytes().get(end).copied() == next_byte;
            if !fits_next || end == at || !self.name.is_char_boundary(end) {
                continue;
            }
            self.tries += 1;
            if self.tries > MAX_TRIES {
                return Err(TooManyWays);
            }
            self.values[capture] = Some(&self.name[at..end]);
            if let Some(found) = self.from(piece + 1, end)? {
                return Ok(Some(found));
            }
            self.values[capture] = None;
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values<'n>(pattern: &str, name: &'n str) -> Option<Vec<&'n str>> {
        Pattern::parse(pattern).unwrap().match_whole(name).unwrap().map(|found| found.values)
    }

    #[test]
    fn a_run_stops_at_a_dot_and_a_path_does_not() {
        assert_eq!(values("h.{i}.w", "h.10.w"), Some(vec!["10"]));
        assert_eq!(values("h.{i}.w", "h.1.2.w"), None);
        assert_eq!(values("h.{i}.w", "h..w"), None, "at least one character");
        assert_eq!(values("{p...}.w", "a.b.w"), Some(vec!["a.b"]));
        assert_eq!(values("{p...}", "a.b.w"), Some(vec!["a.b.w"]));
        assert_eq!(values("{p...}.w", ".w"), None, "at least one character");
        assert_eq!(values("e.{*e}.w", "e.x.w"), Some(vec!["x"]));
        assert_eq!(values("{i}", "a.b"), None);
        assert_eq!(values("a", "a"), Some(vec![]));
        assert_eq!(values("a", "ab"), None);
        assert_eq!(values("{i}é", "üé"), Some(vec!["ü"]));
    }

    #[test]
    fn the_earlier_capture_takes_what_it_can() {
        assert_eq!(values("{a...}.{b...}", "x.y.z"), Some(vec!["x.y", "z"]));
        assert_eq!(values("{a}{b}", "xyz"), Some(vec!["xy", "z"]));
        assert_eq!(values("{a...}.l.{i}.w", "m.l.0.l.1.w"), Some(vec!["m.l.0", "1"]));
    }

    #[test]
    fn a_capture_written_twice_matches_the_same_text() {
        assert_eq!(values("{i}.x.{i}", "3.x.3"), Some(vec!["3"]));
        assert_eq!(values("{i}.x.{i}", "3.x.33"), None);
        assert_eq!(values("{p...}-{p...}", "a-b-a-b"), Some(vec!["a-b"]));
    }

    #[test]
    fn a_prefix_ends_where_the_pattern_ends() {
        let pattern = Pattern::parse("h.{i}.").unwrap();
        assert_eq!(pattern.match_prefix("h.10.w.x").unwrap(), Some(Found { values: vec!["10"], end: 5 }));
        assert_eq!(pattern.match_prefix("h.10").unwrap(), None);
    }

    #[test]
    fn stray_braces_and_odd_captures_are_refused() {
        let bad = [
            "",
            "a{",
            "a}",
            "{}",
            "{{i}}",
            "{i",
            "i}",
            "{*}",
            "{...}",
            "{*e...}",
            "{a b}",
            "{i.}",
            "{é}",
            "{a}}",
            "{i}{i...}",
        ];
        for text in bad {
            assert_eq!(Pattern::parse(text).unwrap_err().code(), Code::RecipeInvalid, "{text}");
        }
        assert!(Pattern::parse(&"{i}".repeat(33)).is_err());
        assert!(Pattern::parse(&"x".repeat(4097)).is_err());
    }

    #[test]
    fn rendering_is_the_inverse_of_matching() {
        let pattern = Pattern::parse("{p...}.l.{i}.e.{*e}.{i}").unwrap();
        let name = "m.x.l.3.e.7.3";
        let found = pattern.match_whole(name).unwrap().unwrap();
        let value_of = |name: &str| pattern.captures().iter().position(|c| c.name == name).map(|i| found.values[i]);
        assert_eq!(pattern.render(value_of), name);
        assert_eq!(pattern.render(|_| None), pattern.text());
    }

    #[test]
    fn hopeless_patterns_end_with_an_error() {
        let pattern = Pattern::parse("{a...}x{b...}x{c...}x{d...}x{e...}xy").unwrap();
        assert!(matches!(pattern.match_whole(&"x".repeat(300)), Ok(None)), "the literal end is looked at first");
        let pattern = Pattern::parse("{a...}x{b...}x{c...}x{d...}x{e...}y{f}").unwrap();
        let error = pattern.match_whole(&"xz".repeat(300)).unwrap_err();
        assert_eq!(error.code(), Code::RecipeInvalid);
    }
}
