//! A tensor parallel rank's equal share of a dimension.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "tp-shard",
    version = "1.0.0",
    summary = "a rank's equal share of a dimension, padded first if asked for",
    licence = "Apache-2.0",
    uses_tp
)]
pub struct TpShard {
    /// The dimension.
    dim: usize,
    /// Zeros are added at the end of the dimension up to a multiple of this,
    /// also without tensor parallelism.
    pad_to: Option<NonZeroU64>,
}

impl Transform for TpShard {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let mut w = cx.input("w")?;
        let mut extent = w.extent(self.dim)?;
        if let Some(multiple) = self.pad_to {
            let over = extent % multiple;
            if over > 0 {
                w = w.pad(self.dim, 0, multiple.get() - over)?;
                extent = w.extent(self.dim)?;
            }
        }
        let mine = cx.tp().range(extent, &format!("entries of dimension {}", self.dim))?;
        cx.outputs().view("w", w.slice(self.dim, mine)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Tensor};

    fn tensor(rows: &[Option<u32>], columns: &[Option<u32>]) -> Tensor {
        let cell = |r: &Option<u32>, c: &Option<u32>| r.zip(*c).map_or(0, |(r, c)| 1 + r * 100 + c);
        let cells: Vec<u32> = rows.iter().flat_map(|r| columns.iter().map(move |c| cell(r, c))).collect();
        Tensor::of(&[rows.len() as u64, columns.len() as u64], &cells)
    }

    #[test]
    fn every_small_share_with_and_without_padding() {
        let some = |n: u32| (0..n).map(Some).collect::<Vec<_>>();
        for extent in 1..=9 {
            for pad_to in 0..=6 {
                let mut all = some(extent);
                while pad_to > 0 && all.len() % pad_to as usize > 0 {
                    all.push(None);
                }
                for size in 1..=6 {
                    for rank in 0..size {
                        for dim in [0, 1] {
                            let why = format!("{extent} padded to {pad_to}, dim {dim}, rank {rank} of {size}");
                            let oriented = |own: &[Option<u32>]| match dim {
                                0 => tensor(own, &some(3)),
                                _ => tensor(&some(3), own),
                            };
                            let mut case =
                                Case::new().param("dim", dim).tp(rank, size).input("w", oriented(&some(extent)));
                            if pad_to > 0 {
                                case = case.param("pad_to", pad_to);
                            }
                            let got = case.run::<TpShard>();
                            if !(all.len() as u64).is_multiple_of(size) {
                                let n = all.len();
                                let want =
                                    format!("{n} entries of dimension {dim} do not divide by the tp size {size}");
                                assert_eq!(got.unwrap_err().message(), want, "{why}");
                                continue;
                            }
                            let share = all.len() / size as usize;
                            let own = &all[rank as usize * share..][..share];
                            assert_eq!(got.unwrap()["w"], oriented(own), "{why}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn refusals_name_the_tensor() {
        let case = Case::new().param("dim", 1).input("w", Tensor::of(&[4], &[0_u8; 4]));
        assert_eq!(case.run::<TpShard>().unwrap_err().message(), "w has no dimension 1: its shape is [4]");
    }
}
