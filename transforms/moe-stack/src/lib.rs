//! One set of tensors an expert to one tensor for all experts.
//!
//! w13 is `[E, 2I, D]`, the rows of w1 before those of w3 (or the other way
//! round); w2 is `[E, D, I]`. A tensor parallel rank gets its share of I: rows
//! of both halves of w13, columns of w2.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "moe-stack",
    version = "1.0.0",
    summary = "the experts' w1, w3 and w2 to stacked w13 and w2",
    licence = "Apache-2.0",
    uses_tp
)]
pub struct MoeStack {
    /// Which half of w13 comes first.
    #[param(default = Order::W1w3)]
    order: Order,
    /// For each place of the result, the expert that it holds; all in order if left out.
    experts: Option<Vec<u64>>,
}

/// Which half of w13 comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
#[allow(missing_docs)]
pub enum Order {
    W1w3,
    W3w1,
}

impl Transform for MoeStack {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let (w1, w3, w2) = (uniform(cx.list("w1")?)?, uniform(cx.list("w3")?)?, uniform(cx.list("w2")?)?);
        for other in [&w3, &w2] {
            if other.len() != w1.len() {
                let (role, found) = (other[0].role(), other.len());
                return Err(other[0].refuse(format!("there are {} experts in w1, but {found} in {role}", w1.len())));
            }
        }
        check_shapes(&w1[0], &w3[0], &w2[0])?;
        let experts = self.experts(w1.len())?;
        let rows = cx.tp().range(w1[0].extent(0)?, "intermediate rows of an expert")?;
        let (first, second) = match self.order {
            Order::W1w3 => (&w1, &w3),
            Order::W3w1 => (&w3, &w1),
        };
        let w13 = |&e: &usize| Array::concat(0, &[first[e].slice(0, rows.clone())?, second[e].slice(0, rows.clone())?]);
        let down = |&e: &usize| if cx.tp().size == 1 { Ok(w2[e].clone()) } else { w2[e].slice(1, rows.clone()) };
        if cx.tp().size > 1 && w2[0].shape().get(1) != w1[0].shape().first() {
            return Err(w2[0]
                .refuse(format!("w2 of shape {:?} has no intermediate columns to share between ranks", w2[0].shape()))
                .hint("set tp = false on the step that stacks biases or scales a row"));
        }
        let w13: Vec<Array> = experts.iter().map(w13).collect::<Result<_>>()?;
        let down: Vec<Array> = experts.iter().map(down).collect::<Result<_>>()?;
        cx.outputs().view("w13", Array::stack(0, &w13)?)?.view("w2", Array::stack(0, &down)?)
    }
}

impl MoeStack {
    /// The expert of each place.
    fn experts(&self, count: usize) -> Result<Vec<usize>> {
        let Some(experts) = &self.experts else { return Ok((0..count).collect()) };
        if experts.is_empty() {
            return Err(
                PlanError::param("experts", "the list experts is empty").hint("leave it out to keep all experts")
            );
        }
        let place = |&e: &u64| match usize::try_from(e) {
            Ok(e) if e < count => Ok(e),
            _ => Err(PlanError::param(
                "experts",
                format!("there is no expert {e}: the last of {count} is {}", count - 1),
            )),
        };
        experts.iter().map(place).collect()
    }
}

/// All experts' tensors of a role are alike.
fn uniform(all: Vec<Array>) -> Result<Vec<Array>> {
    let first = &all[0];
    match all.iter().position(|w| w.shape() != first.shape() || w.dtype() != first.dtype()) {
        Some(e) => Err(all[e].refuse(format!(
            "{} of expert {e} is {} {:?}, but that of expert 0 is {} {:?}",
            first.role(),
            all[e].dtype(),
            all[e].shape(),
            first.dtype(),
            first.shape()
        ))),
        None => Ok(all),
    }
}

/// w1 and w3 are `[I, D]`, w2 is `[D, I]`; a bias has no second dimension, and
/// a scale a row has 1 there.
fn check_shapes(w1: &Array, w3: &Array, w2: &Array) -> Result<()> {
    if w1.shape() != w3.shape() {
        return Err(w3.refuse(format!("w1 and w3 differ in shape: {:?} and {:?}", w1.shape(), w3.shape())));
    }
    let agree = |a: &Array, b: &Array| a.shape().get(1).is_none_or(|&n| n == 1 || b.shape().first() == Some(&n));
    if !agree(w1, w2) || !agree(w2, w1) {
        return Err(w2
            .refuse(format!("w2 of shape {:?} does not fit w1 of shape {:?}", w2.shape(), w1.shape()))
            .hint("expected [D, I] for w2 where w1 is [I, D]"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Refused, Tensor};

    /// The cell of a matrix of an expert: which 1, 2 or 3, expert, index along I, along D.
    fn cell(matrix: u64, e: u64, i: u64, d: u64) -> u64 {
        ((matrix * 100 + e) * 100 + i) * 100 + d
    }

    fn case(experts: u64, i: u64, d: u64) -> Case {
        let mut case = Case::new();
        for e in 0..experts {
            let up = |matrix| (0..i).flat_map(|i| (0..d).map(move |d| cell(matrix, e, i, d))).collect::<Vec<_>>();
            let down: Vec<u64> = (0..d).flat_map(|d| (0..i).map(move |i| cell(2, e, i, d))).collect();
            case = case
                .input("w1", Tensor::of(&[i, d], &up(1)))
                .input("w3", Tensor::of(&[i, d], &up(3)))
                .input("w2", Tensor::of(&[d, i], &down));
        }
        case
    }

    /// The two results, cell by cell.
    fn want(places: &[u64], rows: std::ops::Range<u64>, d: u64, first: u64, second: u64) -> (Tensor, Tensor) {
        let (mut w13, mut w2) = (Vec::new(), Vec::new());
        for &e in places {
            for matrix in [first, second] {
                rows.clone().for_each(|i| w13.extend((0..d).map(|d| cell(matrix, e, i, d))));
            }
            (0..d).for_each(|d| w2.extend(rows.clone().map(|i| cell(2, e, i, d))));
        }
        let (n, own) = (places.len() as u64, rows.end - rows.start);
        (Tensor::of(&[n, 2 * own, d], &w13), Tensor::of(&[n, d, own], &w2))
    }

    fn check(case: Case, want: (Tensor, Tensor), why: &str) {
        let mut got = case.run::<MoeStack>().unwrap();
        assert_eq!((got.remove("w13").unwrap(), got.remove("w2").unwrap()), want, "{why}");
    }

    #[test]
    fn every_small_stack_and_rank() {
        for e in 1..=4 {
            for i in 1..=6 {
                for d in 1..=3 {
                    for size in 1..=6 {
                        for rank in 0..size {
                            let why = format!("E {e}, I {i}, D {d}, rank {rank} of {size}");
                            let all: Vec<u64> = (0..e).collect();
                            for (order, first, second) in [("w1w3", 1, 3), ("w3w1", 3, 1)] {
                                let case = case(e, i, d).param("order", order).tp(rank, size);
                                if i % size != 0 {
                                    let Err(Refused::Plan(error)) = case.run::<MoeStack>() else { panic!("{why}") };
                                    assert_eq!(error.kind, weightmill_guest::abi::PlanErrorKind::Tp, "{why}");
                                    continue;
                                }
                                let own = rank * (i / size)..(rank + 1) * (i / size);
                                check(case, want(&all, own, d, first, second), &why);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn experts_may_be_placed_anywhere_and_twice() {
        for a in 0..3_u64 {
            for b in 0..3_u64 {
                for c in 0..3_u64 {
                    let case = case(3, 2, 2).param("experts", vec![a, b, c, a]).tp(1, 2);
                    check(case, want(&[a, b, c, a], 1..2, 2, 1, 3), &format!("{a} {b} {c}"));
                }
            }
        }
    }

    #[test]
    fn biases_and_scales_a_row_are_stacked_too() {
        let column = |n: u64, first: u8| Tensor::of(&[n, 1], &(first..first + n as u8).collect::<Vec<_>>());
        let bias = |n: u64, first: u8| Tensor::of(&[n], &(first..first + n as u8).collect::<Vec<_>>());
        let scales = Case::new().input("w1", column(2, 0)).input("w3", column(2, 10)).input("w2", column(3, 20));
        assert_eq!(scales.run::<MoeStack>().unwrap()["w13"].bytes, [0, 1, 10, 11]);
        let biases = Case::new().input("w1", bias(2, 0)).input("w3", bias(2, 10)).input("w2", bias(3, 20));
        assert_eq!(biases.run::<MoeStack>().unwrap()["w2"].shape, [1, 3]);
        for case in [scales, biases] {
            let error = case.tp(0, 2).run::<MoeStack>().unwrap_err();
            assert!(error.message().ends_with("has no intermediate columns to share between ranks"), "{error:?}");
        }
    }

    #[test]
    fn each_expert_is_read_in_whole_runs() {
        let view = case(3, 4, 2).tp(1, 2).view::<MoeStack>("w13").unwrap();
        assert_eq!(view.len(), 6);
        assert_eq!(case(3, 4, 2).view::<MoeStack>("w2").unwrap().len(), 3);
    }

    #[test]
    fn refusals_name_the_tensor_and_the_numbers() {
        let refusal = |case: Case| case.run::<MoeStack>().unwrap_err().message().to_string();
        let small = |shape: &[u64]| Tensor::of(shape, &vec![0_u8; shape.iter().product::<u64>() as usize]);
        let of = |w1: &[u64], w3: &[u64], w2: &[u64]| {
            Case::new().input("w1", small(w1)).input("w3", small(w3)).input("w2", small(w2))
        };
        assert_eq!(refusal(of(&[4, 2], &[4, 3], &[2, 4])), "w1 and w3 differ in shape: [4, 2] and [4, 3]");
        assert_eq!(refusal(of(&[4, 2], &[4, 2], &[2, 5])), "w2 of shape [2, 5] does not fit w1 of shape [4, 2]");
        assert_eq!(refusal(of(&[4, 2], &[4, 2], &[3, 4])), "w2 of shape [3, 4] does not fit w1 of shape [4, 2]");
        let uneven = case(2, 2, 2).input("w3", small(&[2, 2]));
        assert!(refusal(uneven).starts_with("w3 of expert 2 is U8 [2, 2], but that of expert 0 is U64 [2, 2]"));
        let fewer = of(&[2, 2], &[2, 2], &[2, 2]).input("w1", small(&[2, 2]));
        assert_eq!(refusal(fewer), "there are 2 experts in w1, but 1 in w3");
        assert_eq!(refusal(case(2, 2, 2).param("experts", vec![0, 2])), "there is no expert 2: the last of 2 is 1");
        assert_eq!(refusal(case(2, 2, 2).param("experts", Vec::<u64>::new())), "the list experts is empty");
        assert_eq!(refusal(case(1, 3, 1).tp(0, 2)), "3 intermediate rows of an expert do not divide by the tp size 2");
    }
}
