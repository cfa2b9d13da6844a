//! The two input projections of a gated MLP: fused, sharded, swapped, woven.
//!
//! A fused tensor is `[gate; up]` along `dim`. A tensor parallel rank needs its
//! share of *each* half, which is two slices of the fused tensor, not one.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "gate-up",
    version = "1.0.0",
    summary = "fuse, shard, swap or interleave gate and up projections",
    licence = "Apache-2.0",
    uses_tp
)]
pub struct GateUp {
    /// What to do.
    op: Op,
    /// The dimension that holds the two halves: 0, or 1 for stacked experts.
    #[param(default = 0)]
    dim: usize,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
pub enum Op {
    /// gate and up to `[gate; up]`: a rank's share of each.
    Fuse,
    /// `[gate; up]` to a rank's share of each half.
    Shard,
    /// `[gate; up]` to `[up; gate]`.
    Swap,
    /// `[gate; up]` to gate 0, up 0, gate 1, up 1, …
    Interleave,
    /// The inverse of interleave.
    Deinterleave,
}

impl Transform for GateUp {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let out = match self.op {
            Op::Fuse => self.fuse(&cx.input("gate")?, &cx.input("up")?, cx.tp())?,
            Op::Shard => self.shard(&cx.input("gate_up")?, cx.tp())?,
            Op::Swap => self.swap(&cx.input("gate_up")?)?,
            Op::Interleave => self.weave(&cx.input("gate_up")?, |half| [2, half])?,
            Op::Deinterleave => self.weave(&cx.input("gate_up")?, |half| [half, 2])?,
        };
        cx.outputs().view("gate_up", out)
    }
}

impl GateUp {
    fn fuse(&self, gate: &Array, up: &Array, tp: Tp) -> Result<Array> {
        if gate.shape() != up.shape() {
            return Err(up.refuse(format!("gate and up differ in shape: {:?} and {:?}", gate.shape(), up.shape())));
        }
        let mine = tp.range(gate.extent(self.dim)?, "entries of each half")?;
        Array::concat(self.dim, &[gate.slice(self.dim, mine.clone())?, up.slice(self.dim, mine)?])
    }

    fn shard(&self, fused: &Array, tp: Tp) -> Result<Array> {
        let half = self.half(fused)?;
        let mine = tp.range(half, "entries of each half")?;
        fused.split(self.dim, &[2, half])?.slice(self.dim + 1, mine)?.merge(self.dim..self.dim + 2)
    }

    fn swap(&self, fused: &Array) -> Result<Array> {
        let half = self.half(fused)?;
        Array::concat(self.dim, &[fused.slice(self.dim, half..)?, fused.slice(self.dim, ..half)?])
    }

    fn weave(&self, fused: &Array, split: fn(u64) -> [u64; 2]) -> Result<Array> {
        let pairs = fused.split(self.dim, &split(self.half(fused)?))?;
        let mut order: Vec<usize> = (0..pairs.ndim()).collect();
        order.swap(self.dim, self.dim + 1);
        pairs.permute(&order)?.merge(self.dim..self.dim + 2)
    }

    fn half(&self, fused: &Array) -> Result<u64> {
        let (dim, extent) = (self.dim, fused.extent(self.dim)?);
        if extent % 2 != 0 {
            return Err(fused
                .refuse(format!(
                    "dimension {dim} of {} has {extent} entries, which are no two equal halves",
                    fused.role()
                ))
                .hint("is it the dimension that holds gate and up?"));
        }
        Ok(extent / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Refused, Tensor};

    /// `[outer, labels, inner]` or, for dim 0, `[labels, inner]`: each cell says its label and place.
    fn tensor(dim: u64, labels: &[u32]) -> Tensor {
        let (outer, inner) = (if dim == 0 { 1 } else { 3 }, 2);
        let mut cells = Vec::new();
        for o in 0..outer {
            for label in labels {
                cells.extend((0..inner).map(|i| o * 100_000 + label * 10 + i));
            }
        }
        let shape = [u64::from(outer), labels.len() as u64, u64::from(inner)];
        Tensor::of(if dim == 0 { &shape[1..] } else { &shape }, &cells)
    }

    /// Entries of gate are from 0, those of up from 1000.
    fn gate(range: std::ops::Range<u32>) -> Vec<u32> {
        range.collect()
    }

    fn up(range: std::ops::Range<u32>) -> Vec<u32> {
        range.map(|i| 1000 + i).collect()
    }

    fn run(case: Case) -> Result<Tensor, Refused> {
        case.run::<GateUp>().map(|mut outputs| outputs.remove("gate_up").unwrap())
    }

    fn case(op: &str, dim: u64) -> Case {
        Case::new().param("op", op).param("dim", dim)
    }

    #[test]
    fn every_small_share_of_fuse_and_shard() {
        for (dim, half, size) in
            [0, 1].into_iter().flat_map(|dim| (1..=8).flat_map(move |h| (1..=8).map(move |s| (dim, h, s))))
        {
            let both = tensor(dim, &[gate(0..half), up(0..half)].concat());
            for rank in 0..size {
                let fuse =
                    case("fuse", dim).input("gate", tensor(dim, &gate(0..half))).input("up", tensor(dim, &up(0..half)));
                let shard = case("shard", dim).input("gate_up", both.clone());
                for case in [fuse, shard] {
                    let got = run(case.tp(rank.into(), size.into()));
                    if half % size != 0 {
                        let why = format!("{half} entries of each half do not divide by the tp size {size}");
                        assert_eq!(got.unwrap_err().message(), why);
                        continue;
                    }
                    let own = rank * (half / size)..(rank + 1) * (half / size);
                    assert_eq!(
                        got.unwrap(),
                        tensor(dim, &[gate(own.clone()), up(own)].concat()),
                        "{dim} {half} {rank}/{size}"
                    );
                }
            }
        }
    }

    #[test]
    fn swap_and_weave_on_any_rank_are_of_the_whole() {
        for dim in [0, 1] {
            for half in 1..=6 {
                let fused = tensor(dim, &[gate(0..half), up(0..half)].concat());
                let swapped = tensor(dim, &[up(0..half), gate(0..half)].concat());
                let woven: Vec<u32> = (0..half).flat_map(|i| [i, 1000 + i]).collect();
                let woven = tensor(dim, &woven);
                for (op, from, to) in [
                    ("swap", &fused, &swapped),
                    ("swap", &swapped, &fused),
                    ("interleave", &fused, &woven),
                    ("deinterleave", &woven, &fused),
                ] {
                    let got = run(case(op, dim).tp(1, 3).input("gate_up", from.clone()));
                    assert_eq!(&got.unwrap(), to, "{op}, dim {dim}, half {half}");
                }
            }
        }
    }

    #[test]
    fn a_shard_of_the_woven_form_is_one_slice() {
        let woven = case("interleave", 0).input("gate_up", tensor(0, &[gate(0..4), up(0..4)].concat()));
        let woven = run(woven).unwrap();
        let shard =
            run(case("shard", 0).tp(1, 2).input("gate_up", tensor(0, &[gate(0..4), up(0..4)].concat()))).unwrap();
        let again = run(case("interleave", 0).input("gate_up", shard)).unwrap();
        assert_eq!(again.bytes, woven.bytes[woven.bytes.len() / 2..]);
    }

    #[test]
    fn refusals_name_the_tensor_and_the_numbers() {
        let odd = Tensor::of(&[7, 1], &[0_u8; 7]);
        let error = run(case("swap", 0).input("gate_up", odd.clone())).unwrap_err();
        assert_eq!(error.message(), "dimension 0 of gate_up has 7 entries, which are no two equal halves");
        let error = run(case("swap", 2).input("gate_up", odd.clone())).unwrap_err();
        assert_eq!(error.message(), "gate_up has no dimension 2: its shape is [7, 1]");
        let error =
            run(case("fuse", 0).input("gate", odd.clone()).input("up", Tensor::of(&[6, 1], &[0_u8; 6]))).unwrap_err();
        assert_eq!(error.message(), "gate and up differ in shape: [7, 1] and [6, 1]");
        let error = run(case("fuse", 0).input("gate_up", odd.clone())).unwrap_err();
        assert_eq!(error.message(), "there is no input gate");
        let error = run(case("swap", 0).input("gate_up", Tensor::of(&[2], &[0_u8; 2])).input("up", odd)).unwrap_err();
        assert_eq!(error.message(), "this transform takes no input up here");
    }
}
