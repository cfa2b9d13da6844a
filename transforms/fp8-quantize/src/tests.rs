use super::*;
use weightmill_guest::native::{Case, Refused, Tensor};

fn matrix(rows: u64, columns: u64) -> Tensor {
    let value =
        |i: u64| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / 8_388_608.0 - 1.0) * (1 + i % 5) as f32;
    Tensor::of(&[rows, columns], &(0..rows * columns).map(value).collect::<Vec<_>>())
}

/// The definition, element by element, with f32 division and comparisons.
fn reference(scheme: Scheme, ue8m0: bool, w: &[f32], rows: usize, columns: usize) -> (Vec<u8>, Vec<f32>) {
    let (high, wide) = match scheme {
        Scheme::Tensor => (rows.max(1), columns.max(1)),
        Scheme::Channel => (1, columns.max(1)),
        Scheme::Block => (128, 128),
    };
    let across = columns.div_ceil(wide);
    let mut amax = vec![0.0_f32; rows.div_ceil(high) * across];
    for (i, x) in w.iter().enumerate() {
        let at = &mut amax[i / columns / high * across + i % columns / wide];
        *at = at.max(x.abs());
    }
    let scale = |amax: f32| match scheme {
        Scheme::Block => {
            let scale = amax.max(1e-4) / 448.0;
            if ue8m0 { scale.log2().ceil().exp2() } else { scale }
        }
        _ if amax == 0.0 => 1.0,
        _ => (amax / 448.0).max(f32::MIN_POSITIVE),
    };
    let scales: Vec<f32> = amax.into_iter().map(scale).collect();
    let code =
        |(i, x): (usize, &f32)| fp8::encode(x * (1.0 / scales[i / columns / high * across + i % columns / wide]));
    (w.iter().enumerate().map(code).collect(), scales)
}

fn check(scheme: Scheme, ue8m0: bool, w: &Tensor, tile_bytes: u64) {
    let (rows, columns) = (w.shape[0], w.shape[1..].iter().product::<u64>());
    let case = Case::new().param("scheme", scheme.name()).param("ue8m0", ue8m0).input("w", w.clone());
    let out = case.tile_bytes(tile_bytes).run::<Fp8Quantize>().unwrap();
    let (codes, scales) = reference(scheme, ue8m0, &w.numbers::<f32>(), rows as usize, columns as usize);
    assert_eq!(out["scale"].numbers::<f32>(), scales, "{scheme:?} {:?} {tile_bytes}", w.shape);
    assert!(out["w"].bytes == codes, "{scheme:?} {:?} {tile_bytes}", w.shape);
    assert_eq!((out["w"].dtype, &out["w"].shape), (Dtype::F8_E4M3, &w.shape));
    assert_eq!(
        out["scale"].shape,
        match scheme {
            Scheme::Tensor => vec![1],
            Scheme::Channel => vec![rows, 1],
            Scheme::Block => vec![rows.div_ceil(128), columns.div_ceil(128)],
        }
    );
}

#[test]
fn every_scheme_on_every_shape_with_every_tile_size() {
    for (rows, columns) in [(1, 1), (3, 7), (130, 200), (257, 129), (128, 384), (300, 128), (2, 1000)] {
        let w = matrix(rows, columns);
        for tile_bytes in [1, 1000, 70_000, 1 << 20] {
            for (scheme, ue8m0) in
                [(Scheme::Tensor, false), (Scheme::Channel, false), (Scheme::Block, false), (Scheme::Block, true)]
            {
                check(scheme, ue8m0, &w, tile_bytes);
            }
        }
    }
}

#[test]
fn rows_larger_than_a_tile_are_cut() {
    // Beyond what is kept whole, so that both dimensions are cut.
    let w = matrix(2, (5 << 20) + 77);
    for scheme in [Scheme::Tensor, Scheme::Channel, Scheme::Block] {
        check(scheme, false, &w, 1 << 20);
    }
    check(Scheme::Block, true, &matrix(131, 40_000), 1 << 16);
}

#[test]
fn the_first_value_that_is_not_finite_is_named_in_cut_rows_and_bands_too() {
    let columns = 40_000;
    let mut w = matrix(131, columns).numbers::<f32>();
    w[39_999] = f32::NAN;
    w[40_000] = f32::NAN;
    let case = |scheme: &str, w: Tensor| {
        let case = Case::new().param("scheme", scheme).input("w", w).tile_bytes(1 << 16);
        let Refused::Data(error) = case.run::<Fp8Quantize>().unwrap_err() else { panic!("the plan is fine") };
        error.index
    };
    assert_eq!(case("block", Tensor::of(&[131, columns], &w)), Some(39_999));
    let columns = (4 << 20) + 7;
    let mut w = vec![0.5_f32; 2 * columns];
    w[columns + 100_001] = f32::INFINITY;
    for scheme in ["channel", "block"] {
        assert_eq!(case(scheme, Tensor::of(&[2, columns as u64], &w)), Some(columns as u64 + 100_001), "{scheme}");
    }
}

#[test]
fn zeros_and_tiny_values_have_the_scales_that_are_laid_down() {
    let run = |scheme: &str, w: &[f32]| {
        let w = Tensor::of(&[2, w.len() as u64 / 2], w);
        let out = Case::new().param("scheme", scheme).input("w", w).run::<Fp8Quantize>().unwrap();
        (out["w"].bytes.clone(), out["scale"].numbers::<f32>())
    };
    assert_eq!(run("tensor", &[0.0, -0.0]), (vec![0, 0x80], vec![1.0]));
    assert_eq!(run("channel", &[0.0, 448.0]), (vec![0, 0x7e], vec![1.0, 1.0]));
    assert_eq!(run("block", &[0.0, 0.0]), (vec![0, 0], vec![1e-4 / 448.0]));
    assert_eq!(
        run("tensor", &[1e-38, -2e-38]),
        (
            vec![fp8::encode(1e-38 * 2.0_f32.powi(126)), fp8::encode(-2e-38 * 2.0_f32.powi(126))],
            vec![f32::MIN_POSITIVE]
        )
    );
}

#[test]
fn channels_are_entries_of_the_first_dimension_whatever_follows() {
    let w = matrix(6, 20);
    for shape in [vec![6, 4, 5], vec![6, 1, 20, 1], vec![120]] {
        let w = Tensor { shape, ..w.clone() };
        check(Scheme::Channel, false, &w, 1 << 20);
    }
    let refused = |scheme: &str, shape: &[u64]| {
        let w = Tensor { shape: shape.to_vec(), ..w.clone() };
        Case::new().param("scheme", scheme).input("w", w).run::<Fp8Quantize>().unwrap_err()
    };
    assert_eq!(refused("tensor", &[120]).message(), "w must have 2 dimensions for scheme \"tensor\", found 1 [120]");
    assert_eq!(
        refused("block", &[6, 4, 5]).message(),
        "w must have 2 dimensions for scheme \"block\", found 3 [6, 4, 5]"
    );
    let scalar = Case::new().param("scheme", "channel").input("w", Tensor::of(&[], &[1.0_f32]));
    assert_eq!(scalar.run::<Fp8Quantize>().unwrap_err().message(), "w must have rows, but is a scalar");
}

#[test]
fn nothing_is_quantised_to_nothing() {
    for (shape, scheme, scales) in
        [([0, 5], "tensor", 1), ([0, 5], "channel", 0), ([3, 0], "channel", 3), ([0, 5], "block", 0)]
    {
        let case = Case::new().param("scheme", scheme).input("w", Tensor::of::<f32>(&shape, &[]));
        let out = case.run::<Fp8Quantize>().unwrap();
        assert_eq!(out["w"].shape, shape);
        assert_eq!(out["scale"].numbers::<f32>(), vec![1.0; scales]);
    }
}

#[test]
fn the_first_value_that_is_not_finite_is_named() {
    for scheme in ["tensor", "channel", "block"] {
        for tile_bytes in [16, 4096, 1 << 20] {
            for (at, bad) in [(0, f32::NAN), (200 * 5 + 3, f32::INFINITY), (200 * 129 + 199, f32::NEG_INFINITY)] {
                let mut w = matrix(131, 200).numbers::<f32>();
                w[at] = bad;
                w[200 * 130 + 199] = f32::NAN;
                let case = Case::new().param("scheme", scheme).input("w", Tensor::of(&[131, 200], &w));
                let Refused::Data(error) = case.tile_bytes(tile_bytes).run::<Fp8Quantize>().unwrap_err() else {
                    panic!("the plan is fine")
                };
                assert_eq!(error.index, Some(at as u64), "{scheme} {tile_bytes}");
                assert_eq!(error.message, format!("NaN or infinity at flat index {at} of w cannot be quantised"));
            }
        }
    }
}

#[test]
fn sixteen_bit_inputs_are_quantised_as_their_values() {
    let bits: Vec<u16> = (0..60 * 130).map(|i: u32| (0x3c00 + i * 7 % 0x300) as u16 | ((i as u16) << 15)).collect();
    for (dtype, decode) in [
        (Dtype::F16, weightmill_guest::kernels::F16::decode as fn(u16) -> f32),
        (Dtype::BF16, weightmill_guest::kernels::BF16::decode),
    ] {
        let w = Tensor::new(dtype, &[60, 130], bits.iter().flat_map(|u| u.to_le_bytes()).collect());
        let wide: Vec<f32> = bits.iter().map(|&u| decode(u)).collect();
        for scheme in [Scheme::Tensor, Scheme::Channel, Scheme::Block] {
            let out = Case::new().param("scheme", scheme.name()).input("w", w.clone()).run::<Fp8Quantize>().unwrap();
            let (codes, scales) = reference(scheme, false, &wide, 60, 130);
            assert_eq!((&out["w"].bytes, out["scale"].numbers::<f32>()), (&codes, scales), "{dtype} {scheme:?}");
        }
    }
}

#[test]
fn ue8m0_is_for_blocks_and_codes_are_not_quantised_again() {
    let case = Case::new().param("scheme", "channel").param("ue8m0", true).input("w", matrix(2, 2));
    let refused = case.run::<Fp8Quantize>().unwrap_err();
    assert_eq!(refused.message(), "ue8m0 goes with scheme \"block\" only, not with \"channel\"");
    let codes = Tensor::new(Dtype::F8_E4M3, &[2, 2], vec![0; 4]);
    let refused = Case::new().param("scheme", "tensor").input("w", codes).run::<Fp8Quantize>().unwrap_err();
    assert_eq!(refused.message(), "w must be F32, F16 or BF16, found F8_E4M3 [2, 2]");
}
