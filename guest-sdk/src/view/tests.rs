//! The algebra against an evaluator that moves one element at a time.

use super::*;
use crate::native::gather;

/// Elements by value: `None` is a zero.
#[derive(Clone, Debug, PartialEq)]
struct Naive {
    shape: Vec<u64>,
    elements: Vec<u16>,
}

fn unravel(mut flat: u64, shape: &[u64]) -> Vec<u64> {
    let mut index = vec![0; shape.len()];
    for (slot, &extent) in index.iter_mut().zip(shape).rev() {
        *slot = flat % extent;
        flat /= extent;
    }
    index
}

fn ravel(index: &[u64], shape: &[u64]) -> usize {
    index.iter().zip(shape).fold(0, |flat, (&i, &extent)| flat * extent + i) as usize
}

impl Naive {
    /// Element `i` of the result is what `from` says of its index.
    fn build(shape: Vec<u64>, from: impl Fn(&[u64]) -> u16) -> Naive {
        let elements = (0..shape.iter().product()).map(|flat| from(&unravel(flat, &shape))).collect();
        Naive { shape, elements }
    }

    fn at(&self, index: &[u64]) -> u16 {
        self.elements[ravel(index, &self.shape)]
    }

    fn reshape(&self, shape: &[u64]) -> Naive {
        Naive { shape: shape.to_vec(), elements: self.elements.clone() }
    }

    fn permute(&self, order: &[usize]) -> Naive {
        Naive::build(order.iter().map(|&k| self.shape[k]).collect(), |index| {
            let mut old = vec![0; order.len()];
            order.iter().zip(index).for_each(|(&k, &i)| old[k] = i);
            self.at(&old)
        })
    }

    fn slice(&self, axis: usize, range: Range<u64>) -> Naive {
        let mut shape = self.shape.clone();
        shape[axis] = range.end - range.start;
        Naive::build(shape, |index| {
            let mut old = index.to_vec();
            old[axis] += range.start;
            self.at(&old)
        })
    }

    fn concat(axis: usize, all: &[Naive]) -> Naive {
        let mut shape = all[0].shape.clone();
        shape[axis] = all.iter().map(|a| a.shape[axis]).sum();
        Naive::build(shape, |index| {
            let mut old = index.to_vec();
            for a in all {
                if old[axis] < a.shape[axis] {
                    return a.at(&old);
                }
                old[axis] -= a.shape[axis];
            }
            unreachable!("the index is below the sum of the extents")
        })
    }

    fn broadcast(&self, axis: usize, count: u64) -> Naive {
        let mut shape = self.shape.clone();
        shape.insert(axis, count);
        Naive::build(shape, |index| {
            let mut old = index.to_vec();
            old.remove(axis);
            self.at(&old)
        })
    }

    fn pad(&self, axis: usize, before: u64, after: u64) -> Naive {
        let mut shape = self.shape.clone();
        shape[axis] += before + after;
        Naive::build(shape, |index| {
            let mut old = index.to_vec();
            if old[axis] < before || old[axis] - before >= self.shape[axis] {
                return 0;
            }
            old[axis] -= before;
            self.at(&old)
        })
    }
}

/// A seeded generator; the seed is in every failure.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Two sources of 16-bit elements, all different.
fn sources() -> [Vec<u16>; 2] {
    [(1..=240).collect(), (1001..=1240).collect()]
}

fn bytes(array: &Array) -> Vec<u8> {
    let sources = sources().map(|source| Some(crate::pod::bytes_of(&source).to_vec()));
    let mut out = Vec::new();
    gather(&array.parts().unwrap(), &sources, &mut Vec::new(), &mut out);
    out
}

fn input(source: u64, shape: &[u64]) -> (Array, Naive) {
    let array = Array::input(source, "w", Dtype::BF16, shape).unwrap();
    let len = shape.iter().product::<u64>() as usize;
    (array, Naive { shape: shape.to_vec(), elements: sources()[source as usize][..len].to_vec() })
}

fn check(array: &Array, naive: &Naive, why: &str) {
    assert_eq!(array.shape(), naive.shape, "{why}");
    assert_eq!(bytes(array), crate::pod::bytes_of(&naive.elements), "{why}");
}

/// A random list of extents with this product.
fn factors(mut n: u64, dice: &mut Dice) -> Vec<u64> {
    let mut shape = Vec::new();
    while n > 1 {
        let divisors: Vec<u64> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
        let d = divisors[dice.below(divisors.len() as u64) as usize];
        shape.push(d);
        n /= d;
        if shape.len() == 5 {
            shape.push(n);
            break;
        }
    }
    if shape.is_empty() { vec![1] } else { shape }
}

fn step(pair: (Array, Naive), dice: &mut Dice) -> (Array, Naive) {
    let (array, naive) = pair;
    let axis = dice.below(array.ndim() as u64) as usize;
    let extent = naive.shape[axis];
    match dice.below(8) {
        0 | 1 => {
            let shape = factors(array.elements(), dice);
            (array.reshape(&shape).unwrap(), naive.reshape(&shape))
        }
        2 => {
            let mut order: Vec<usize> = (0..array.ndim()).collect();
            for k in (1..order.len()).rev() {
                order.swap(k, dice.below(k as u64 + 1) as usize);
            }
            (array.permute(&order).unwrap(), naive.permute(&order))
        }
        3 => {
            let start = dice.below(extent);
            let end = start + 1 + dice.below(extent - start);
            (array.slice(axis, start..end).unwrap(), naive.slice(axis, start..end))
        }
        4 => {
            let cut = dice.below(extent + 1);
            let (a, b) = (array.slice(axis, ..cut).unwrap(), array.slice(axis, cut..).unwrap());
            let (na, nb) = (naive.slice(axis, 0..cut), naive.slice(axis, cut..extent));
            (Array::concat(axis, &[b, a]).unwrap(), Naive::concat(axis, &[nb, na]))
        }
        5 if array.elements() < 200 => {
            let (before, after) = (dice.below(3), dice.below(3));
            (array.pad(axis, before, after).unwrap(), naive.pad(axis, before, after))
        }
        6 if array.elements() < 200 && array.ndim() < 5 => {
            let count = 1 + dice.below(3);
            (array.broadcast(axis, count).unwrap(), naive.broadcast(axis, count))
        }
        7 if array.elements() < 200 => {
            let (other, naive_other) = input(1, &naive.shape);
            (Array::concat(axis, &[array, other]).unwrap(), Naive::concat(axis, &[naive, naive_other]))
        }
        _ => (array, naive),
    }
}

#[test]
fn random_chains_move_every_element_where_it_belongs() {
    for seed in 0..4000 {
        let mut dice = Dice(seed);
        let n = 1 + dice.below(60);
        let shape = factors(n, &mut dice);
        let mut pair = input(0, &shape);
        for _ in 0..1 + dice.below(9) {
            pair = step(pair, &mut dice);
        }
        check(&pair.0, &pair.1, &format!("seed {seed}"));
    }
}

#[test]
fn windows_of_tiles_are_slices_of_the_first_dimension() {
    for seed in 0..500 {
        let mut dice = Dice(seed);
        let (array, naive) = step(input(0, &[4, 3, 2]), &mut dice);
        let Ok(parts) = array.window_parts() else { continue };
        let sources = sources().map(|source| Some(crate::pod::bytes_of(&source).to_vec()));
        for turn in 0..naive.shape[0] {
            let mut out = Vec::new();
            gather(&parts, &sources, &mut vec![turn], &mut out);
            let want = naive.slice(0, turn..turn + 1);
            assert_eq!(out, crate::pod::bytes_of(&want.elements), "seed {seed}, turn {turn}");
        }
    }
}

fn json(array: &Array) -> String {
    serde_json::to_string(&array.parts().unwrap()).unwrap()
}

#[test]
fn grouped_qkv_is_three_repeats() {
    let qkv = Array::input(0, "qkv", Dtype::BF16, &[96, 24]).unwrap();
    let groups = qkv.split(0, &[4, 3, 8]).unwrap();
    let fused = |groups: &Array| {
        let part = |k| groups.slice(1, k..k + 1).unwrap().merge(0..3).unwrap();
        Array::concat(0, &[part(0), part(1), part(2)]).unwrap()
    };
    assert_eq!(
        json(&fused(&groups.slice(0, 2..4).unwrap())),
        concat!(
            r#"[{"repeat":2,"parts":[{"copy":0,"offset":2304,"len":384,"strides":[1152]}]},"#,
            r#"{"repeat":2,"parts":[{"copy":0,"offset":2688,"len":384,"strides":[1152]}]},"#,
            r#"{"repeat":2,"parts":[{"copy":0,"offset":3072,"len":384,"strides":[1152]}]}]"#
        )
    );
    // One group: queries, keys and values lie as they should already.
    assert_eq!(json(&fused(&qkv.split(0, &[1, 3, 32]).unwrap())), r#"[{"copy":0,"len":4608}]"#);
}

#[test]
fn a_transpose_is_two_repeats_and_twice_is_nothing() {
    let w = Array::input(0, "w", Dtype::F32, &[3, 5]).unwrap();
    let t = w.permute(&[1, 0]).unwrap();
    assert_eq!(json(&t), r#"[{"repeat":5,"parts":[{"repeat":3,"parts":[{"copy":0,"len":4,"strides":[4,20]}]}]}]"#);
    assert_eq!(json(&t.permute(&[1, 0]).unwrap()), r#"[{"copy":0,"len":60}]"#);
}

#[test]
fn interleaving_halves_is_a_stack() {
    // One head of 8 rows of 4 bytes, two heads.
    let w = Array::input(0, "w", Dtype::F32, &[16, 1]).unwrap();
    let heads = w.split(0, &[2, 8]).unwrap();
    let halves = [heads.slice(1, ..4).unwrap(), heads.slice(1, 4..).unwrap()];
    let woven = Array::stack(2, &halves).unwrap().merge(0..3).unwrap();
    assert_eq!(
        json(&woven),
        concat!(
            r#"[{"repeat":2,"parts":[{"repeat":4,"parts":["#,
            r#"{"copy":0,"len":4,"strides":[32,4]},{"copy":0,"offset":16,"len":4,"strides":[32,4]}]}]}]"#
        )
    );
}

#[test]
fn padded_columns_are_a_copy_and_a_fill_in_one_repeat() {
    let w = Array::input(0, "w", Dtype::F32, &[5, 6]).unwrap();
    let padded = w.split(1, &[2, 3]).unwrap().pad(2, 0, 1).unwrap().merge(1..3).unwrap();
    assert_eq!(padded.shape(), [5, 8]);
    assert_eq!(json(&padded), r#"[{"repeat":10,"parts":[{"copy":0,"len":12,"strides":[12]},{"fill":0,"len":4}]}]"#);
}

#[test]
fn slices_that_meet_become_one_copy_again() {
    let w = Array::input(0, "w", Dtype::F32, &[6, 4]).unwrap();
    let rows = |r: Range<u64>| w.slice(0, r).unwrap();
    assert_eq!(json(&Array::concat(0, &[rows(0..2), rows(2..5), rows(5..6)]).unwrap()), r#"[{"copy":0,"len":96}]"#);
    let columns = |r: Range<u64>| w.slice(1, r).unwrap();
    let all = Array::concat(1, &[columns(0..1), columns(1..4)]).unwrap();
    assert_eq!(json(&all), r#"[{"copy":0,"len":96}]"#);
    assert_eq!(json(&w.pad(0, 2, 0).unwrap().slice(0, 2..).unwrap()), r#"[{"copy":0,"len":96}]"#);
}

#[test]
fn a_reshape_across_boundaries_keeps_whole_rows_together() {
    let a = Array::input(0, "a", Dtype::U8, &[2, 5]).unwrap();
    let turned = a.permute(&[1, 0]).unwrap().reshape(&[2, 5]).unwrap();
    let naive = input(0, &[2, 5]).1.permute(&[1, 0]).reshape(&[2, 5]);
    let parts = turned.parts().unwrap();
    let mut out = Vec::new();
    gather(&parts, &[Some((1..=10).collect())], &mut Vec::new(), &mut out);
    assert_eq!(out, naive.elements.iter().map(|&n| n as u8).collect::<Vec<_>>());
}

#[test]
fn wide_stacks_lower_in_one_pass() {
    let experts: Vec<Array> = (0..20_000).map(|e| Array::input(e, "w", Dtype::U8, &[4, 2]).unwrap()).collect();
    let stacked = Array::stack(0, &experts).unwrap();
    assert_eq!(stacked.parts().unwrap().len(), 20_000);
    let half = stacked.slice(1, ..2).unwrap();
    assert_eq!(half.parts().unwrap().len(), 20_000);
}

#[test]
fn elements_smaller_than_a_byte_move_in_whole_bytes() {
    let w = Array::input(0, "w", Dtype::F4, &[4, 6]).unwrap();
    assert_eq!(json(&w.slice(0, 1..3).unwrap()), r#"[{"copy":0,"offset":3,"len":6}]"#);
    assert_eq!(json(&w.split(1, &[3, 2]).unwrap().permute(&[1, 0, 2]).unwrap()).matches("repeat").count(), 2);
    for apart in [w.permute(&[1, 0]).unwrap(), w.slice(1, 1..3).unwrap(), w.slice(1, ..3).unwrap()] {
        let error = apart.parts().unwrap_err();
        assert!(error.message().contains("moves elements smaller than a byte apart"), "{error}");
    }
    // Six bits: four elements are three bytes.
    let w = Array::input(0, "w", Dtype::F6_E2M3, &[4, 4]).unwrap();
    assert_eq!(json(&w.slice(0, 2..).unwrap()), r#"[{"copy":0,"offset":6,"len":6}]"#);
}

#[test]
fn empty_arrays_have_no_parts() {
    let w = Array::input(0, "w", Dtype::F32, &[0, 4]).unwrap();
    for empty in [
        w.clone(),
        w.permute(&[1, 0]).unwrap(),
        w.reshape(&[4, 0, 7]).unwrap(),
        w.slice(1, 2..2).unwrap(),
        Array::concat(0, &[w.clone(), w.clone()]).unwrap(),
        Array::input(0, "w", Dtype::F32, &[3]).unwrap().slice(0, 1..1).unwrap(),
        w.broadcast(0, 5).unwrap(),
    ] {
        assert_eq!(empty.parts().unwrap(), []);
        assert_eq!(empty.len_bytes(), 0);
    }
    assert_eq!(w.pad(0, 1, 1).unwrap().parts().unwrap(), [Part::Fill { fill: 0, len: 32 }]);
}

#[test]
fn authors_mistakes_are_errors_about_the_tensor() {
    let w = Array::input(0, "w", Dtype::F32, &[4, 6]).unwrap();
    let huge = u64::MAX;
    for refused in [
        w.reshape(&[huge, huge]),
        w.split(2, &[1]),
        w.split(0, &[huge, 2]),
        w.merge(1..1),
        w.merge(1..3),
        w.permute(&[0]),
        w.permute(&[0, 2]),
        w.slice(0, Range { start: 3, end: 2 }),
        w.slice(0, ..=huge),
        w.pad(0, huge, huge),
        w.broadcast(3, 1),
        w.broadcast(0, huge),
        w.repeat(0, huge),
        Array::concat(0, &[w.clone(), w.reshape(&[6, 4]).unwrap()]),
        Array::concat(2, std::slice::from_ref(&w)),
        Array::concat(0, &[w.clone(), Array::input(1, "v", Dtype::BF16, &[4, 6]).unwrap()]),
        Array::input(0, "w", Dtype::F32, &[huge]),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(error.body().role.as_deref(), Some("w" | "v")), "{error:?}");
        assert!(error.message().len() < 200, "{error}");
    }
    assert!(Array::concat(0, &[]).is_err());
}

#[test]
fn what_falls_apart_into_too_many_pieces_is_refused() {
    let w = Array::input(0, "w", Dtype::U8, &[10_007, 10_009]).unwrap();
    let error = w.permute(&[1, 0]).unwrap().reshape(&[10_007, 10_009]).unwrap_err();
    assert!(error.message().contains("too many pieces"), "{error}");
}
