//! The order of captured values: numbers by value, then everything else by
//! bytes.

use std::cmp::Ordering;

/// A captured value in its natural order. Values that are the same number
/// (`1` and `01`) are ordered by bytes, so equality is equality of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Natural<'a>(pub(super) &'a str);

impl<'a> Natural<'a> {
    /// The digits of a decimal number without leading zeros; `None` if the
    /// value is no number.
    pub(super) fn digits(self) -> Option<&'a str> {
        if self.0.is_empty() || !self.0.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let digits = self.0.trim_start_matches('0');
        Some(if digits.is_empty() { "0" } else { digits })
    }
}

impl Ord for Natural<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_kind = match (self.digits(), other.digits()) {
            (Some(a), Some(b)) => a.len().cmp(&b.len()).then_with(|| a.cmp(b)),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => Ordering::Equal,
        };
        by_kind.then_with(|| self.0.cmp(other.0))
    }
}

impl PartialOrd for Natural<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_first_by_value() {
        let mut values = ["b", "10", "9", "a", "01", "1", "0", "100000000000000000000000", "-1", ""].map(Natural);
        values.sort();
        assert_eq!(values.map(|v| v.0), ["0", "01", "1", "9", "10", "100000000000000000000000", "", "-1", "a", "b"]);
        assert_eq!(Natural("000").digits(), Some("0"));
        assert_eq!(Natural("١").digits(), None, "only ASCII digits are numbers");
    }
}
