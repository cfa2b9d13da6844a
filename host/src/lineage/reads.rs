//! Which bytes a part of a target reads.

use std::collections::BTreeMap;

use super::ranges::Ranges;
use crate::plan::{Body, Grid, Strided, Target, Visit};

/// Adds what bytes `needed` of `target` are made from: to `inputs`, and to the
/// plan's other `targets`.
pub(super) fn collect(
    target: &Target,
    needed: &mut Ranges,
    inputs: &mut [Ranges],
    targets: &mut BTreeMap<usize, Ranges>,
) {
    let mut reads = Reads { inputs, targets };
    match &target.body {
        Body::View(view) => {
            for &(start, end) in needed.spans() {
                let Ok(()) = view.visit(0, start, end - start, &mut reads);
            }
        }
        Body::Tiles(groups) => {
            for group in groups {
                for turn in turns(group.offset, u64::from(group.len), group.count, needed.spans()) {
                    for window in &group.windows {
                        let Ok(()) = window.visit(turn, 0, window.len(), &mut reads);
                    }
                }
            }
        }
    }
}

/// The turns of a group, ascending, whose tiles have a byte in `spans`.
fn turns(offset: u64, len: u64, count: u64, spans: &[(u64, u64)]) -> Vec<u64> {
    let mut found: Vec<u64> = Vec::new();
    for &(start, end) in spans {
        let first = start.saturating_sub(offset) / len;
        let last = end.saturating_sub(offset).div_ceil(len).min(count);
        let next = found.last().map_or(0, |last| last + 1);
        found.extend(first.max(next)..last);
    }
    found
}

/// Collects what is read.
struct Reads<'a> {
    inputs: &'a mut [Ranges],
    targets: &'a mut BTreeMap<usize, Ranges>,
}

impl Reads<'_> {
    fn of(&mut self, source: u32) -> &mut Ranges {
        let source = source as usize;
        match source.checked_sub(self.inputs.len()) {
            None => &mut self.inputs[source],
            Some(target) => self.targets.entry(target).or_default(),
        }
    }
}

impl Visit for Reads<'_> {
    type Error = std::convert::Infallible;

    fn copy(&mut self, _: u64, source: u32, offset: u64, len: u64) -> Result<(), Self::Error> {
        self.of(source).add(offset, offset + len);
        Ok(())
    }

    fn fill(&mut self, _: u64, _: u8, _: u64) -> Result<(), Self::Error> {
        Ok(())
    }

    fn strided(&mut self, _: u64, runs: Strided) -> Result<(), Self::Error> {
        self.of(runs.source).add_strided(runs);
        Ok(())
    }

    fn grid(&mut self, _: u64, grid: Grid) -> Result<(), Self::Error> {
        self.of(grid.row.source).add_grid(grid);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_those_that_overlap() {
        assert_eq!(turns(100, 10, 5, &[(0, 1000)]), [0, 1, 2, 3, 4]);
        assert_eq!(turns(100, 10, 5, &[(0, 100)]), [0; 0]);
        assert_eq!(turns(100, 10, 5, &[(0, 101), (105, 106), (119, 121), (149, 900)]), [0, 1, 2, 4]);
        assert_eq!(turns(0, 10, 5, &[(50, 60)]), [0; 0]);
    }
}
