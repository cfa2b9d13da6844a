//! A range of a dimension.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(name = "slice", version = "1.0.0", summary = "a range of a dimension", licence = "Apache-2.0")]
pub struct Slice {
    /// The dimension.
    dim: usize,
    /// The first entry.
    start: u64,
    /// The entry after the last.
    stop: u64,
}

impl Transform for Slice {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let w = cx.input("w")?.slice(self.dim, self.start..self.stop)?;
        cx.outputs().view("w", w)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Tensor};

    fn tensor(rows: std::ops::Range<u32>, columns: std::ops::Range<u32>) -> Tensor {
        let shape = [u64::from(rows.end - rows.start), u64::from(columns.end - columns.start)];
        let cells: Vec<u32> = rows.flat_map(|r| columns.clone().map(move |c| r * 10 + c)).collect();
        Tensor::of(&shape, &cells)
    }

    #[test]
    fn every_range_of_both_dimensions() {
        for start in 0..=5_u32 {
            for stop in 0..=6_u32 {
                for (dim, want) in [(0, tensor(start.min(stop)..stop, 0..5)), (1, tensor(0..5, start.min(stop)..stop))]
                {
                    let case = Case::new().param("dim", dim).param("start", start).param("stop", stop);
                    let got = case.input("w", tensor(0..5, 0..5)).run::<Slice>();
                    if start <= stop && stop <= 5 {
                        assert_eq!(got.unwrap()["w"], want, "{start}..{stop} of {dim}");
                    } else {
                        let why =
                            format!("{start}..{stop} is not a range of dimension {dim} of w, which has 5 entries");
                        assert_eq!(got.unwrap_err().message(), why);
                    }
                }
            }
        }
    }
}
