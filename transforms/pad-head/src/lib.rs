//! Zeros at the end of every head, so that heads have a size that a kernel
//! takes.
//!
//! With rotary embeddings in the half layout the two halves of a head are
//! padded each on its own, so that row x still pairs with row x + d'/2.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(name = "pad-head", version = "1.0.0", summary = "zeros at the end of every head", licence = "Apache-2.0")]
pub struct PadHead {
    /// Heads.
    num_heads: NonZeroU64,
    /// The size of a head.
    from: NonZeroU64,
    /// The size that it gets.
    to: NonZeroU64,
    /// Whether each half of a head is padded on its own.
    rope: bool,
    /// 0 for rows, 1 for the columns of an output projection.
    #[param(default = 0)]
    dim: usize,
}

impl Transform for PadHead {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let w = cx.input("w")?;
        let (heads, from, to, dim) = (self.num_heads.get(), self.from.get(), self.to.get(), self.dim);
        if to < from {
            return Err(PlanError::param("to", format!("a head of {from} cannot be padded to {to}")));
        }
        if dim > 1 {
            return Err(PlanError::param("dim", format!("dim must be 0 or 1, found {dim}")));
        }
        if self.rope && (from % 2 != 0 || to % 2 != 0) {
            return Err(PlanError::param("rope", format!("heads of {from} and {to} must both be even to have halves")));
        }
        let pieces = if self.rope { 2 } else { 1 };
        let padded = w
            .split(dim, &[heads, from])
            .map_err(|error| error.hint("the dimension has num_heads x from entries"))?
            .split(dim + 1, &[pieces, from / pieces])?
            .pad(dim + 2, 0, (to - from) / pieces)?;
        cx.outputs().view("w", padded.merge(dim..dim + 3)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::abi::Part;
    use weightmill_guest::native::{Case, Tensor};

    fn oriented(dim: u64, entries: &[u32]) -> Tensor {
        let n = entries.len() as u64;
        if dim == 0 {
            return Tensor::of(&[n, 2], &entries.iter().flat_map(|&x| [x, x]).collect::<Vec<_>>());
        }
        Tensor::of(&[2, n, 1], &[entries, entries].concat())
    }

    fn case(h: u64, from: u64, to: u64, rope: bool, dim: u64) -> Case {
        let case = Case::new().param("num_heads", h).param("from", from).param("to", to);
        case.param("rope", rope).param("dim", dim)
    }

    #[test]
    fn every_small_head() {
        for (h, from) in (1..=3).flat_map(|h| (1..=6).map(move |from| (h, from))) {
            for to in 1..=9 {
                for (rope, dim) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
                    let why = format!("H {h}, {from} to {to}, rope {rope}, dim {dim}");
                    let entries: Vec<u32> = (1..=(h * from) as u32).collect();
                    let got = case(h, from, to, rope, dim).input("w", oriented(dim, &entries)).run::<PadHead>();
                    if to < from || rope && (from % 2 == 1 || to % 2 == 1) {
                        assert!(got.is_err(), "{why}");
                        continue;
                    }
                    let mut want = vec![0; (h * to) as usize];
                    for head in 0..h {
                        for x in 0..from {
                            let place = if rope && x >= from / 2 { to / 2 + (x - from / 2) } else { x };
                            want[(head * to + place) as usize] = entries[(head * from + x) as usize];
                        }
                    }
                    assert_eq!(got.unwrap()["w"], oriented(dim, &want), "{why}");
                }
            }
        }
    }

    #[test]
    fn columns_are_a_copy_and_a_fill() {
        let view = case(2, 3, 4, false, 1).input("w", Tensor::of(&[5, 6], &[0_u8; 30])).view::<PadHead>("w").unwrap();
        let copy = Part::Copy { copy: 0, offset: 0, len: 3, strides: vec![3] };
        assert_eq!(view, [Part::Repeat { repeat: 10, parts: vec![copy, Part::Fill { fill: 0, len: 1 }] }]);
    }

    #[test]
    fn refusals_name_the_numbers() {
        let refusal = |case: Case| {
            case.input("w", Tensor::of(&[6], &[0_u8; 6])).run::<PadHead>().unwrap_err().message().to_string()
        };
        assert_eq!(refusal(case(2, 3, 2, false, 0)), "a head of 3 cannot be padded to 2");
        assert_eq!(refusal(case(2, 3, 4, true, 0)), "heads of 3 and 4 must both be even to have halves");
        assert_eq!(refusal(case(2, 3, 4, false, 2)), "dim must be 0 or 1, found 2");
        assert_eq!(refusal(case(2, 3, 4, false, 1)), "w has no dimension 1: its shape is [6]");
        assert_eq!(refusal(case(2, 4, 4, false, 0)), "dimension 0 of w has 6 entries, not 2 x 4 = 8");
    }
}
