//! The rows of each head, from the layout of one rotary embedding to that of
//! the other.
//!
//! Rotary embeddings turn pairs of rows. In the *half* layout row x and row
//! x + e/2 are a pair, in the *interleaved* one rows 2x and 2x + 1, where e is
//! how many rows of a head are turned at all; the others stay.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "rope-permute",
    version = "1.0.0",
    summary = "rotary rows of each head from halves to interleaved pairs, or back",
    licence = "Apache-2.0",
    uses_tp
)]
pub struct RopePermute {
    /// Heads; for keys, the key heads.
    num_heads: NonZeroU64,
    /// Rows of a head.
    head_dim: NonZeroU64,
    /// Rows of a head that are turned; all if left out.
    rotary_dim: Option<NonZeroU64>,
    /// The layout to make.
    to: Layout,
}

/// Which rows are a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
pub enum Layout {
    /// Rows 2x and 2x + 1.
    Interleaved,
    /// Rows x and x + e/2.
    Half,
}

impl Transform for RopePermute {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let w = cx.input("w")?;
        let (heads, dim) = (self.num_heads.get(), self.head_dim.get());
        let turned = self.rotary_dim.map_or(dim, NonZeroU64::get);
        if turned > dim || !turned.is_multiple_of(2) {
            return Err(PlanError::param(
                "rotary_dim",
                format!("rotary_dim must be even and at most the head_dim of {dim}, found {turned}"),
            ));
        }
        let by_head = w.split(0, &[heads, dim]).map_err(|error| error.hint("rows are num_heads x head_dim"))?;
        let mine = by_head.slice(0, cx.tp().range(heads, "heads")?)?;
        let pairs = match self.to {
            Layout::Interleaved => [2, turned / 2],
            Layout::Half => [turned / 2, 2],
        };
        let split = mine.slice(1, ..turned)?.split(1, &pairs)?;
        let mut order: Vec<usize> = (0..split.ndim()).collect();
        order.swap(1, 2);
        let moved = split.permute(&order)?.merge(1..3)?;
        let whole = Array::concat(1, &[moved, mine.slice(1, turned..)?])?;
        cx.outputs().view("w", whole.merge(0..2)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::abi::Part;
    use weightmill_guest::native::{Case, Refused, Tensor};

    fn case(h: u64, d: u64, e: u64, to: &str) -> Case {
        Case::new().param("num_heads", h).param("head_dim", d).param("rotary_dim", e).param("to", to)
    }

    fn run(case: Case, w: Tensor) -> Result<Tensor, Refused> {
        case.input("w", w).run::<RopePermute>().map(|mut outputs| outputs.remove("w").unwrap())
    }

    /// Row `2000·head + 2·pair + first or second` of each head, laid out; rows that stay are from 1000 on.
    fn heads(h: std::ops::Range<u64>, d: u64, e: u64, interleaved: bool) -> Tensor {
        let mut rows = Vec::new();
        for head in h {
            let mut own = vec![0; d as usize];
            for pair in 0..e / 2 {
                let (first, second) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + e / 2) };
                own[first as usize] = 2000 * head + 2 * pair;
                own[second as usize] = 2000 * head + 2 * pair + 1;
            }
            (e..d).for_each(|x| own[x as usize] = 2000 * head + 1000 + x);
            rows.extend(own);
        }
        Tensor::of(&[rows.len() as u64, 1], &rows)
    }

    #[test]
    fn every_small_shape_goes_both_ways() {
        for h in 1..=4 {
            for d in 2..=10 {
                for e in (2..=d).step_by(2) {
                    let (halves, woven) = (heads(0..h, d, e, false), heads(0..h, d, e, true));
                    assert_eq!(run(case(h, d, e, "interleaved"), halves.clone()).unwrap(), woven, "{h} {d} {e}");
                    assert_eq!(run(case(h, d, e, "half"), woven).unwrap(), halves, "{h} {d} {e}");
                }
            }
        }
    }

    #[test]
    fn rotary_dim_is_the_whole_head_if_left_out() {
        let case = Case::new().param("num_heads", 1).param("head_dim", 4).param("to", "interleaved");
        assert_eq!(run(case, Tensor::of(&[4], &[0_u8, 1, 2, 3])).unwrap().bytes, [0, 2, 1, 3]);
    }

    #[test]
    fn ranks_take_whole_heads() {
        for h in 1..=6 {
            for size in 1..=6 {
                for rank in 0..size {
                    let got = run(case(h, 6, 4, "interleaved").tp(rank, size), heads(0..h, 6, 4, false));
                    if h % size != 0 {
                        assert_eq!(
                            got.unwrap_err().message(),
                            format!("{h} heads do not divide by the tp size {size}")
                        );
                        continue;
                    }
                    let own = rank * (h / size)..(rank + 1) * (h / size);
                    assert_eq!(got.unwrap(), heads(own, 6, 4, true));
                }
            }
        }
    }

    #[test]
    fn a_plan_is_two_copies_in_two_repeats() {
        let copy = |offset| Part::Copy { copy: 0, offset, len: 5, strides: vec![40, 5] };
        let inner = Part::Repeat { repeat: 4, parts: vec![copy(0), copy(20)] };
        let view = case(3, 8, 8, "interleaved").input("w", Tensor::of(&[24, 5], &[0_u8; 120])).view::<RopePermute>("w");
        assert_eq!(view.unwrap(), [Part::Repeat { repeat: 3, parts: vec![inner] }]);
    }

    #[test]
    fn refusals_name_the_numbers() {
        let refusal = |case: Case| run(case, Tensor::of(&[12], &[0_u8; 12])).unwrap_err().message().to_string();
        let why = "rotary_dim must be even and at most the head_dim of 6, found";
        assert_eq!(refusal(case(2, 6, 8, "half")), format!("{why} 8"));
        assert_eq!(refusal(case(2, 6, 3, "half")), format!("{why} 3"));
        assert_eq!(refusal(case(3, 6, 6, "half")), "dimension 0 of w has 12 entries, not 3 x 6 = 18");
        let odd = Case::new().param("num_heads", 4).param("head_dim", 3).param("to", "half");
        assert_eq!(refusal(odd), "rotary_dim must be even and at most the head_dim of 3, found 3");
        let why = "the parameter to must be \"interleaved\" or \"half\", found \"halves\"";
        assert_eq!(refusal(case(2, 6, 6, "halves")), why);
    }
}
