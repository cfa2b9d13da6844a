//! Separate query, key and value projections to one `[Q; K; V]`.
//!
//! A tensor parallel rank gets its own queries, keys and values, one after the
//! other: a plain chunk of the whole `[Q; K; V]` would have the right shape and
//! the wrong contents. Where there are fewer key heads than ranks, the ranks
//! that share a key head each get a copy.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use core::ops::Range;

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "qkv-fuse",
    version = "1.0.0",
    summary = "separate Q, K and V to one [Q; K; V]",
    licence = "Apache-2.0",
    uses_tp
)]
pub struct QkvFuse {
    /// Query heads.
    num_heads: NonZeroU64,
    /// Key heads, and as many value heads.
    num_kv_heads: NonZeroU64,
    /// Rows of a head.
    head_dim: NonZeroU64,
}

impl Transform for QkvFuse {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let (heads, kv_heads) = (self.num_heads.get(), self.num_kv_heads.get());
        let q = self.heads(&cx.input("q")?, heads, "num_heads")?;
        let k = self.heads(&cx.input("k")?, kv_heads, "num_kv_heads")?;
        let v = self.heads(&cx.input("v")?, kv_heads, "num_kv_heads")?;
        let mine = cx.tp().range(heads, "query heads")?;
        let kv = kv_range(kv_heads, cx.tp())?;
        let rows = |heads: &Array, range: Range<u64>| heads.slice(0, range)?.merge(0..2);
        let qkv = Array::concat(0, &[rows(&q, mine)?, rows(&k, kv.clone())?, rows(&v, kv)?])?;
        cx.outputs().view("qkv", qkv)
    }
}

impl QkvFuse {
    fn heads(&self, rows: &Array, heads: u64, param: &str) -> Result<Array> {
        rows.split(0, &[heads, self.head_dim.get()]).map_err(|error| {
            error.hint(format!("rows are {param} x head_dim; for a scale with a row a block, head_dim counts blocks"))
        })
    }
}

/// The key heads of this rank: its share, or the one that it shares.
fn kv_range(kv_heads: u64, tp: Tp) -> Result<Range<u64>> {
    if kv_heads.is_multiple_of(tp.size) {
        return tp.range(kv_heads, "key heads");
    }
    if !tp.size.is_multiple_of(kv_heads) {
        return Err(PlanError::tp(format!(
            "{kv_heads} key heads do not divide by the tp size {}, nor it by them",
            tp.size
        ))
        .hint("use a tp size that divides the key heads, or a multiple of them"));
    }
    let head = tp.rank / (tp.size / kv_heads);
    Ok(head..head + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Tensor};

    /// The rows of head `head` of a projection, which hold 1000·projection + head·d + x.
    fn rows(projection: u32, heads: impl IntoIterator<Item = u32>, d: u32) -> Vec<u32> {
        heads.into_iter().flat_map(|head| (0..d).map(move |x| 1000 * projection + head * d + x)).collect()
    }

    fn case(h: u32, hk: u32, d: u32) -> Case {
        let tensor = |projection, heads| Tensor::of(&[u64::from(heads * d), 1], &rows(projection, 0..heads, d));
        Case::new()
            .param("num_heads", h)
            .param("num_kv_heads", hk)
            .param("head_dim", d)
            .input("q", tensor(1, h))
            .input("k", tensor(2, hk))
            .input("v", tensor(3, hk))
    }

    #[test]
    fn every_small_shape_and_rank() {
        for (h, hk, d, size) in quadruples(8, 8, 3, 8) {
            let fits = h % size == 0 && (hk % size == 0 || size % hk == 0);
            for rank in 0..size {
                let got = case(h, hk, d).tp(rank.into(), size.into()).run::<QkvFuse>();
                let Ok(got) = got else {
                    assert!(!fits, "H {h}, Hk {hk}, d {d}, rank {rank} of {size}");
                    continue;
                };
                assert!(fits, "H {h}, Hk {hk}, d {d}, rank {rank} of {size}");
                // Query heads go round by ranks; each takes the key heads that its query heads use
                // when all of them are spread evenly.
                let queries: Vec<u32> = (0..h).filter(|head| head * size / h == rank).collect();
                let keys: Vec<u32> = (0..hk.max(size)).filter(|k| k * size / hk.max(size) == rank).collect();
                let keys: Vec<u32> = keys.iter().map(|k| k * hk / hk.max(size)).collect();
                let want: Vec<u32> = [rows(1, queries, d), rows(2, keys.clone(), d), rows(3, keys, d)].concat();
                assert_eq!(got["qkv"].numbers::<u32>(), want, "H {h}, Hk {hk}, d {d}, rank {rank} of {size}");
                assert_eq!(got["qkv"].shape, [want.len() as u64, 1]);
            }
        }
    }

    fn quadruples(a: u32, b: u32, c: u32, d: u32) -> impl Iterator<Item = (u32, u32, u32, u32)> {
        (1..=a)
            .flat_map(move |a| (1..=b).flat_map(move |b| (1..=c).flat_map(move |c| (1..=d).map(move |d| (a, b, c, d)))))
    }

    #[test]
    fn biases_are_rows_without_columns() {
        let bias = |values: &[f32]| Tensor::of(&[values.len() as u64], values);
        let case = Case::new()
            .param("num_heads", 2)
            .param("num_kv_heads", 1)
            .param("head_dim", 1)
            .input("q", bias(&[1.0, 2.0]))
            .input("k", bias(&[3.0]))
            .input("v", bias(&[4.0]));
        assert_eq!(case.tp(1, 2).run::<QkvFuse>().unwrap()["qkv"].numbers::<f32>(), [2.0, 3.0, 4.0]);
    }

    #[test]
    fn refusals_name_the_tensor_and_the_numbers() {
        let refused = case(4, 2, 2).param("head_dim", 3).run::<QkvFuse>().unwrap_err();
        assert_eq!(refused.message(), "dimension 0 of q has 8 entries, not 4 x 3 = 12");
        let refused = case(4, 3, 2).tp(0, 2).run::<QkvFuse>().unwrap_err();
        assert_eq!(refused.message(), "3 key heads do not divide by the tp size 2, nor it by them");
        let refused = case(3, 1, 2).tp(0, 2).run::<QkvFuse>().unwrap_err();
        assert_eq!(refused.message(), "3 query heads do not divide by the tp size 2");
        let refused = case(4, 2, 2).param("num_heads", 0).run::<QkvFuse>().unwrap_err();
        assert_eq!(refused.message(), "the parameter num_heads must be a whole number of at least 1, found 0");
        let wide = Tensor::of(&[4, 2], &[0_u32; 8]);
        let narrow = Tensor::of(&[2, 1], &[0_u32; 2]);
        let mixed = Case::new().param("num_heads", 2).param("num_kv_heads", 1).param("head_dim", 2);
        let refused = mixed.input("q", wide).input("k", narrow.clone()).input("v", narrow).run::<QkvFuse>();
        assert_eq!(refused.unwrap_err().message(), "k U32 [2, 1] cannot follow q U32 [4, 2] along dimension 0");
    }
}
