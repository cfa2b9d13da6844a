//! One `[Q; K; V]` to separate query, key and value projections.
//!
//! The whole of each is made on every rank; `qkv-fuse` after it shards.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "qkv-split",
    version = "1.0.0",
    summary = "one [Q; K; V] to separate Q, K and V",
    licence = "Apache-2.0"
)]
pub struct QkvSplit {
    /// Query heads.
    num_heads: NonZeroU64,
    /// Key heads, and as many value heads.
    num_kv_heads: NonZeroU64,
    /// Rows of a head.
    head_dim: NonZeroU64,
}

impl Transform for QkvSplit {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let qkv = cx.input("qkv")?;
        let (heads, kv_heads) = (self.num_heads.get(), self.num_kv_heads.get());
        let all = heads.saturating_add(kv_heads).saturating_add(kv_heads);
        let by_head = qkv.split(0, &[all, self.head_dim.get()]).map_err(|error| {
            error.hint("rows are (num_heads + 2 x num_kv_heads) x head_dim; for a scale with a row a block, head_dim counts blocks")
        })?;
        let rows = |start: u64, len: u64| by_head.slice(0, start..start + len)?.merge(0..2);
        cx.outputs()
            .view("q", rows(0, heads)?)?
            .view("k", rows(heads, kv_heads)?)?
            .view("v", rows(heads + kv_heads, kv_heads)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::abi::Dtype;
    use weightmill_guest::native::{Case, Tensor};

    fn case(h: u64, hk: u64, d: u64, trailing: &[u64]) -> Case {
        let shape = [&[(h + 2 * hk) * d], trailing].concat();
        Case::new()
            .param("num_heads", h)
            .param("num_kv_heads", hk)
            .param("head_dim", d)
            .input("qkv", Tensor::counting(Dtype::U16, &shape, 0))
    }

    #[test]
    fn every_small_shape() {
        for h in 1..=6 {
            for hk in 1..=6 {
                for d in 1..=3 {
                    for trailing in [&[][..], &[2], &[2, 1]] {
                        let got = case(h, hk, d, trailing).run::<QkvSplit>().unwrap();
                        let row = trailing.iter().product::<u64>();
                        let mut next = 0;
                        for (role, heads) in [("q", h), ("k", hk), ("v", hk)] {
                            let shape = [&[heads * d], trailing].concat();
                            assert_eq!(got[role], Tensor::counting(Dtype::U16, &shape, next), "{role}");
                            next += heads * d * row;
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn each_output_is_one_copy() {
        let case = case(4, 2, 8, &[16]);
        for role in ["q", "k", "v"] {
            assert_eq!(case.view::<QkvSplit>(role).unwrap().len(), 1);
        }
    }

    #[test]
    fn refusals_name_the_tensor_and_the_numbers() {
        let refused = case(4, 2, 2, &[3]).param("num_heads", 5).run::<QkvSplit>().unwrap_err();
        assert_eq!(refused.message(), "dimension 0 of qkv has 16 entries, not 9 x 2 = 18");
        let scalar = case(1, 1, 1, &[]).input("x", Tensor::of(&[], &[0_u8])).run::<QkvSplit>().unwrap_err();
        assert_eq!(scalar.message(), "this transform takes no input x here");
        let refused = case(1, 1, 1, &[]).output("o").run::<QkvSplit>().unwrap_err();
        assert_eq!((refused.message(), refused.hint()), ("this transform makes no output o here", "it makes q, k, v"));
    }
}
