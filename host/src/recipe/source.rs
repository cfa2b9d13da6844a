//! The recipe's text, and where in it things stand.
//!
//! While a recipe is read only byte offsets ([`Spot`]) are kept; lines and
//! columns are counted when somebody asks, which is for errors.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Code, Error, Location};

/// A byte offset into the recipe's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Spot(usize);

impl Spot {
    /// Where a TOML value or key begins.
    pub(super) fn of<T>(value: &toml::Spanned<T>) -> Self {
        Spot(value.span().start)
    }

    pub(super) const fn at(offset: usize) -> Self {
        Spot(offset)
    }
}

/// A recipe's text and the name of its file.
#[derive(Clone, Debug)]
pub(super) struct Source {
    file: PathBuf,
    text: Arc<str>,
}

impl Source {
    pub(super) fn new(file: &Path, text: &str) -> Self {
        Source { file: file.to_path_buf(), text: text.into() }
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// The SHA-256 of the text.
    pub(super) fn digest(&self) -> crate::digest::BlobDigest {
        crate::digest::BlobDigest::of(self.text.as_bytes())
    }

    /// The line and column of a spot; columns count characters.
    pub(super) fn locate(&self, spot: Spot) -> Location {
        let mut end = spot.0.min(self.text.len());
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &self.text[..end];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.bytes().filter(|b| *b == b'\n').count() + 1;
        let column = before[line_start..].chars().count() + 1;
        let bounded = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Location { file: self.file.clone(), line: bounded(line), column: bounded(column) }
    }

    /// A `recipe_invalid` at a spot.
    pub(super) fn invalid(&self, spot: Spot, message: impl Into<String>) -> Error {
        Error::new(Code::RecipeInvalid, message).at(self.locate(spot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_columns_count_from_one_in_characters() {
        let source = Source::new(Path::new("r.toml"), "a\né = 'x'\n");
        let at = |offset| {
            let location = source.locate(Spot(offset));
            (location.line, location.column)
        };
        assert_eq!(at(0), (1, 1));
        assert_eq!(at(2), (2, 1));
        assert_eq!(at(3), (2, 1), "inside é");
        assert_eq!(at(4), (2, 2));
        assert_eq!(at(7), (2, 5));
        assert_eq!(at(9999), (3, 1));
    }
}
