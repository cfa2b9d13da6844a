//! Cutting matrices with scales into tiles: shared by the transforms that
//! quantise and those that undo it.
//!
//! A tile's output is a run of the tensor, so a tile is some whole rows or,
//! where a single row is too large, a piece of one. With it goes a window of
//! the scales that it needs. Group counts stay small however large a tensor
//! is: equal tiles are one group, and a tensor has more groups than a few only
//! where its rows or bands are larger than a tile.

use alloc::vec::Vec;
use core::ops::Range;

use crate::abi::TileGroup;
use crate::error::{PlanError, Result};
use crate::plan::Plan;
use crate::view::Array;

/// Rows and columns that share a scale in the scheme `block`.
pub const BLOCK: u64 = 128;
/// A row, or a band of blocks, up to this size is not cut even where the host
/// would like smaller tiles.
const WHOLE_BYTES: u64 = 4 << 20;
/// What pieces of rows are multiples of, in elements.
const PIECE: u64 = 16_384;

/// A run of `count` equal pieces of `len` entries from entry `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First entry.
    pub start: u64,
    /// Pieces.
    pub count: u64,
    /// Entries of a piece.
    pub len: u64,
}

impl Run {
    /// All entries of the run.
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + self.count * self.len
    }
}

/// `extent` entries in pieces of `len`, and a shorter last one.
///
/// ```
/// use weightmill_guest::kernels::scaled::{Run, runs};
///
/// let runs: Vec<Run> = runs(10, 4).collect();
/// assert_eq!(runs, [Run { start: 0, count: 2, len: 4 }, Run { start: 8, count: 1, len: 2 }]);
/// ```
pub fn runs(extent: u64, len: u64) -> impl Iterator<Item = Run> {
    let whole = extent / len;
    let full = Run { start: 0, count: whole, len };
    let rest = Run { start: whole * len, count: 1, len: extent % len };
    [full, rest].into_iter().filter(|run| run.count > 0 && run.len > 0)
}

/// The first extent of an array and the product of the others.
///
/// # Errors
/// If it has no dimension.
pub fn matrix(array: &Array) -> Result<(u64, u64)> {
    if array.ndim() == 0 {
        let role = array.role();
        return Err(array.refuse(alloc::format!("{role} must have rows, but is a scalar")));
    }
    let rows = array.extent(0)?;
    Ok((rows, array.shape()[1..].iter().product()))
}

/// Tiles of `w`, whose first dimension has a scale an entry. Window 0 is of
/// `w`, window 1 of `scale`; `args` get the columns of a row (or piece of one)
/// appended.
///
/// # Errors
/// If `w` or `scale` cannot be cut so.
pub fn channel_tiles(cx: &Plan<'_>, w: &Array, scale: &Array, out_bytes: u64, args: &[i64]) -> Result<Vec<TileGroup>> {
    let (rows, columns) = matrix(w)?;
    if rows == 0 || columns == 0 {
        return Ok(Vec::new());
    }
    let per_element = w.dtype().bits() / 8 + out_bytes;
    if columns * per_element <= WHOLE_BYTES.max(cx.tile_bytes()) {
        let cut = cx.cut(rows).reads(w)?.reads(scale)?.writes(columns * out_bytes);
        return cut.args(&with(args, columns)).groups();
    }
    let (w, scale) = (w.reshape(&[rows, columns])?, scale.reshape(&[rows, 1])?);
    let piece = (cx.tile_bytes() / per_element).next_multiple_of(PIECE).max(PIECE);
    let mut groups = Vec::new();
    for row in 0..rows {
        let scale = scale.slice(0, row..row + 1)?;
        for run in runs(columns, piece) {
            let group = TileGroup::new(run.count, run.len * out_bytes).args(&with(args, run.len));
            groups.push(group.window(&piece_of_row(&w, row, run)?)?.shared(&scale)?);
        }
    }
    Ok(groups)
}

/// Tiles of the matrix `w` with a scale a block. Window 0 is of `w`, some rows
/// or a piece of one, window 1 the rows of `scale` that they need, from the
/// first block of the tile on; `args` get the tile's columns appended.
///
/// # Errors
/// If `w` or `scale` cannot be cut so.
pub fn block_tiles(cx: &Plan<'_>, w: &Array, scale: &Array, out_bytes: u64, args: &[i64]) -> Result<Vec<TileGroup>> {
    let (rows, columns) = matrix(w)?;
    if rows == 0 || columns == 0 {
        return Ok(Vec::new());
    }
    let row_bytes = columns * (w.dtype().bits() / 8 + out_bytes);
    let bands = cx.tile_bytes() / (row_bytes * BLOCK);
    if bands > 0 || row_bytes * BLOCK <= WHOLE_BYTES {
        whole_bands(w, scale, bands.max(1), out_bytes, &with(args, columns))
    } else {
        parts_of_bands(cx, w, scale, out_bytes, args)
    }
}

fn whole_bands(w: &Array, scale: &Array, bands: u64, out_bytes: u64, args: &[i64]) -> Result<Vec<TileGroup>> {
    let (rows, columns) = matrix(w)?;
    let mut groups = Vec::new();
    for run in runs(rows, bands * BLOCK) {
        let scale_rows = run.len.div_ceil(BLOCK);
        let first = run.start / BLOCK;
        let scale = scale.slice(0, first..first + run.count * scale_rows)?.split(0, &[run.count, scale_rows])?;
        let w = w.slice(0, run.range())?.split(0, &[run.count, run.len])?;
        let group = TileGroup::new(run.count, run.len * columns * out_bytes).args(args);
        groups.push(group.window(&w)?.window(&scale)?);
    }
    Ok(groups)
}

fn parts_of_bands(cx: &Plan<'_>, w: &Array, scale: &Array, out_bytes: u64, args: &[i64]) -> Result<Vec<TileGroup>> {
    let (rows, columns) = matrix(w)?;
    let per_element = w.dtype().bits() / 8 + out_bytes;
    let rows_a_tile = WHOLE_BYTES.max(cx.tile_bytes()) / (columns * per_element);
    let mut groups = Vec::new();
    for band in 0..rows.div_ceil(BLOCK) {
        let in_band = band * BLOCK..rows.min((band + 1) * BLOCK);
        let scale = scale.slice(0, band..band + 1)?;
        if rows_a_tile == 0 {
            for row in in_band {
                groups.extend(row_pieces(cx, w, &scale, row, out_bytes, args)?);
            }
            continue;
        }
        let band = w.slice(0, in_band.clone())?;
        for run in runs(in_band.end - in_band.start, rows_a_tile) {
            let rows = band.slice(0, run.range())?.split(0, &[run.count, run.len])?;
            let group = TileGroup::new(run.count, run.len * columns * out_bytes).args(&with(args, columns));
            groups.push(group.window(&rows)?.shared(&scale)?);
        }
    }
    Ok(groups)
}

fn row_pieces(
    cx: &Plan<'_>,
    w: &Array,
    scale: &Array,
    row: u64,
    out_bytes: u64,
    args: &[i64],
) -> Result<Vec<TileGroup>> {
    let columns = w.extent(1)?;
    let piece = (cx.tile_bytes() / (w.dtype().bits() / 8 + out_bytes)).next_multiple_of(PIECE).max(PIECE);
    let mut groups = Vec::new();
    for run in runs(columns, piece) {
        let (first, blocks) = (run.start / BLOCK, run.len.div_ceil(BLOCK));
        let scale = scale.slice(1, first..first + run.count * blocks)?.reshape(&[run.count, blocks])?;
        let group = TileGroup::new(run.count, run.len * out_bytes).args(&with(args, run.len));
        groups.push(group.window(&piece_of_row(w, row, run)?)?.window(&scale)?);
    }
    Ok(groups)
}

/// Entry `i` is piece `i` of the run of row `row`.
pub fn piece_of_row(w: &Array, row: u64, run: Run) -> Result<Array, PlanError> {
    w.slice(0, row..row + 1)?.slice(1, run.range())?.reshape(&[run.count, run.len])
}

fn with(args: &[i64], last: u64) -> Vec<i64> {
    args.iter().copied().chain([last as i64]).collect()
}
