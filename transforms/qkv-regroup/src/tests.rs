//! Every small tensor, row by row: the reference places labelled rows with
//! plain loops from what the layouts mean.

use super::*;
use weightmill_guest::abi::{Dtype, Part};
use weightmill_guest::native::{Case, Refused, Tensor};

const ORDERS: [&str; 6] = ["qkv", "qvk", "kqv", "kvq", "vqk", "vkq"];

/// A row's label: which part (0 queries, 1 keys, 2 values), group, head, row.
fn label(part: u32, group: u32, head: u32, x: u32) -> u32 {
    ((part * 32 + group) * 32 + head) * 32 + x
}

/// The rows of one group's queries (those heads), keys or values.
fn rows(part: u32, group: u32, heads: core::ops::Range<u32>, d: u32) -> Vec<u32> {
    let heads = if part == 0 { heads } else { 0..1 };
    heads.flat_map(|head| (0..d).map(move |x| label(part, group, head, x))).collect()
}

fn grouped(g: u32, m: u32, d: u32, order: &str) -> Vec<u32> {
    let mut all = Vec::new();
    for group in 0..g {
        for part in order.chars() {
            let part = "qkv".find(part).unwrap() as u32;
            all.extend(rows(part, group, 0..m, d));
        }
    }
    all
}

fn fused(groups: core::ops::Range<u32>, heads: core::ops::Range<u32>, d: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for part in 0..3 {
        for group in groups.clone() {
            all.extend(rows(part, group, heads.clone(), d));
        }
    }
    all
}

/// A tensor whose rows hold their label in each of `columns` columns.
fn tensor(labels: &[u32], columns: u64) -> Tensor {
    let cells: Vec<u32> = labels.iter().flat_map(|&label| (0..columns).map(move |_| label)).collect();
    Tensor::of(&[labels.len() as u64, columns], &cells)
}

fn case(g: u32, m: u32, d: u32, order: &str) -> Case {
    Case::new().param("groups", g).param("q_per_group", m).param("head_dim", d).param("order", order)
}

fn run(case: Case, input: Tensor) -> Result<Tensor, Refused> {
    case.input("qkv", input).run::<QkvRegroup>().map(|mut outputs| outputs.remove("qkv").unwrap())
}

fn each_small_shape(mut f: impl FnMut(u32, u32, u32, &str)) {
    for g in 1..=6 {
        for m in 1..=4 {
            for d in 1..=4 {
                ORDERS.iter().for_each(|order| f(g, m, d, order));
            }
        }
    }
}

#[test]
fn every_small_shape_goes_both_ways() {
    each_small_shape(|g, m, d, order| {
        let (apart, together) = (tensor(&grouped(g, m, d, order), 2), tensor(&fused(0..g, 0..m, d), 2));
        assert_eq!(run(case(g, m, d, order), apart.clone()).unwrap(), together, "G {g}, m {m}, d {d}, {order}");
        let back = case(g, m, d, order).param("direction", "group");
        assert_eq!(run(back, together).unwrap(), apart, "G {g}, m {m}, d {d}, {order}");
    });
}

#[test]
fn every_small_rank_gets_its_share_or_a_refusal() {
    each_small_shape(|g, m, d, order| {
        for size in 1..=8 {
            for (rank, replicate) in (0..size).flat_map(|rank| [(rank, false), (rank, true)]) {
                let why = format!("G {g}, m {m}, d {d}, {order}, rank {rank} of {size}, replication {replicate}");
                let case = case(g, m, d, order).tp(rank.into(), size.into()).param("kv_replication", replicate);
                let got = run(case, tensor(&grouped(g, m, d, order), 1));
                if g % size == 0 {
                    let own = rank * (g / size)..(rank + 1) * (g / size);
                    assert_eq!(got.unwrap(), tensor(&fused(own, 0..m, d), 1), "{why}");
                } else if replicate && g < size && size % g == 0 && m % (size / g) == 0 {
                    // Deal the query heads out in order; a rank's heads are all of one group.
                    let all: Vec<(u32, u32)> = (0..g).flat_map(|group| (0..m).map(move |head| (group, head))).collect();
                    let own = &all[(rank * g * m / size) as usize..((rank + 1) * g * m / size) as usize];
                    let (group, first, last) = (own[0].0, own[0].1, own[own.len() - 1].1);
                    assert!(own.iter().all(|(other, _)| *other == group));
                    assert_eq!(got.unwrap(), tensor(&fused(group..group + 1, first..last + 1, d), 1), "{why}");
                } else {
                    let Err(Refused::Plan(error)) = got else { panic!("{why}: {got:?}") };
                    assert_eq!(error.kind, weightmill_guest::abi::PlanErrorKind::Tp, "{why}");
                    assert!(error.hint.is_some(), "{why}");
                }
            }
        }
    });
}

#[test]
fn any_trailing_shape_and_dtype_will_do() {
    for trailing in [&[][..], &[3], &[2, 2]] {
        let shape = [&[4 * 3 * 2], trailing].concat();
        for dtype in [Dtype::U8, Dtype::BF16, Dtype::F64] {
            let wide = run(case(4, 1, 2, "qkv"), Tensor::counting(dtype, &shape, 0)).unwrap();
            assert_eq!(wide.shape, shape);
            let row = (trailing.iter().product::<u64>() * dtype.bytes().unwrap()) as usize;
            // The second row of the first key head was row 3.
            assert_eq!(wide.bytes[9 * row..10 * row], Tensor::counting(dtype, &shape, 0).bytes[3 * row..4 * row]);
        }
    }
}

#[test]
fn plans_are_a_repeat_a_part() {
    let case = case(4, 1, 8, "qkv").input("qkv", Tensor::counting(Dtype::BF16, &[96, 24], 0));
    let repeat =
        |offset| Part::Repeat { repeat: 2, parts: vec![Part::Copy { copy: 0, offset, len: 384, strides: vec![1152] }] };
    assert_eq!(case.tp(1, 2).view::<QkvRegroup>("qkv").unwrap(), [repeat(2304), repeat(2688), repeat(3072)]);
}

#[test]
fn one_group_is_the_identity() {
    for direction in ["degroup", "group"] {
        let case = case(1, 5, 4, "qkv").param("direction", direction);
        let view = case.input("qkv", Tensor::counting(Dtype::U16, &[28, 3], 0)).view::<QkvRegroup>("qkv").unwrap();
        assert_eq!(view, [Part::Copy { copy: 0, offset: 0, len: 168, strides: vec![] }]);
    }
}

#[test]
fn refusals_say_what_to_do() {
    let refusal = |case: Case, rows: u64| run(case, Tensor::counting(Dtype::U8, &[rows, 1], 0)).unwrap_err();
    let error = refusal(case(4, 1, 8, "qkv"), 90);
    assert_eq!(error.message(), "dimension 0 of qkv has 90 entries, not 4 x 3 x 8 = 96");
    let error = refusal(case(1, 2, 2, "qkv").tp(1, 2), 8);
    assert_eq!(error.message(), "1 groups do not divide by the tp size 2");
    assert!(error.hint().contains("use qkv-split, then qkv-fuse"), "{}", error.hint());
    let error = refusal(case(2, 3, 1, "qkv").tp(0, 4).param("kv_replication", true), 10);
    assert!(error.message().ends_with("and 3 query heads of a group do not divide by its 2 ranks"), "{error:?}");
    let error = refusal(case(2, 1, 1, "qkv").tp(0, 2).param("direction", "group"), 6);
    assert!(error.message().starts_with("direction \"group\" makes the whole tensor"), "{error:?}");
    let error = refusal(case(2, 1, 1, "kvv"), 6);
    assert_eq!(
        error.message(),
        "the parameter order must be \"qkv\", \"qvk\", \"kqv\", \"kvq\", \"vqk\" or \"vkq\", found \"kvv\""
    );
    let error = refusal(case(2, 1, 1, "qkv").param("group", 2), 6);
    assert_eq!(
        (error.message(), error.hint().starts_with("did you mean groups?")),
        ("there is no parameter group", true)
    );
    let error = refusal(case(u32::MAX, u32::MAX, u32::MAX, "qkv").param("direction", "group"), 6);
    assert!(error.message().ends_with("= more than 2^53"), "{error:?}");
}
