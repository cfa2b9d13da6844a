//! Merges a low-rank update, `W + scale · (B · A)`. See README.md for the
//! operation order.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::lora::Merge;
use weightmill_guest::kernels::scaled::{self, runs};
use weightmill_guest::kernels::{Float, check_ndim, check_shape, float_input};
use weightmill_guest::prelude::*;
use weightmill_guest::with_float;

/// All of `a` goes with every tile up to this size; beyond, tiles are pieces
/// of rows and get their columns of it.
const A_BYTES: u64 = 40 << 20;
/// Columns of `a` that go with a piece of a row.
const A_PIECE_BYTES: u64 = 8 << 20;
/// Rows that are cut into pieces: each is a tile group or two of the plan.
const CUT_ROWS: u64 = 16_384;

/// Parameters.
#[transform(
    name = "lora-merge",
    version = "1.0.0",
    summary = "merges a low-rank update into its weight",
    licence = "Apache-2.0",
    fuel_per_byte = 16384
)]
pub struct LoraMerge {
    /// Factor of the update, usually alpha / rank.
    scale: f32,
}

impl Transform for LoraMerge {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        if !self.scale.is_finite() {
            return Err(PlanError::param("scale", "the parameter scale is too large for an f32"));
        }
        let (w, a, b) = (float_input(cx, "w")?, float_input(cx, "a")?, float_input(cx, "b")?);
        check_ndim(&w, 2, "[O, I]")?;
        check_ndim(&a, 2, "[rank, I]")?;
        let (rows, columns, rank) = (w.extent(0)?, w.extent(1)?, a.extent(0)?);
        check_shape(&a, &[rank, columns], "[rank, I], with w of [O, I]")?;
        check_shape(&b, &[rows, rank], "[O, rank], with w of [O, I] and a of [rank, I]")?;
        let element = w.dtype().bits() / 8;
        let tiles = if rows * columns == 0 {
            Vec::new()
        } else if rank == 0 {
            cx.cut(rows).reads(&w)?.writes(columns * element).groups()?
        } else if a.len_bytes() <= A_BYTES {
            cx.cut(rows).reads(&w)?.reads(&b)?.shared(&a).writes(columns * element).groups()?
        } else {
            pieces_of_rows(&w, &a, &b)?
        };
        let args = [w.dtype() as i64, a.dtype() as i64, b.dtype() as i64, rank as i64];
        let tiles: Vec<TileGroup> = tiles.into_iter().map(|tile| tile.args(&args)).collect();
        cx.outputs().tiles("w", w.dtype(), w.shape(), tiles)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        let &[w, a, b, rank] = tile.args() else { unreachable!("plan gives four arguments") };
        let [w, a, b] = [w, a, b].map(|dtype| Dtype::ALL[dtype as usize]);
        with_float!(a, A => with_float!(b, B => with_float!(w, W => self.merge::<W, A, B>(tile, rank as usize))));
        Ok(())
    }
}

fn pieces_of_rows(w: &Array, a: &Array, b: &Array) -> Result<Vec<TileGroup>> {
    let (rows, columns, rank) = (w.extent(0)?, w.extent(1)?, a.extent(0)?);
    let element = w.dtype().bits() / 8;
    let piece = A_PIECE_BYTES / (rank * (a.dtype().bits() / 8));
    if piece == 0 || rows > CUT_ROWS {
        return Err(a
            .refuse(format!("a of {} bytes is too large for {rows} rows of w", a.len_bytes()))
            .hint("cast a to BF16 first, or merge the update before it is converted"));
    }
    let mut tiles = Vec::new();
    for row in 0..rows {
        let b = b.slice(0, row..row + 1)?;
        for run in runs(columns, piece) {
            let a = a.slice(1, run.range())?.split(1, &[run.count, run.len])?.permute(&[1, 0, 2])?;
            let tile = TileGroup::new(run.count, run.len * element).window(&scaled::piece_of_row(w, row, run)?)?;
            tiles.push(tile.shared(&b)?.window(&a)?);
        }
    }
    Ok(tiles)
}

impl LoraMerge {
    fn merge<W: Float, A: Float, B: Float>(&self, tile: &mut Tile, rank: usize) {
        let w = tile.input::<W::Element>(0);
        // Without a rank there are no windows of `a` and `b`.
        let (a, b): (&[A::Element], &[B::Element]) =
            if tile.inputs() > 1 { (tile.input(2), tile.input(1)) } else { (&[], &[]) };
        let columns = a.len().checked_div(rank).unwrap_or(w.len());
        Merge::<A, B> { a, b, rank, columns, scale: self.scale }.run::<W>(w, tile.output());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::abi::{PlanAnswer, PlanInput, PlanRequest};
    use weightmill_guest::kernels::{BF16, F16};
    use weightmill_guest::native::{self, Case, Tensor};

    fn some(shape: &[u64], seed: u64) -> Vec<f32> {
        let value = |i: u64| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed) >> 40) as f32 / 8_388_608.0 - 1.0;
        (0..shape.iter().product()).map(value).collect()
    }

    fn reference(w: &[f32], a: &[f32], b: &[f32], columns: usize, rank: usize, scale: f32) -> Vec<f32> {
        let value = |(i, w): (usize, &f32)| {
            let sum = (0..rank).fold(0.0, |sum, k| sum + b[i / columns * rank + k] * a[k * columns + i % columns]);
            w + scale * sum
        };
        w.iter().enumerate().map(value).collect()
    }

    #[test]
    fn every_shape_with_every_tile_size() {
        for (rows, columns, rank) in [(1, 1, 1), (24, 16, 5), (20, 30, 64), (7, 129, 3), (4, 64, 0), (130, 8, 2)] {
            let (w, a, b) = (some(&[rows, columns], 1), some(&[rank, columns], 1 << 41), some(&[rows, rank], 1 << 42));
            let expected = reference(&w, &a, &b, columns as usize, rank as usize, 0.3);
            let case = Case::new()
                .param("scale", 0.3)
                .input("w", Tensor::of(&[rows, columns], &w))
                .input("a", Tensor::of(&[rank, columns], &a))
                .input("b", Tensor::of(&[rows, rank], &b));
            for tile_bytes in [1, 3000, 1 << 20] {
                let out = case.clone().tile_bytes(tile_bytes).run::<LoraMerge>().unwrap()["w"].clone();
                assert!(out.numbers::<f32>() == expected, "{rows} {columns} {rank} {tile_bytes}");
            }
        }
    }

    #[test]
    fn dtypes_mix_and_the_result_has_that_of_w() {
        let (w, a, b) = (some(&[6, 20], 1), some(&[4, 20], 2), some(&[6, 4], 3));
        let bytes = |u: &[u16]| u.iter().flat_map(|u| u.to_le_bytes()).collect::<Vec<u8>>();
        let w16: Vec<u16> = w.iter().map(|&x| BF16::encode(x)).collect();
        let a16: Vec<u16> = a.iter().map(|&x| F16::encode(x)).collect();
        let wide: Vec<f32> = w16.iter().map(|&x| BF16::decode(x)).collect();
        let a: Vec<f32> = a16.iter().map(|&x| F16::decode(x)).collect();
        let out = Case::new()
            .param("scale", 2)
            .input("w", Tensor::new(Dtype::BF16, &[6, 20], bytes(&w16)))
            .input("a", Tensor::new(Dtype::F16, &[4, 20], bytes(&a16)))
            .input("b", Tensor::of(&[6, 4], &b))
            .run::<LoraMerge>()
            .unwrap()["w"]
            .clone();
        let expected: Vec<u16> = reference(&wide, &a, &b, 20, 4, 2.0).iter().map(|&x| BF16::encode(x)).collect();
        assert_eq!((out.dtype, out.numbers::<u16>()), (Dtype::BF16, expected));
    }

    #[test]
    fn a_huge_a_is_cut_by_columns() {
        let (rows, columns, rank) = (3_u64, 5_500_000_u64, 2_u64);
        let (w, a, b) = (some(&[rows, columns], 1), some(&[rank, columns], 2), some(&[rows, rank], 3));
        let expected = reference(&w, &a, &b, columns as usize, rank as usize, -1.5);
        let case = Case::new()
            .param("scale", -1.5)
            .input("w", Tensor::of(&[rows, columns], &w))
            .input("a", Tensor::of(&[rank, columns], &a))
            .input("b", Tensor::of(&[rows, rank], &b));
        assert!(case.run::<LoraMerge>().unwrap()["w"].numbers::<f32>() == expected);
    }

    fn plan(w: [u64; 2], a: [u64; 2], b: [u64; 2]) -> PlanAnswer {
        let input = |role: &str, shape: [u64; 2]| PlanInput {
            dtype: Dtype::F32,
            index: 0,
            role: role.into(),
            shape: shape.to_vec(),
        };
        native::plan::<LoraMerge>(&PlanRequest {
            abi: 1,
            inputs: vec![input("a", a), input("b", b), input("w", w)],
            outputs: vec!["w".into()],
            params: Case::new().param("scale", 1).request().params,
            tile_bytes: 1 << 20,
            tp: Tp::ONE,
        })
    }

    #[test]
    fn what_is_too_large_is_refused_with_numbers() {
        let PlanAnswer::Error { error } = plan([100_000, 1 << 20], [64, 1 << 20], [100_000, 64]) else {
            panic!("it is too large")
        };
        assert_eq!(error.message, "a of 268435456 bytes is too large for 100000 rows of w");
        let PlanAnswer::Plan { outputs, .. } = plan([1 << 18, 1 << 14], [64, 1 << 14], [1 << 18, 64]) else {
            panic!("it fits")
        };
        assert!(outputs[0].tiles.as_ref().unwrap().len() <= 2);
    }

    #[test]
    fn refusals_name_the_numbers() {
        let message = |w, a, b| match plan(w, a, b) {
            PlanAnswer::Error { error } => error.message,
            PlanAnswer::Plan { .. } => panic!("it should not fit"),
        };
        assert_eq!(
            message([4, 6], [2, 5], [4, 2]),
            "a must be of shape [2, 6] ([rank, I], with w of [O, I]), found [2, 5]"
        );
        assert_eq!(
            message([4, 6], [2, 6], [4, 3]),
            "b must be of shape [4, 2] ([O, rank], with w of [O, I] and a of [rank, I]), found [4, 3]"
        );
    }
}
