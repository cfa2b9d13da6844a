//! To FP8 E4M3 with scales a tensor, a row or a block. See README.md for the
//! operation order.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::fp8::{self, Quantizer};
use weightmill_guest::kernels::scaled::{self, BLOCK, runs};
use weightmill_guest::kernels::{Float, check_ndim, float_input};
use weightmill_guest::prelude::*;
use weightmill_guest::with_float;

/// What a tile is for: the second of its arguments, after the source dtype.
mod job {
    /// The largest magnitude of some elements: `first`, `step`.
    pub(super) const AMAX: i64 = 0;
    /// Scales of rows: `columns` (-1: all there are), `first`, `step`.
    pub(super) const ROW_SCALES: i64 = 1;
    /// For rows, the largest magnitude of each block: `columns`, `first`, `step`.
    pub(super) const BLOCK_AMAX: i64 = 2;
    /// Scales of blocks from the largest magnitudes of their rows: `blocks`.
    pub(super) const BLOCK_SCALES: i64 = 3;
    /// Both at once: as `BLOCK_AMAX`.
    pub(super) const BANDS: i64 = 4;
    /// Codes: `columns`.
    pub(super) const CODES: i64 = 5;
}

/// In the scheme `block`, magnitudes below this do not make a scale smaller.
const BLOCK_FLOOR: f32 = 1e-4;
/// A row up to this size is searched for its maximum in one tile.
const ROW_BYTES: u64 = 16 << 20;
/// A band of 128 rows up to this size is.
const BAND_BYTES: u64 = 4 << 20;
/// Elements of the smallest piece of a larger row.
const MIN_PIECE: u64 = 1 << 16;

/// Parameters.
#[transform(
    name = "fp8-quantize",
    version = "1.0.0",
    summary = "scales and rounds to FP8 E4M3",
    licence = "Apache-2.0",
    fuel_per_byte = 128
)]
pub struct Fp8Quantize {
    /// What shares a scale.
    scheme: Scheme,
    /// Whether block scales are rounded up to powers of two.
    ue8m0: bool,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
pub enum Scheme {
    /// The tensor.
    Tensor,
    /// Each entry of the first dimension.
    Channel,
    /// Each block of 128 x 128.
    Block,
}

impl Transform for Fp8Quantize {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let w = float_input(cx, "w")?;
        if self.ue8m0 && self.scheme != Scheme::Block {
            return Err(PlanError::param(
                "ue8m0",
                format!("ue8m0 goes with scheme \"block\" only, not with \"{}\"", self.scheme.name()),
            )
            .hint("leave ue8m0 out"));
        }
        match self.scheme {
            Scheme::Tensor => tensor(cx, &w),
            Scheme::Channel => channel(cx, &w),
            Scheme::Block => block(cx, &w),
        }
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        with_float!(Dtype::ALL[tile.args()[0] as usize], F => match tile.args()[1] {
            job::AMAX => amax::<F>(tile),
            job::ROW_SCALES => row_scales::<F>(tile),
            job::BLOCK_AMAX => block_amax::<F>(tile),
            job::BLOCK_SCALES => self.block_scales(tile),
            job::BANDS => self.bands::<F>(tile),
            _ => self.codes::<F>(tile),
        })
    }
}

fn tensor(cx: &Plan, w: &Array) -> Result<Outputs> {
    check_ndim(w, 2, "for scheme \"tensor\"")?;
    let elements = w.elements();
    let mut outputs = cx.outputs();
    let mut scale = TileGroup::new(1, 4).args(&[Dtype::F32 as i64, job::ROW_SCALES, -1, 0, 0]);
    if elements > 0 {
        let pass = cx.cut(elements).reads(w)?.writes_per_tile(4);
        let groups = numbered(pass.groups()?, &[w.dtype() as i64, job::AMAX], 0, pass.units_per_tile());
        scale = scale.shared(&outputs.scratch(Dtype::F32, &[pass.tiles()], groups)?)?;
    }
    let outputs = outputs.tiles("scale", Dtype::F32, &[1], scale)?;
    let codes = cx.cut(elements).reads(w)?.shared(&outputs.array("scale")?).writes(1);
    outputs.tiles("w", Dtype::F8_E4M3, w.shape(), codes.args(&[w.dtype() as i64, job::CODES, -1]).groups()?)
}

fn channel(cx: &Plan, w: &Array) -> Result<Outputs> {
    let (rows, columns) = scaled::matrix(w)?;
    let element = w.dtype().bits() / 8;
    let mut outputs = cx.outputs();
    let args = |dtype: Dtype, columns: u64| [dtype as i64, job::ROW_SCALES, columns as i64];
    let scale = if rows == 0 || columns == 0 {
        numbered(cx.cut(rows).writes(4).groups()?, &args(w.dtype(), 0), 0, 0)
    } else if columns * element <= ROW_BYTES {
        let pass = cx.cut(rows).reads(w)?.writes(4);
        numbered(pass.groups()?, &args(w.dtype(), columns), 0, pass.units_per_tile() * columns)
    } else {
        // The maxima of pieces of a row, and then of those.
        let piece = (cx.tile_bytes() / element).max(MIN_PIECE);
        let flat = w.reshape(&[rows, columns])?;
        let mut groups = Vec::new();
        for row in 0..rows {
            for run in runs(columns, piece) {
                let pieces = TileGroup::new(run.count, 4).window(&scaled::piece_of_row(&flat, row, run)?)?;
                let first = row * columns + run.start;
                groups.extend(numbered(vec![pieces], &[w.dtype() as i64, job::AMAX], first, run.len));
            }
        }
        let pieces = columns.div_ceil(piece);
        let amax = outputs.scratch(Dtype::F32, &[rows, pieces], groups)?;
        numbered(cx.cut(rows).reads(&amax)?.writes(4).groups()?, &args(Dtype::F32, pieces), 0, 0)
    };
    let outputs = outputs.tiles("scale", Dtype::F32, &[rows, 1], scale)?;
    let codes = scaled::channel_tiles(cx, w, &outputs.array("scale")?, 1, &[w.dtype() as i64, job::CODES])?;
    outputs.tiles("w", Dtype::F8_E4M3, w.shape(), codes)
}

fn block(cx: &Plan, w: &Array) -> Result<Outputs> {
    check_ndim(w, 2, "for scheme \"block\"")?;
    let (rows, columns) = (w.extent(0)?, w.extent(1)?);
    let band_bytes = columns * BLOCK * (w.dtype().bits() / 8);
    let mut outputs = cx.outputs();
    let scale = if rows == 0 || columns == 0 {
        Vec::new()
    } else if band_bytes <= BAND_BYTES.max(cx.tile_bytes()) {
        bands(cx, w, band_bytes)?
    } else {
        let amax = block_amax_of_rows(cx, w)?;
        let amax = outputs.scratch(Dtype::F32, &[rows, columns.div_ceil(BLOCK)], amax)?;
        bands_of_amax(cx, &amax)?
    };
    let shape = [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)];
    let outputs = outputs.tiles("scale", Dtype::F32, &shape, scale)?;
    let codes = scaled::block_tiles(cx, w, &outputs.array("scale")?, 1, &[w.dtype() as i64, job::CODES])?;
    outputs.tiles("w", Dtype::F8_E4M3, w.shape(), codes)
}

/// Scales of whole bands of 128 rows.
fn bands(cx: &Plan, w: &Array, band_bytes: u64) -> Result<Vec<TileGroup>> {
    let (rows, columns) = (w.extent(0)?, w.extent(1)?);
    let args = [w.dtype() as i64, job::BANDS, columns as i64];
    let mut groups = Vec::new();
    for run in runs(rows, (cx.tile_bytes() / band_bytes).max(1) * BLOCK) {
        let bands = w.slice(0, run.range())?.split(0, &[run.count, run.len])?;
        let scales = run.len.div_ceil(BLOCK) * columns.div_ceil(BLOCK);
        let group = TileGroup::new(run.count, scales * 4).window(&bands)?;
        groups.extend(numbered(vec![group], &args, run.start * columns, run.len * columns));
    }
    Ok(groups)
}

/// Where a band is too large for a tile: for every row, the largest magnitude
/// of each of its blocks. Tiles are runs of `w`, so that the first tile with a
/// value that is not finite has the one of the lowest flat index.
fn block_amax_of_rows(cx: &Plan, w: &Array) -> Result<Vec<TileGroup>> {
    let (rows, columns) = (w.extent(0)?, w.extent(1)?);
    let element = w.dtype().bits() / 8;
    let args = |columns: u64| [w.dtype() as i64, job::BLOCK_AMAX, columns as i64];
    if columns * element <= ROW_BYTES {
        let pass = cx.cut(rows).reads(w)?.writes(columns.div_ceil(BLOCK) * 4);
        return Ok(numbered(pass.groups()?, &args(columns), 0, pass.units_per_tile() * columns));
    }
    let piece = (cx.tile_bytes() / element).max(MIN_PIECE).next_multiple_of(BLOCK);
    let mut groups = Vec::new();
    for row in 0..rows {
        for run in runs(columns, piece) {
            let pieces = TileGroup::new(run.count, run.len.div_ceil(BLOCK) * 4);
            let pieces = pieces.window(&scaled::piece_of_row(w, row, run)?)?;
            groups.extend(numbered(vec![pieces], &args(run.len), row * columns + run.start, run.len));
        }
    }
    Ok(groups)
}

/// Scales from the largest magnitudes of the rows of blocks.
fn bands_of_amax(cx: &Plan, amax: &Array) -> Result<Vec<TileGroup>> {
    let (rows, blocks) = (amax.extent(0)?, amax.extent(1)?);
    let piece = (cx.tile_bytes() / (BLOCK * 4)).max(1);
    let mut groups = Vec::new();
    for first in (0..rows).step_by(BLOCK as usize) {
        let band = amax.slice(0, first..rows.min(first + BLOCK))?;
        for run in runs(blocks, piece) {
            let pieces = band.slice(1, run.range())?.split(1, &[run.count, run.len])?.permute(&[1, 0, 2])?;
            let group = TileGroup::new(run.count, run.len * 4).window(&pieces)?;
            groups.push(group.args(&[Dtype::F32 as i64, job::BLOCK_SCALES, run.len as i64]));
        }
    }
    Ok(groups)
}

/// Appends to the groups' arguments the flat index of the group's first
/// element and how many elements further each of its tiles begins.
fn numbered(groups: Vec<TileGroup>, args: &[i64], mut first: u64, step: u64) -> Vec<TileGroup> {
    let number = |group: TileGroup| {
        let args: Vec<i64> = args.iter().copied().chain([first as i64, step as i64]).collect();
        first += group.count * step;
        group.args(&args)
    };
    groups.into_iter().map(number).collect()
}

/// The flat index in `w` of a tile's first element, if its last two arguments
/// are those of `numbered`.
fn first_index(tile: &Tile) -> u64 {
    let [.., first, step] = tile.args() else { return 0 };
    *first as u64 + tile.turn() * *step as u64
}

fn not_finite(index: u64) -> DataError {
    DataError::at("w", index, format!("NaN or infinity at flat index {index} of w cannot be quantised"))
        .hint("leave the tensor out of the step, or repair the checkpoint")
}

fn amax<F: Float>(tile: &mut Tile) -> Result<(), DataError> {
    let first = first_index(tile);
    tile.output::<f32>()[0] = fp8::amax::<F>(tile.input(0)).map_err(|at| not_finite(first + at as u64))?;
    Ok(())
}

fn row_scales<F: Float>(tile: &mut Tile) -> Result<(), DataError> {
    let (first, columns) = (first_index(tile), tile.args()[2]);
    let x: &[F::Element] = if tile.inputs() > 0 { tile.input(0) } else { &[] };
    let columns = if columns < 0 { x.len() } else { columns as usize };
    for (row, scale) in tile.output::<f32>().iter_mut().enumerate() {
        let at = row * columns;
        let amax = fp8::amax::<F>(&x[at..at + columns]).map_err(|column| not_finite(first + (at + column) as u64))?;
        *scale = if amax == 0.0 { 1.0 } else { fp8::scale_for(amax) };
    }
    Ok(())
}

/// Makes every entry of `to` at least the largest magnitude of its block of
/// the row `x`; answers the index of a value that is not finite.
fn raise<F: Float>(x: &[F::Element], to: &mut [f32]) -> Result<(), usize> {
    for ((block, x), to) in x.chunks(BLOCK as usize).enumerate().zip(to) {
        let amax = fp8::amax::<F>(x).map_err(|at| block * BLOCK as usize + at)?;
        *to = to.max(amax);
    }
    Ok(())
}

fn block_amax<F: Float>(tile: &mut Tile) -> Result<(), DataError> {
    let (first, columns) = (first_index(tile), tile.args()[2] as usize);
    let x: &[F::Element] = tile.input(0);
    let rows = tile.output::<f32>().chunks_mut(columns.div_ceil(BLOCK as usize));
    for ((row, x), to) in x.chunks(columns).enumerate().zip(rows) {
        raise::<F>(x, to).map_err(|at| not_finite(first + (row * columns + at) as u64))?;
    }
    Ok(())
}

impl Fp8Quantize {
    /// A block's scale.
    fn scale(&self, amax: f32) -> f32 {
        let scale = fp8::scale_for(amax.max(BLOCK_FLOOR));
        if self.ue8m0 { fp8::power_of_two_at_least(scale) } else { scale }
    }

    fn bands<F: Float>(&self, tile: &mut Tile) -> Result<(), DataError> {
        let (first, columns) = (first_index(tile), tile.args()[2] as usize);
        let x: &[F::Element] = tile.input(0);
        let scales = tile.output::<f32>();
        for (row, x) in x.chunks(columns).enumerate() {
            let across = columns.div_ceil(BLOCK as usize);
            let scales = &mut scales[row / BLOCK as usize * across..][..across];
            raise::<F>(x, scales).map_err(|at| not_finite(first + (row * columns + at) as u64))?;
        }
        scales.iter_mut().for_each(|scale| *scale = self.scale(*scale));
        Ok(())
    }

    fn block_scales(&self, tile: &mut Tile) -> Result<(), DataError> {
        let blocks = tile.args()[2] as usize;
        let amax: &[f32] = tile.input(0);
        let scales = tile.output::<f32>();
        for row in amax.chunks(blocks) {
            scales.iter_mut().zip(row).for_each(|(scale, amax)| *scale = scale.max(*amax));
        }
        scales.iter_mut().for_each(|scale| *scale = self.scale(*scale));
        Ok(())
    }

    fn codes<F: Float>(&self, tile: &mut Tile) -> Result<(), DataError> {
        let columns = tile.args()[2] as usize;
        let (x, scales): (&[F::Element], &[f32]) = (tile.input(0), tile.input(1));
        let q = tile.output_bytes();
        match self.scheme {
            Scheme::Tensor => Quantizer::new(scales[0]).run::<F>(x, q),
            Scheme::Channel => {
                for ((x, q), &scale) in x.chunks(columns).zip(q.chunks_mut(columns)).zip(scales) {
                    Quantizer::new(scale).run::<F>(x, q);
                }
            }
            Scheme::Block => block_codes::<F>(x, scales, columns, q),
        }
        Ok(())
    }
}

fn block_codes<F: Float>(x: &[F::Element], scales: &[f32], columns: usize, q: &mut [u8]) {
    let block = BLOCK as usize;
    let bands = x.chunks(block * columns).zip(q.chunks_mut(block * columns));
    for ((x, q), scales) in bands.zip(scales.chunks(columns.div_ceil(block))) {
        let quantizers: Vec<Quantizer> = scales.iter().map(|&scale| Quantizer::new(scale)).collect();
        for (x, q) in x.chunks(columns).zip(q.chunks_mut(columns)) {
            for ((x, q), quantizer) in x.chunks(block).zip(q.chunks_mut(block)).zip(&quantizers) {
                quantizer.run::<F>(x, q);
            }
        }
    }
}

#[cfg(test)]
mod tests;
