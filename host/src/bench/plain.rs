//! Views carried out by plain Rust: the baseline for what moves bytes.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::digest::{LeafHasher, TensorDigest};
use crate::error::{Error, Result};
use crate::plan::{Grid, Strided, View, Visit};

/// Runs that are read one by one; shorter ones are copied from the whole input.
const LONG_BYTES: u64 = 2048;

/// How a view's bytes are moved, worked out before anything is timed.
pub(super) enum Moves {
    /// Source, first byte and length of each run; source `None` is zeros.
    Runs(Vec<(Option<u32>, u64, u64)>),
    /// A transpose of 2-byte elements: rows and columns of the output.
    Transpose { rows: usize, columns: usize },
}

impl Moves {
    /// The moves of a view; `None` if they are too many to list.
    pub(super) fn of(view: &View) -> Option<Self> {
        let mut list = List::default();
        view.visit(0, 0, view.len(), &mut list).ok()?;
        match (list.transpose, list.runs.is_empty()) {
            (Some((rows, columns)), true) => Some(Moves::Transpose { rows, columns }),
            _ => Some(Moves::Runs(list.runs)),
        }
    }

    /// Moves the bytes of the sources that begin at `starts` in `file`, and
    /// hashes what comes out if `hash` says so.
    pub(super) fn carry_out(&self, file: &File, starts: &[(u64, u64)], hash: bool) -> Result<Option<TensorDigest>> {
        let mut hasher = LeafHasher::default();
        let mut take = |bytes: &[u8]| {
            if hash {
                hasher.update(bytes);
            } else {
                std::hint::black_box(bytes);
            }
        };
        let read = |buffer: &mut [u8], at| file.read_exact_at(buffer, at).map_err(|e| Error::io("reading", e));
        match self {
            Moves::Runs(runs) => {
                let mut buffer = vec![0; 1 << 20];
                let short = runs.iter().any(|(source, _, len)| source.is_some() && *len < LONG_BYTES);
                let mut whole = vec![Vec::new(); if short { starts.len() } else { 0 }];
                for (whole, (at, len)) in whole.iter_mut().zip(starts) {
                    whole.resize(*len as usize, 0);
                    read(whole, *at)?;
                }
                let mut filled = 0;
                for &(source, from, len) in runs {
                    let (mut from, mut left) = (from, len as usize);
                    while left > 0 {
                        let piece = left.min(buffer.len() - filled);
                        let to = &mut buffer[filled..filled + piece];
                        match source {
                            None => to.fill(0),
                            Some(s) if short => to.copy_from_slice(&whole[s as usize][from as usize..][..piece]),
                            Some(s) => read(to, starts[s as usize].0 + from)?,
                        }
                        filled += piece;
                        from += piece as u64;
                        left -= piece;
                        if filled == buffer.len() {
                            take(&buffer);
                            filled = 0;
                        }
                    }
                }
                take(&buffer[..filled]);
            }
            Moves::Transpose { rows, columns } => {
                let mut from = vec![0; rows * columns * 2];
                let mut to = vec![0; rows * columns * 2];
                read(&mut from, starts[0].0)?;
                const BLOCK: usize = 64;
                for r0 in (0..*rows).step_by(BLOCK) {
                    for c0 in (0..*columns).step_by(BLOCK) {
                        for r in r0..(*rows).min(r0 + BLOCK) {
                            for c in c0..(*columns).min(c0 + BLOCK) {
                                let (a, b) = ((r * columns + c) * 2, (c * rows + r) * 2);
                                to[a..a + 2].copy_from_slice(&from[b..b + 2]);
                            }
                        }
                    }
                }
                take(&to);
            }
        }
        Ok(hash.then(|| hasher.finish().0))
    }
}

#[derive(Default)]
struct List {
    runs: Vec<(Option<u32>, u64, u64)>,
    transpose: Option<(usize, usize)>,
}

/// There are too many runs.
struct TooMany;

impl Visit for List {
    type Error = TooMany;

    fn copy(&mut self, _: u64, source: u32, offset: u64, len: u64) -> Result<(), TooMany> {
        self.runs.push((Some(source), offset, len));
        if self.runs.len() > 1 << 24 { Err(TooMany) } else { Ok(()) }
    }

    fn fill(&mut self, _: u64, _: u8, len: u64) -> Result<(), TooMany> {
        self.runs.push((None, 0, len));
        Ok(())
    }

    fn grid(&mut self, at: u64, grid: Grid) -> Result<(), TooMany> {
        let row = grid.row;
        if row.len == 2 && grid.row_stride == 2 && row.stride == 2 * grid.rows {
            self.transpose = Some((grid.rows as usize, row.count as usize));
            return Ok(());
        }
        let row_len = row.len * row.count;
        (0..grid.rows).try_for_each(|i| {
            self.strided(at + i * row_len, Strided { offset: row.offset + i * grid.row_stride, ..row })
        })
    }
}
