//! Carrying out a view: the bytes of any range of it, into a buffer.
//!
//! Long runs are read straight into place. Short ones (a transpose, a column
//! shard) are never read one by one: the region of the source that covers them
//! is read once, in bounded bands, and the runs are gathered from it in blocks
//! that stay in the cache.

use rayon::prelude::*;

use super::buffers::Buffers;
use crate::error::Result;
use crate::plan::{Grid, Strided, View, Visit};

/// Reads bytes of a source: its number, the first byte, and where to.
pub(crate) type Read<'a> = dyn Fn(u32, u64, &mut [u8]) -> Result<()> + Sync + 'a;

/// Runs that are this long on average are read one by one.
const LONG_RUN_BYTES: u64 = 2048;
/// The most of a source that is held to gather short runs from.
const BAND_BYTES: u64 = 64 << 20;

/// What a range of a view looks like.
#[derive(Clone, Debug, Default)]
pub(crate) struct Survey {
    /// Bytes copied, and in how many runs.
    pub(crate) copied: u64,
    runs: u64,
    /// For each source, the region that covers its runs, ascending by source.
    covers: Vec<(u32, u64, u64)>,
}

impl Survey {
    /// Surveys a range of a view.
    pub(crate) fn of(view: &View, outer_turn: u64, start: u64, len: u64) -> Self {
        let mut survey = Survey::default();
        let Ok(()) = view.visit(outer_turn, start, len, &mut survey);
        survey.covers.sort_unstable();
        survey
    }

    /// Whether runs are long enough to be read one by one.
    pub(crate) fn long_runs(&self) -> bool {
        self.mean_run() >= LONG_RUN_BYTES
    }

    /// Bytes of a run, on average; of a view without copies, any number.
    pub(crate) fn mean_run(&self) -> u64 {
        self.copied.checked_div(self.runs).unwrap_or(u64::MAX)
    }

    /// The sources that are read, ascending.
    pub(crate) fn sources(&self) -> Vec<u32> {
        self.covers.iter().map(|(source, ..)| *source).collect()
    }

    /// Bytes of all covering regions.
    pub(crate) fn covered(&self) -> u64 {
        self.covers.iter().map(|(_, first, end)| end - first).sum()
    }

    fn add(&mut self, source: u32, first: u64, end: u64, copied: u64, runs: u64) {
        self.copied += copied;
        self.runs += runs;
        match self.covers.iter_mut().rev().find(|(s, ..)| *s == source) {
            Some((_, a, b)) => {
                *a = first.min(*a);
                *b = end.max(*b);
            }
            None => self.covers.push((source, first, end)),
        }
    }
}

impl Visit for Survey {
    type Error = std::convert::Infallible;

    fn copy(&mut self, _: u64, source: u32, offset: u64, len: u64) -> Result<(), Self::Error> {
        self.add(source, offset, offset + len, len, 1);
        Ok(())
    }

    fn fill(&mut self, _: u64, _: u8, _: u64) -> Result<(), Self::Error> {
        Ok(())
    }

    fn strided(&mut self, _: u64, r: Strided) -> Result<(), Self::Error> {
        let end = r.offset + (r.count - 1) * r.stride + r.len;
        let runs = if r.stride == r.len { 1 } else { r.count };
        self.add(r.source, r.offset, end, r.count * r.len, runs);
        Ok(())
    }

    fn grid(&mut self, _: u64, g: Grid) -> Result<(), Self::Error> {
        let r = g.row;
        let end = r.offset + (g.rows - 1) * g.row_stride + (r.count - 1) * r.stride + r.len;
        self.add(r.source, r.offset, end, g.rows * r.count * r.len, g.rows * r.count);
        Ok(())
    }
}

/// Writes bytes `start..start + out.len()` of `view` to `out`.
pub(crate) fn gather(
    view: &View,
    outer_turn: u64,
    start: u64,
    out: &mut [u8],
    read: &Read<'_>,
    buffers: &Buffers,
) -> Result<()> {
    let len = out.len() as u64;
    let direct = |out| {
        let mut direct = Direct { out, read, pending: None };
        view.visit(outer_turn, start, len, &mut direct)?;
        direct.flush()
    };
    // What is long anywhere need not be surveyed here.
    if view.shortest_run() >= LONG_RUN_BYTES {
        return direct(out);
    }
    let survey = Survey::of(view, outer_turn, start, len);
    if survey.long_runs() {
        return direct(out);
    }
    for &(source, first, end) in &survey.covers {
        let mut from = first;
        while from < end {
            let to = end.min(from + BAND_BYTES);
            let mut region = buffers.take((to - from) as usize);
            read(source, from, &mut region)?;
            let whole = from == first && to == end;
            let mut band = Band { out: &mut *out, region: &region, source, from, to, whole };
            let Ok(()) = view.visit(outer_turn, start, len, &mut band);
            from = to;
        }
    }
    Ok(())
}

/// [`gather`] for a large range of a view with short runs, on all threads of
/// the current pool: each band of the source is read, and gathered from, in
/// parallel.
pub(crate) fn gather_wide(view: &View, start: u64, out: &mut [u8], read: &Read<'_>, buffers: &Buffers) -> Result<()> {
    const PIECE: usize = 2 << 20;
    let survey = Survey::of(view, 0, start, out.len() as u64);
    if survey.long_runs() {
        return out
            .par_chunks_mut(PIECE)
            .enumerate()
            .try_for_each(|(i, piece)| gather(view, 0, start + (i * PIECE) as u64, piece, read, buffers));
    }
    for &(source, first, end) in &survey.covers {
        let mut from = first;
        while from < end {
            let to = end.min(from + BAND_BYTES);
            let mut region = buffers.take((to - from) as usize);
            region
                .par_chunks_mut(PIECE)
                .enumerate()
                .try_for_each(|(i, piece)| read(source, from + (i * PIECE) as u64, piece))?;
            let whole = from == first && to == end;
            out.par_chunks_mut(PIECE).enumerate().for_each(|(i, piece)| {
                let len = piece.len() as u64;
                let mut band = Band { out: piece, region: &region, source, from, to, whole };
                let Ok(()) = view.visit(0, start + (i * PIECE) as u64, len, &mut band);
            });
            from = to;
        }
    }
    Ok(())
}

/// Reads runs into place, joining those that continue each other.
struct Direct<'a> {
    out: &'a mut [u8],
    read: &'a Read<'a>,
    /// A run that is not read yet: at, source, offset, length.
    pending: Option<(u64, u32, u64, u64)>,
}

impl Direct<'_> {
    fn flush(&mut self) -> Result<()> {
        match self.pending.take() {
            Some((at, source, offset, len)) => (self.read)(source, offset, range(self.out, at, len)),
            None => Ok(()),
        }
    }
}

impl Visit for Direct<'_> {
    type Error = crate::error::Error;

    fn copy(&mut self, at: u64, source: u32, offset: u64, len: u64) -> Result<()> {
        if let Some((to, from, first, so_far)) = &mut self.pending
            && (*from, *first + *so_far, *to + *so_far) == (source, offset, at)
        {
            *so_far += len;
            return Ok(());
        }
        self.flush()?;
        self.pending = Some((at, source, offset, len));
        Ok(())
    }

    fn fill(&mut self, at: u64, byte: u8, len: u64) -> Result<()> {
        range(self.out, at, len).fill(byte);
        Ok(())
    }
}

/// Gathers runs from bytes `from..to` of one source, which are in `region`.
struct Band<'a> {
    out: &'a mut [u8],
    region: &'a [u8],
    source: u32,
    from: u64,
    to: u64,
    /// Whether every run of the source is inside.
    whole: bool,
}

impl Visit for Band<'_> {
    type Error = std::convert::Infallible;

    fn copy(&mut self, at: u64, source: u32, offset: u64, len: u64) -> Result<(), Self::Error> {
        let (first, end) = (offset.max(self.from), (offset + len).min(self.to));
        if source == self.source && first < end {
            let piece = &self.region[(first - self.from) as usize..(end - self.from) as usize];
            range(self.out, at + (first - offset), end - first).copy_from_slice(piece);
        }
        Ok(())
    }

    fn fill(&mut self, at: u64, byte: u8, len: u64) -> Result<(), Self::Error> {
        range(self.out, at, len).fill(byte);
        Ok(())
    }

    fn strided(&mut self, at: u64, runs: Strided) -> Result<(), Self::Error> {
        let grid = Grid { row: runs, rows: 1, row_stride: 0 };
        if runs.source == self.source && self.whole {
            self.gather_grid(at, grid);
            return Ok(());
        }
        let (first, last) = self.inside(runs);
        (first..last)
            .try_for_each(|i| self.copy(at + i * runs.len, runs.source, runs.offset + i * runs.stride, runs.len))
    }

    fn grid(&mut self, at: u64, grid: Grid) -> Result<(), Self::Error> {
        if grid.row.source == self.source && self.whole {
            self.gather_grid(at, grid);
            return Ok(());
        }
        let row_len = grid.row.len * grid.row.count;
        (0..grid.rows).try_for_each(|i| {
            self.strided(at + i * row_len, Strided { offset: grid.row.offset + i * grid.row_stride, ..grid.row })
        })
    }
}

impl Band<'_> {
    /// The turns whose runs touch the band.
    fn inside(&self, runs: Strided) -> (u64, u64) {
        if runs.source != self.source {
            return (0, 0);
        }
        if runs.stride == 0 {
            return (0, runs.count);
        }
        let first = (self.from + 1).saturating_sub(runs.offset + runs.len).div_ceil(runs.stride);
        let end = self.to.saturating_sub(runs.offset).div_ceil(runs.stride);
        (first.min(runs.count), end.min(runs.count))
    }

    fn gather_grid(&mut self, at: u64, grid: Grid) {
        let r = grid.row;
        let out = range(self.out, at, grid.rows * r.count * r.len);
        let shape = GridShape {
            base: (r.offset - self.from) as usize,
            rows: grid.rows as usize,
            row_stride: grid.row_stride as usize,
            runs: r.count as usize,
            stride: r.stride as usize,
        };
        match r.len {
            1 => gather_elements::<1>(out, self.region, shape),
            2 => gather_elements::<2>(out, self.region, shape),
            4 => gather_elements::<4>(out, self.region, shape),
            8 => gather_elements::<8>(out, self.region, shape),
            16 => gather_elements::<16>(out, self.region, shape),
            len => gather_runs(out, self.region, shape, len as usize),
        }
    }
}

#[derive(Clone, Copy)]
struct GridShape {
    base: usize,
    rows: usize,
    row_stride: usize,
    runs: usize,
    stride: usize,
}

/// Rows and runs of a block: 64 × 64 elements read from 64 lines or written to
/// 64 lines fit the first-level cache.
const BLOCK: usize = 64;
/// Bytes of a run of the source that a block of a transpose takes: two lines,
/// which the processor fetches as a pair.
const PAIR_BYTES: usize = 128;

/// Gathers runs of `N` bytes, in blocks, so that a cache line of the source is
/// used for as many rows as it serves.
fn gather_elements<const N: usize>(out: &mut [u8], region: &[u8], g: GridShape) {
    if g.row_stride == N && g.rows > 1 {
        transpose::<N>(out, region, g);
        return;
    }
    let row_len = g.runs * N;
    for row_block in (0..g.rows).step_by(BLOCK) {
        let rows = row_block..g.rows.min(row_block + BLOCK);
        for run_block in (0..g.runs).step_by(BLOCK) {
            let runs = run_block..g.runs.min(run_block + BLOCK);
            for row in rows.clone() {
                let to = &mut out[row * row_len + runs.start * N..row * row_len + runs.end * N];
                let mut from = g.base + row * g.row_stride + runs.start * g.stride;
                for element in to.chunks_exact_mut(N) {
                    element.copy_from_slice(&region[from..from + N]);
                    from += g.stride;
                }
            }
        }
    }
}

/// Elements of a row that lie `stride` apart, those of the next row beside
/// them: a matrix transposed.
///
/// The lines of a block often lie a power of two apart, where they push each
/// other out of the first-level cache. So each is copied, whole, to a block of
/// its own before it is taken apart.
fn transpose<const N: usize>(out: &mut [u8], region: &[u8], g: GridShape) {
    let row_len = g.runs * N;
    let wide = PAIR_BYTES / N;
    let mut block = [[0_u8; PAIR_BYTES]; BLOCK];
    for first_run in (0..g.runs).step_by(BLOCK) {
        let runs = BLOCK.min(g.runs - first_run);
        for first_row in (0..g.rows).step_by(wide) {
            let rows = wide.min(g.rows - first_row);
            let base = g.base + first_row * N + first_run * g.stride;
            for (line, run) in block.iter_mut().zip(0..runs) {
                line[..rows * N].copy_from_slice(&region[base + run * g.stride..][..rows * N]);
            }
            let to = &mut out[first_row * row_len + first_run * N..];
            let squares = if N == 2 { take_apart_in_fours(&block[..runs], rows, row_len, to) } else { 0 };
            for row in squares..rows {
                let to = to[row * row_len..][..runs * N].as_chunks_mut::<N>().0;
                for (to, line) in to.iter_mut().zip(&block) {
                    to.copy_from_slice(&line[row * N..][..N]);
                }
            }
        }
    }
}

/// Takes lines of 2-byte elements apart, four by four elements at a time in
/// four words; answers for how many rows. `to` begins with the first.
fn take_apart_in_fours(lines: &[[u8; PAIR_BYTES]], rows: usize, row_len: usize, to: &mut [u8]) -> usize {
    let (fours, last) = lines.as_chunks::<4>();
    if !last.is_empty() {
        return 0;
    }
    for number in 0..rows / 4 {
        let (row0, to) = to[4 * number * row_len..].split_at_mut(row_len);
        let (row1, to) = to.split_at_mut(row_len);
        let (row2, row3) = to.split_at_mut(row_len);
        let (row0, row1) = (row0.as_chunks_mut::<8>().0.iter_mut(), row1.as_chunks_mut::<8>().0.iter_mut());
        let (row2, row3) = (row2.as_chunks_mut::<8>().0.iter_mut(), row3.as_chunks_mut::<8>().0.iter_mut());
        let words = |four: &[[u8; PAIR_BYTES]; 4]| {
            transposed(four.each_ref().map(|line| u64::from_le_bytes(line.as_chunks::<8>().0[number])))
        };
        for ((four, (to0, to1)), (to2, to3)) in fours.iter().zip(row0.zip(row1)).zip(row2.zip(row3)) {
            let [a, b, c, d] = words(four);
            (*to0, *to1, *to2, *to3) = (a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes(), d.to_le_bytes());
        }
    }
    rows / 4 * 4
}

/// Four words of four 16-bit elements, the lowest first, rows for columns.
fn transposed([a, b, c, d]: [u64; 4]) -> [u64; 4] {
    const EVEN: u64 = 0x0000_FFFF_0000_FFFF;
    const LOW: u64 = 0x0000_0000_FFFF_FFFF;
    let pairs = |a: u64, b: u64| ((a & EVEN) | (b & EVEN) << 16, (a >> 16 & EVEN) | (b & !EVEN));
    let ((ab_even, ab_odd), (cd_even, cd_odd)) = (pairs(a, b), pairs(c, d));
    let fours = |ab: u64, cd: u64| ((ab & LOW) | cd << 32, ab >> 32 | (cd & !LOW));
    let ((first, third), (second, fourth)) = (fours(ab_even, cd_even), fours(ab_odd, cd_odd));
    [first, second, third, fourth]
}

fn gather_runs(out: &mut [u8], region: &[u8], g: GridShape, len: usize) {
    for (row, to) in out.chunks_exact_mut(g.runs * len).enumerate() {
        let base = g.base + row * g.row_stride;
        for (run, to) in to.chunks_exact_mut(len).enumerate() {
            let from = base + run * g.stride;
            to.copy_from_slice(&region[from..from + len]);
        }
    }
}

fn range(out: &mut [u8], at: u64, len: u64) -> &mut [u8] {
    &mut out[at as usize..(at + len) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::CheckedPlan;
    use weightmill_guest::abi::{PlanInput, PlanOutput, PlanRequest, Tp};

    fn view(json: &str, out_bytes: u64, source_bytes: u64) -> View {
        let request = PlanRequest {
            abi: 1,
            inputs: vec![PlanInput {
                dtype: "U8".parse().unwrap(),
                index: 0,
                role: "w".into(),
                shape: vec![source_bytes],
            }],
            outputs: vec!["w".into()],
            params: serde_json::json!({}),
            tile_bytes: 1,
            tp: Tp::ONE,
        };
        let parts = serde_json::from_str(json).unwrap();
        let output = PlanOutput {
            role: "w".into(),
            dtype: "U8".parse().unwrap(),
            shape: vec![out_bytes],
            view: Some(parts),
            tiles: None,
        };
        let mut plan = CheckedPlan::check(&request, &[source_bytes], &[output], &[]).unwrap();
        match plan.targets.remove(0).body {
            crate::plan::Body::View(view) => view,
            crate::plan::Body::Tiles(_) => unreachable!("the output is a view"),
        }
    }

    fn run(view: &View, source: &[u8], start: u64, len: u64) -> Vec<u8> {
        let mut out = vec![0xEE; len as usize];
        let read = |s: u32, offset: u64, to: &mut [u8]| {
            assert_eq!(s, 0);
            to.copy_from_slice(&source[offset as usize..offset as usize + to.len()]);
            Ok(())
        };
        gather(view, 0, start, &mut out, &read, &Buffers::default()).unwrap();
        out
    }

    #[test]
    fn transposes_of_every_element_size() {
        for (e, rows) in [1_usize, 2, 3, 4, 8, 16].into_iter().flat_map(|e| [(e, 70), (e, 76)]) {
            let columns = 130;
            let source: Vec<u8> = (0..rows * columns * e).map(|i| (i * 31 % 253) as u8).collect();
            let json = format!(
                r#"[{{"repeat":{columns},"parts":[{{"repeat":{rows},"parts":[{{"copy":0,"len":{e},"strides":[{e},{}]}}]}}]}}]"#,
                columns * e
            );
            let view = view(&json, source.len() as u64, source.len() as u64);
            let mut want = Vec::new();
            for c in 0..columns {
                for r in 0..rows {
                    want.extend_from_slice(&source[(r * columns + c) * e..][..e]);
                }
            }
            assert_eq!(run(&view, &source, 0, view.len()), want);
            assert_eq!(run(&view, &source, 101, 777), want[101..101 + 777]);
        }
    }

    #[test]
    fn long_runs_are_joined_and_fills_are_written() {
        let source: Vec<u8> = (0..16_384).map(|i| (i % 251) as u8).collect();
        let view = view(
            r#"[{"copy":0,"offset":10,"len":5000},{"copy":0,"offset":5010,"len":3000},{"fill":7,"len":9},{"copy":0,"len":4000}]"#,
            12_009,
            16_384,
        );
        let want = [&source[10..8010], &[7; 9], &source[..4000]].concat();
        assert_eq!(run(&view, &source, 0, 12_009), want);
    }

    #[test]
    fn bands_meet_without_a_gap() {
        let source: Vec<u8> = (0..100).collect();
        let runs = Strided { source: 0, offset: 3, len: 5, count: 9, stride: 10 };
        for cut in 3..88 {
            let mut out = vec![0xEE; 45];
            for (from, to) in [(3, cut), (cut, 88)] {
                let region = &source[from as usize..to as usize];
                let mut band = Band { out: &mut out, region, source: 0, from, to, whole: false };
                let Ok(()) = band.strided(0, runs);
            }
            let want: Vec<u8> = (0..9).flat_map(|i| 3 + 10 * i..8 + 10 * i).collect();
            assert_eq!(out, want, "cut at {cut}");
        }
    }

    #[test]
    fn a_survey_counts_what_a_walk_does() {
        let source = 64 * 64;
        let view = view(
            r#"[{"repeat":64,"parts":[{"repeat":64,"parts":[{"copy":0,"len":1,"strides":[1,64]}]}]}]"#,
            source,
            source,
        );
        let survey = Survey::of(&view, 0, 0, 64);
        assert_eq!((survey.copied, survey.covered(), survey.long_runs()), (64, 63 * 64 + 1, false));
    }
}
