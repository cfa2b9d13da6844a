//! Page-aligned ranges: what is registered, and in which pieces.

use crate::error::{Code, Error, Result};

/// What ranges are aligned to. Registration pins whole pages of this size, on
/// machines with larger pages too.
pub const PAGE_BYTES: u64 = 4096;

/// A non-empty range whose start and end are multiples of [`PAGE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRange {
    start: u64,
    end: u64,
}

impl PageRange {
    /// The smallest range of whole pages that holds `len` bytes from `start`;
    /// `None` if there are no bytes or the end overflows.
    pub fn around(start: u64, len: u64) -> Option<Self> {
        let end = start.checked_add(len)?.checked_next_multiple_of(PAGE_BYTES)?;
        (len > 0).then_some(PageRange { start: start / PAGE_BYTES * PAGE_BYTES, end })
    }

    /// First byte.
    pub fn start(self) -> u64 {
        self.start
    }

    /// One past the last byte.
    pub fn end(self) -> u64 {
        self.end
    }

    /// Size in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// The part of `start..start + len` inside this range, if any.
    pub fn clip(self, start: u64, len: u64) -> Option<std::ops::Range<u64>> {
        let (from, to) = (start.max(self.start), start.saturating_add(len).min(self.end));
        (from < to).then_some(from..to)
    }
}

/// The fewest page ranges that hold all `(start, length)` of one file:
/// ascending, neither overlapping nor adjacent. Ranges of different files must
/// never come here together, even where their mappings happen to be adjacent:
/// one registration must not span two mappings.
///
/// # Errors
/// `registration_failed` if a range overflows.
pub(super) fn coalesce(ranges: &[(u64, u64)]) -> Result<Vec<PageRange>> {
    let mut pages = Vec::with_capacity(ranges.len());
    for &(start, len) in ranges.iter().filter(|(_, len)| *len > 0) {
        pages.push(PageRange::around(start, len).ok_or_else(|| {
            Error::new(Code::RegistrationFailed, format!("{len} bytes from {start:#x} end beyond the address space"))
        })?);
    }
    pages.sort_unstable();
    let mut merged: Vec<PageRange> = Vec::with_capacity(pages.len());
    for page in pages {
        match merged.last_mut() {
            Some(last) if page.start <= last.end => last.end = last.end.max(page.end),
            _ => merged.push(page),
        }
    }
    Ok(merged)
}

/// Cuts ranges into pieces of at most `max_bytes`, on page boundaries. A piece
/// ends at the last of `cuts` (ascending) that it can reach, so that what lies
/// between two of them is not divided where it fits into one piece.
///
/// # Panics
/// If `max_bytes` is not a positive multiple of the page size.
pub(super) fn cut(ranges: &[PageRange], max_bytes: u64, cuts: &[u64]) -> Vec<PageRange> {
    assert!(max_bytes > 0 && max_bytes.is_multiple_of(PAGE_BYTES), "a piece is a positive number of whole pages");
    let mut pieces = Vec::new();
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            let furthest = range.end.min(start.saturating_add(max_bytes));
            let reachable = &cuts[..cuts.partition_point(|c| *c <= furthest)];
            let preferred = reachable.iter().rev().take_while(|c| **c > start).find(|c| c.is_multiple_of(PAGE_BYTES));
            let end = if furthest == range.end { furthest } else { preferred.copied().unwrap_or(furthest) };
            pieces.push(PageRange { start, end });
            start = end;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange { start, end }
    }

    #[test]
    fn overlapping_and_adjacent_pages_become_one_range() {
        let found = coalesce(&[(0x1003, 4096), (0x2800, 1024), (0x9001, 1)]).unwrap();
        assert_eq!(found, [range(0x1000, 0x3000), range(0x9000, 0xA000)]);
        assert_eq!(coalesce(&[(0x9001, 1), (0x2800, 1024), (0x1003, 4096), (0x1003, 4096), (5, 0)]).unwrap(), found);
        assert_eq!(coalesce(&[(0, 4096), (4096, 1)]).unwrap(), [range(0, 8192)]);
        assert_eq!(coalesce(&[]).unwrap(), []);
    }

    #[test]
    fn every_small_set_is_covered_by_the_fewest_pages() {
        let pages = |set: &[(u64, u64)]| -> Vec<u64> {
            let mut pages: Vec<u64> =
                set.iter().filter(|r| r.1 > 0).flat_map(|r| r.0 / 4096..=(r.0 + r.1 - 1) / 4096).collect();
            pages.sort_unstable();
            pages.dedup();
            pages
        };
        let starts = [0, 1, 4095, 4096, 8191, 8192];
        let lens = [0, 1, 4096, 4097];
        for a in starts {
            for b in starts {
                for la in lens {
                    for lb in lens {
                        let set = [(a, la), (b, lb)];
                        let found = coalesce(&set).unwrap();
                        let covered: Vec<u64> = found.iter().flat_map(|r| r.start() / 4096..r.end() / 4096).collect();
                        assert_eq!(covered, pages(&set), "{set:?}");
                        assert!(found.windows(2).all(|w| w[0].end() < w[1].start()), "{set:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_overflowing_range_is_an_error() {
        for bad in [(u64::MAX, 1), (u64::MAX - 4000, 1), (1, u64::MAX)] {
            assert_eq!(coalesce(&[bad]).unwrap_err().code(), Code::RegistrationFailed, "{bad:?}");
        }
    }

    #[test]
    fn pieces_cover_the_ranges_and_prefer_the_given_cuts() {
        let ranges = [range(0, 10 * 4096), range(20 * 4096, 21 * 4096)];
        let pages = |cuts: &[u64]| -> Vec<_> {
            cut(&ranges, 4 * 4096, cuts).iter().map(|p| (p.start() / 4096, p.end() / 4096)).collect()
        };
        assert_eq!(pages(&[]), [(0, 4), (4, 8), (8, 10), (20, 21)]);
        assert_eq!(pages(&[2 * 4096, 3 * 4096, 3 * 4096 + 5, 50 * 4096]), [(0, 3), (3, 7), (7, 10), (20, 21)]);
        assert_eq!(pages(&[9 * 4096]), [(0, 4), (4, 8), (8, 10), (20, 21)], "what fits is not cut");
    }

    #[test]
    fn a_clip_is_the_common_part() {
        let page = range(4096, 8192);
        assert_eq!(page.clip(0, 5000), Some(4096..5000));
        assert_eq!(page.clip(5000, u64::MAX), Some(5000..8192));
        assert_eq!(page.clip(0, 4096), None);
        assert_eq!(page.clip(8192, 1), None);
    }
}
