//! Sets of bytes of a tensor, as ranges.

use crate::plan::{Grid, Strided};

/// More ranges than this are not told apart: a set of more becomes the one
/// range that covers them.
const LIMIT: usize = 1 << 20;

/// A set of bytes. Ranges are ascending and neither overlap nor touch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges {
    spans: Vec<(u64, u64)>,
    /// How many spans at the beginning are in order.
    settled: usize,
    exact: bool,
}

impl Default for Ranges {
    fn default() -> Self {
        Ranges { spans: Vec::new(), settled: 0, exact: true }
    }
}

impl Ranges {
    /// The bytes `0..len`.
    pub fn whole(len: u64) -> Self {
        let mut ranges = Ranges::default();
        ranges.add(0, len);
        ranges
    }

    /// Adds the bytes `start..end`.
    pub fn add(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        if let Some(last) = self.spans.last_mut().filter(|last| (last.0..=last.1).contains(&start)) {
            last.1 = last.1.max(end);
            return;
        }
        self.spans.push((start, end));
        if self.spans.len() >= 2 * self.settled + 4096 {
            self.settle();
        }
    }

    /// Adds the bytes of regular runs.
    pub(super) fn add_strided(&mut self, runs: Strided) {
        self.add_regular(runs.offset, runs.len, &mut [(runs.count, runs.stride)]);
    }

    /// Adds the bytes of rows of regular runs.
    pub(super) fn add_grid(&mut self, grid: Grid) {
        let row = grid.row;
        self.add_regular(row.offset, row.len, &mut [(row.count, row.stride), (grid.rows, grid.row_stride)]);
    }

    /// Adds runs of `len` bytes at `first` plus any sum of multiples below
    /// `count` of each stride. Loops that continue what inner ones cover are
    /// one run, in whatever order they are nested: a transpose reads its
    /// source whole.
    fn add_regular(&mut self, first: u64, mut len: u64, loops: &mut [(u64, u64)]) {
        loops.sort_unstable_by_key(|(_, stride)| *stride);
        let mut apart: Vec<(u64, u64)> = Vec::new();
        for &(count, stride) in loops.iter().filter(|(count, _)| *count > 1) {
            match stride <= len && apart.is_empty() {
                true => len += (count - 1) * stride,
                false => apart.push((count, stride)),
            }
        }
        let runs = apart.iter().fold(1_u64, |runs, (count, _)| runs.saturating_mul(*count));
        if runs > LIMIT as u64 {
            let end = first + apart.iter().map(|(count, stride)| (count - 1) * stride).sum::<u64>() + len;
            self.exact = false;
            return self.add(first, end);
        }
        // The loop with the widest stride is the outermost.
        apart.reverse();
        self.add_nested(first, len, &apart);
    }

    fn add_nested(&mut self, first: u64, len: u64, loops: &[(u64, u64)]) {
        match loops {
            [] => self.add(first, first + len),
            [(count, stride), inner @ ..] => (0..*count).for_each(|i| self.add_nested(first + i * stride, len, inner)),
        }
    }

    /// Adds the bytes of another set.
    pub fn extend(&mut self, other: &Ranges) {
        self.exact &= other.exact;
        other.spans.iter().for_each(|&(start, end)| self.add(start, end));
    }

    fn settle(&mut self) {
        self.spans.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(self.spans.len());
        for &(start, end) in &self.spans {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        if merged.len() > LIMIT {
            // In range: there are many.
            merged = vec![(merged[0].0, merged[merged.len() - 1].1)];
            self.exact = false;
        }
        self.settled = merged.len();
        self.spans = merged;
    }

    /// The ranges: first byte, and the one after the last.
    pub fn spans(&mut self) -> &[(u64, u64)] {
        self.settle();
        &self.spans
    }

    /// Whether every byte of the ranges is in the set, and not only covered
    /// because there are too many ranges.
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// How many bytes the ranges have.
    pub fn len_bytes(&mut self) -> u64 {
        self.spans().iter().map(|(start, end)| end - start).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(offset: u64, len: u64, count: u64, stride: u64) -> Strided {
        Strided { source: 0, offset, len, count, stride }
    }

    #[test]
    fn what_touches_is_one_in_whatever_order_it_comes() {
        let mut ranges = Ranges::default();
        for (start, end) in [(10, 20), (0, 5), (5, 10), (30, 31), (15, 16), (7, 7)] {
            ranges.add(start, end);
        }
        assert_eq!(ranges.spans(), [(0, 20), (30, 31)]);
        assert_eq!((ranges.len_bytes(), ranges.is_exact()), (21, true));
        let mut other = Ranges::whole(40);
        other.extend(&ranges);
        assert_eq!(other.spans(), [(0, 40)]);
    }

    /// Every set of small loops against the set of its bytes, one by one.
    #[test]
    fn regular_runs_are_the_bytes_that_they_read() {
        let mut tried = 0;
        for len in 1..4 {
            for (count, rows) in [(1, 1), (1, 3), (2, 2), (3, 2), (2, 4)] {
                for stride in 0..9 {
                    for row_stride in 0..9 {
                        let grid = Grid { row: runs(5, len, count, stride), rows, row_stride };
                        let mut found = Ranges::default();
                        found.add_grid(grid);
                        let mut bytes = std::collections::BTreeSet::new();
                        for r in 0..rows {
                            for c in 0..count {
                                let at = 5 + r * row_stride + c * stride;
                                bytes.extend(at..at + len);
                            }
                        }
                        let listed: Vec<u64> = found.spans().iter().flat_map(|&(a, b)| a..b).collect();
                        assert_eq!(listed, bytes.into_iter().collect::<Vec<_>>(), "{grid:?}");
                        tried += 1;
                    }
                }
            }
        }
        assert_eq!(tried, 3 * 5 * 81);
    }

    #[test]
    fn a_transpose_of_a_large_matrix_is_one_range() {
        let mut ranges = Ranges::default();
        ranges.add_grid(Grid { row: runs(0, 2, 50_000, 100_000), rows: 50_000, row_stride: 2 });
        assert_eq!(ranges.spans(), [(0, 5_000_000_000)]);
    }

    #[test]
    fn too_many_ranges_become_their_cover() {
        let mut ranges = Ranges::default();
        ranges.add_strided(runs(0, 1, 3 << 20, 2));
        assert!(!ranges.is_exact());
        assert_eq!(ranges.spans(), [(0, (6 << 20) - 1)]);
        let mut one_by_one = Ranges::default();
        (0..3_u64 << 20).for_each(|i| one_by_one.add(2 * i, 2 * i + 1));
        assert!(one_by_one.spans().len() <= LIMIT);
        assert!(!one_by_one.is_exact());
    }
}
