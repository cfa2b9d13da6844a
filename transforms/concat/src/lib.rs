//! Tensors one after the other along a dimension.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "concat",
    version = "1.0.0",
    summary = "tensors one after the other along a dimension",
    licence = "Apache-2.0"
)]
pub struct Concat {
    /// The dimension.
    dim: usize,
}

impl Transform for Concat {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let all = Array::concat(self.dim, &cx.list("w")?)?;
        cx.outputs().view("w", all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Tensor};

    /// A tensor whose cells are `f` of their three indices.
    fn fill(shape: [u64; 3], f: impl Fn([u64; 3]) -> u64) -> Tensor {
        let mut cells = Vec::new();
        for a in 0..shape[0] {
            for b in 0..shape[1] {
                (0..shape[2]).for_each(|c| cells.push(f([a, b, c])));
            }
        }
        Tensor::of(&shape, &cells)
    }

    #[test]
    fn every_small_pair_and_triple_along_every_dimension() {
        for dim in 0..3 {
            for extents in (0..4_u64).flat_map(|a| (0..4).flat_map(move |b| (0..3).map(move |c| [a, b, c]))) {
                let mut case = Case::new().param("dim", dim as u64);
                let mut shape = [2, 3, 2];
                for (k, extent) in extents.into_iter().enumerate() {
                    shape[dim] = extent;
                    case = case.input("w", fill(shape, |i| k as u64 * 1000 + i[0] * 100 + i[1] * 10 + i[2]));
                }
                shape[dim] = extents.iter().sum();
                let want = fill(shape, |mut i| {
                    let mut k = 0;
                    while i[dim] >= extents[k] {
                        i[dim] -= extents[k];
                        k += 1;
                    }
                    k as u64 * 1000 + i[0] * 100 + i[1] * 10 + i[2]
                });
                assert_eq!(case.run::<Concat>().unwrap()["w"], want, "{extents:?} along {dim}");
            }
        }
    }

    #[test]
    fn refusals_name_the_tensor_and_the_numbers() {
        let case = Case::new().input("w", Tensor::of(&[2, 2], &[0_u8; 4])).input("w", Tensor::of(&[2, 1], &[0_u8; 2]));
        let error = case.clone().param("dim", 0).run::<Concat>().unwrap_err();
        assert_eq!(error.message(), "w U8 [2, 1] cannot follow w U8 [2, 2] along dimension 0");
        let error = case.clone().param("dim", 2).run::<Concat>().unwrap_err();
        assert_eq!(error.message(), "w has no dimension 2: its shape is [2, 2]");
        let error = case.run::<Concat>().unwrap_err();
        assert_eq!(error.message(), "the parameter dim is missing: it must be a whole number of at least 0");
    }
}
