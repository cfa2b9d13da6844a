//! Folds a weight norm, `w = v · (g / ‖v‖₂)`. See README.md for the operation
//! order.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::{Float, float_input, scaled, weight_norm};
use weightmill_guest::prelude::*;
use weightmill_guest::with_float;

/// The largest row: it and its result have to fit into one tile.
const ROW_BYTES: u64 = 31 << 20;

/// Parameters.
#[transform(
    name = "weight-norm-fold",
    version = "1.0.0",
    summary = "folds a weight norm into its weight",
    licence = "Apache-2.0",
    fuel_per_byte = 256
)]
pub struct WeightNormFold {
    /// The dimension whose entries have a norm each; 0.
    #[param(default = 0)]
    dim: u64,
}

impl Transform for WeightNormFold {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        if self.dim != 0 {
            return Err(PlanError::param("dim", format!("the parameter dim must be 0, found {}", self.dim))
                .hint("use permute to bring the dimension to the front"));
        }
        let (g, v) = (float_input(cx, "g")?, float_input(cx, "v")?);
        let (rows, columns) = scaled::matrix(&v)?;
        if g.shape().first() != Some(&rows) || g.shape()[1..].iter().any(|&extent| extent != 1) {
            return Err(g
                .refuse(format!(
                    "g must be of shape [{rows}] or [{rows}, 1, ...], one for each row of v, found {:?}",
                    g.shape()
                ))
                .hint("check that g and v belong to the same layer"));
        }
        let row_bytes = columns * (v.dtype().bits() / 8);
        if row_bytes > ROW_BYTES {
            return Err(
                v.refuse(format!("a row of v is {row_bytes} bytes, more than {ROW_BYTES}, and its norm is one sum"))
            );
        }
        let tiles = if v.elements() == 0 {
            Vec::new()
        } else {
            let args = [v.dtype() as i64, g.dtype() as i64, columns as i64];
            cx.cut(rows).reads(&v)?.reads(&g)?.writes(row_bytes).args(&args).groups()?
        };
        cx.outputs().tiles("w", v.dtype(), v.shape(), tiles)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        let &[v, g, columns] = tile.args() else { unreachable!("plan gives three arguments") };
        with_float!(Dtype::ALL[v as usize], V => with_float!(Dtype::ALL[g as usize], G => {
            fold::<V, G>(tile, columns as usize)
        }))
    }
}

fn fold<V: Float, G: Float>(tile: &mut Tile, columns: usize) -> Result<(), DataError> {
    let (v, g): (&[V::Element], &[G::Element]) = (tile.input(0), tile.input(1));
    let first = tile.offset() / size_of::<V::Element>() as u64;
    let mut sums = vec![0.0; g.len()];
    weight_norm::sums_of_squares::<V>(v, &mut sums);
    if let Some(row) = sums.iter().position(|&sum| sum == 0.0) {
        let index = first + (row * columns) as u64;
        let row = index / columns as u64;
        let message = format!("the norm of row {row} of v, from flat index {index} on, is 0");
        return Err(DataError::at("v", index, message).hint("a row of zeros has no direction that g could scale"));
    }
    let rows = v.chunks(columns).zip(tile.output::<V::Element>().chunks_mut(columns));
    for (((v, w), &g), &sum) in rows.zip(g).zip(&sums) {
        weight_norm::scale::<V>(v, weight_norm::factor(G::decode(g), sum), w);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::kernels::BF16;
    use weightmill_guest::native::{Case, Refused, Tensor};

    fn v(rows: usize, columns: usize) -> Vec<f32> {
        (0..rows * columns).map(|i| ((i * 31 % 97) as f32 - 48.0) * 0.013).collect()
    }

    fn reference(g: &[f32], v: &[f32], columns: usize) -> Vec<f32> {
        let row = |(v, g): (&[f32], &f32)| {
            let sum = v.iter().fold(0.0_f32, |sum, x| sum + x * x);
            let factor = g / sum.sqrt();
            v.iter().map(|x| x * factor).collect::<Vec<_>>()
        };
        v.chunks(columns).zip(g).flat_map(row).collect()
    }

    #[test]
    fn every_shape_with_every_tile_size() {
        for (rows, shape) in [(1, vec![1]), (9, vec![5, 7]), (40, vec![33]), (3, vec![1000]), (20, vec![2, 2, 2])] {
            let columns = shape.iter().product::<usize>();
            let (g, v) = ((0..rows).map(|i| i as f32 - 2.5).collect::<Vec<_>>(), v(rows, columns));
            let mut v_shape = vec![rows as u64];
            v_shape.extend(shape.iter().map(|&extent| extent as u64));
            for g_shape in [vec![rows as u64], vec![rows as u64, 1], vec![rows as u64, 1, 1]] {
                for tile_bytes in [1, 500, 1 << 20] {
                    let case = Case::new().input("g", Tensor::of(&g_shape, &g)).input("v", Tensor::of(&v_shape, &v));
                    let w = case.tile_bytes(tile_bytes).run::<WeightNormFold>().unwrap()["w"].clone();
                    assert_eq!(w.shape, v_shape);
                    assert!(w.numbers::<f32>() == reference(&g, &v, columns), "{v_shape:?} {tile_bytes}");
                }
            }
        }
    }

    #[test]
    fn the_result_has_the_dtype_of_v() {
        let v: Vec<u16> = v(10, 12).iter().map(|&x| BF16::encode(x)).collect();
        let wide: Vec<f32> = v.iter().map(|&x| BF16::decode(x)).collect();
        let bytes = v.iter().flat_map(|u| u.to_le_bytes()).collect();
        let case = Case::new()
            .param("dim", 0)
            .input("g", Tensor::of(&[10], &[0.7_f32; 10]))
            .input("v", Tensor::new(Dtype::BF16, &[10, 12], bytes));
        let w = case.run::<WeightNormFold>().unwrap()["w"].clone();
        let expected: Vec<u16> = reference(&[0.7; 10], &wide, 12).iter().map(|&x| BF16::encode(x)).collect();
        assert_eq!((w.dtype, w.numbers::<u16>()), (Dtype::BF16, expected));
    }

    #[test]
    fn a_norm_of_zero_is_named() {
        let mut v = v(30, 4);
        v[17 * 4..18 * 4].fill(-0.0);
        v[20 * 4..21 * 4].fill(1e-30);
        let case = Case::new().input("g", Tensor::of(&[30], &[1.0_f32; 30])).input("v", Tensor::of(&[30, 4], &v));
        for tile_bytes in [1, 300, 1 << 20] {
            let refused = case.clone().tile_bytes(tile_bytes).run::<WeightNormFold>().unwrap_err();
            let Refused::Data(error) = refused else { panic!("the plan is fine") };
            assert_eq!(error.index, Some(68));
            assert_eq!(error.message, "the norm of row 17 of v, from flat index 68 on, is 0");
        }
    }

    #[test]
    fn refusals_name_the_numbers() {
        let case = |g: &[u64], v: &[u64]| {
            let zeros = |shape: &[u64]| Tensor::of(shape, &vec![0.0_f32; shape.iter().product::<u64>() as usize]);
            Case::new().input("g", zeros(g)).input("v", zeros(v))
        };
        let message = |case: Case| case.run::<WeightNormFold>().unwrap_err().message().to_string();
        assert_eq!(message(case(&[2], &[2, 3]).param("dim", 1)), "the parameter dim must be 0, found 1");
        assert_eq!(
            message(case(&[3], &[2, 3])),
            "g must be of shape [2] or [2, 1, ...], one for each row of v, found [3]"
        );
        assert_eq!(
            message(case(&[2, 3], &[2, 3])),
            "g must be of shape [2] or [2, 1, ...], one for each row of v, found [2, 3]"
        );
        assert_eq!(case(&[0], &[0, 3]).run::<WeightNormFold>().unwrap()["w"].shape, [0, 3]);
        assert_eq!(case(&[2], &[2, 0]).run::<WeightNormFold>().unwrap()["w"].shape, [2, 0]);
    }
}
