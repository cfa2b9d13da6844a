//! Dimensions in another order, then, if asked for, another shape.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "permute",
    version = "1.0.0",
    summary = "dimensions in another order, then another shape",
    licence = "Apache-2.0"
)]
pub struct Permute {
    /// For each dimension of the result, which it was; all in order if left out.
    dims: Option<Vec<usize>>,
    /// The shape after that: 0 keeps an extent, one -1 takes what is left.
    reshape: Option<Vec<i64>>,
}

impl Transform for Permute {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let mut w = cx.input("w")?;
        if let Some(dims) = &self.dims {
            w = w.permute(dims)?;
        }
        if let Some(template) = &self.reshape {
            w = w.reshape(&shape_of(template, &w)?)?;
        }
        cx.outputs().view("w", w)
    }
}

/// The shape that a template stands for.
fn shape_of(template: &[i64], w: &Array) -> Result<Vec<u64>> {
    let wrong = |why: &str| Err(PlanError::param("reshape", format!("reshape {template:?} {why}")));
    if template.iter().any(|&extent| extent < -1) {
        return wrong("has a negative extent other than -1");
    }
    if template.iter().filter(|&&extent| extent == -1).count() > 1 {
        return wrong("has more than one -1");
    }
    let mut shape = Vec::with_capacity(template.len());
    for (k, &extent) in template.iter().enumerate() {
        shape.push(match extent {
            0 => w.extent(k)?,
            -1 => 1,
            n => n.unsigned_abs(),
        });
    }
    let Some(open) = template.iter().position(|&extent| extent == -1) else { return Ok(shape) };
    let rest = shape.iter().try_fold(1_u64, |all, &extent| all.checked_mul(extent));
    match rest {
        Some(rest) if rest > 0 && w.elements().is_multiple_of(rest) => {
            shape[open] = w.elements() / rest;
            Ok(shape)
        }
        _ => Err(w.refuse(format!(
            "the {} elements of w of shape {:?} do not divide by the other extents of reshape {template:?}",
            w.elements(),
            w.shape()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::abi::Dtype;
    use weightmill_guest::native::{Case, Refused, Tensor};

    fn run(case: Case, shape: &[u64]) -> Result<Tensor, Refused> {
        let case = case.input("w", Tensor::counting(Dtype::U16, shape, 0));
        case.run::<Permute>().map(|mut outputs| outputs.remove("w").unwrap())
    }

    /// Every order of `0 .. n`.
    fn orders(n: usize) -> Vec<Vec<usize>> {
        if n == 0 {
            return vec![vec![]];
        }
        let insert = |order: Vec<usize>| {
            (0..n).map(move |at| {
                let mut order = order.clone();
                order.insert(at, n - 1);
                order
            })
        };
        orders(n - 1).into_iter().flat_map(insert).collect()
    }

    #[test]
    fn every_order_of_up_to_four_dimensions() {
        for shape in [&[][..], &[3], &[2, 3], &[3, 1, 2], &[2, 3, 4], &[2, 3, 1, 2]] {
            for order in orders(shape.len()) {
                let got = run(Case::new().param("dims", order.clone()), shape).unwrap();
                assert_eq!(got.shape, order.iter().map(|&k| shape[k]).collect::<Vec<_>>());
                let cells = got.numbers::<u16>();
                // Walk the result; each index, put back in the old order, gives the old flat index.
                for (flat, cell) in cells.iter().enumerate() {
                    let (mut left, mut old) = (flat as u64, vec![0; shape.len()]);
                    for (k, &from) in order.iter().enumerate().rev() {
                        old[from] = left % got.shape[k];
                        left /= got.shape[k];
                    }
                    let was = old.iter().zip(shape).fold(0, |flat, (i, extent)| flat * extent + i);
                    assert_eq!(u64::from(*cell), was, "{shape:?} {order:?}");
                }
                let mut inverse = vec![0; order.len()];
                order.iter().enumerate().for_each(|(k, &from)| inverse[from] = k);
                let back = Case::new().param("dims", inverse).input("w", got).run::<Permute>().unwrap();
                assert_eq!(back["w"], Tensor::counting(Dtype::U16, shape, 0));
            }
        }
    }

    #[test]
    fn a_template_keeps_and_infers() {
        for (template, shape) in [
            (vec![-1], Some(vec![24])),
            (vec![0, -1], Some(vec![2, 12])),
            (vec![0, 0, 4], Some(vec![2, 3, 4])),
            (vec![3, -1, 0], Some(vec![3, 2, 4])),
            (vec![4, -1, 0], None),
            (vec![2, 3, 2, 2], Some(vec![2, 3, 2, 2])),
            (vec![-1, 24, 1], Some(vec![1, 24, 1])),
            (vec![5, -1], None),
            (vec![-1, -1], None),
            (vec![-2, 12], None),
            (vec![2, 3], None),
            (vec![2, 3, 4, 0], None),
            (vec![i64::from(i32::MAX) << 20, i64::from(i32::MAX) << 20, -1], None),
        ] {
            let got = run(Case::new().param("reshape", template.clone()), &[2, 3, 4]);
            assert_eq!(got.as_ref().ok().map(|t| t.shape.clone()), shape, "{template:?}: {got:?}");
            if let Ok(got) = got {
                assert_eq!(got.bytes, Tensor::counting(Dtype::U16, &[24], 0).bytes);
            }
        }
    }

    #[test]
    fn nothing_to_do_is_one_copy() {
        let case = Case::new().param("reshape", vec![0, -1]).input("w", Tensor::counting(Dtype::U16, &[4, 2, 3], 0));
        assert_eq!(case.view::<Permute>("w").unwrap().len(), 1);
    }

    #[test]
    fn refusals_name_the_numbers() {
        let refusal = |case: Case| run(case, &[2, 3]).unwrap_err().message().to_string();
        assert_eq!(refusal(Case::new().param("dims", vec![0])), "[0] does not name each of the 2 dimensions of w once");
        assert_eq!(refusal(Case::new().param("reshape", vec![-1, -1])), "reshape [-1, -1] has more than one -1");
        let why = "the 6 elements of w of shape [2, 3] do not divide by the other extents of reshape [4, -1]";
        assert_eq!(refusal(Case::new().param("reshape", vec![4, -1])), why);
    }
}
