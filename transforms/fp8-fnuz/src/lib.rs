//! FP8 E4M3 to the fnuz form, with the scale that makes up for its other bias.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::fp8::fnuz;
use weightmill_guest::kernels::{Float, float_input, input_of};
use weightmill_guest::prelude::*;
use weightmill_guest::with_float;

/// The output that a tile is of, in `plan`'s order.
const CODES: usize = 0;

/// No parameters.
#[transform(
    name = "fp8-fnuz",
    version = "1.0.0",
    summary = "FP8 E4M3 to the fnuz form, with its scale",
    licence = "Apache-2.0",
    fuel_per_byte = 64
)]
pub struct Fp8Fnuz {}

impl Transform for Fp8Fnuz {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let (w, scale) = (input_of(cx, "w", Dtype::F8_E4M3)?, float_input(cx, "scale")?);
        let codes = cx.cut(w.elements()).reads(&w)?.writes(1).groups()?;
        let element = scale.dtype().bits() / 8;
        let scales = cx.cut(scale.elements()).reads(&scale)?.writes(element).args(&[scale.dtype() as i64]).groups()?;
        let outputs = cx.outputs().tiles("w", Dtype::F8_E4M3FNUZ, w.shape(), codes)?;
        outputs.tiles("scale", scale.dtype(), scale.shape(), scales)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        if tile.target() != CODES {
            with_float!(Dtype::ALL[tile.args()[0] as usize], F => double::<F>(tile));
            return Ok(());
        }
        let (codes, first) = (tile.bytes(0), tile.offset());
        fnuz::codes(codes, tile.output_bytes()).map_err(|at| {
            let index = first + at as u64;
            DataError::at("w", index, format!("NaN code {:#04X} at flat index {index} of w", codes[at]))
                .hint("the checkpoint's FP8 weights are broken, or are not E4M3")
        })
    }
}

fn double<F: Float>(tile: &mut Tile) {
    let scales = tile.input::<F::Element>(0);
    fnuz::scales::<F>(scales, tile.output());
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Refused, Tensor};

    fn case(codes: Vec<u8>) -> Case {
        let w = Tensor::new(Dtype::F8_E4M3, &[codes.len() as u64 / 2, 2], codes);
        Case::new().input("w", w).input("scale", Tensor::of(&[1], &[0.37_f32]))
    }

    #[test]
    fn minus_zero_becomes_zero_and_scales_double() {
        let codes: Vec<u8> = (0..=0xff).filter(|code| code & 0x7f != 0x7f).collect();
        let expected: Vec<u8> = codes.iter().map(|&code| if code == 0x80 { 0 } else { code }).collect();
        for tile_bytes in [1, 64, 1 << 20] {
            let out = case(codes.clone()).tile_bytes(tile_bytes).run::<Fp8Fnuz>().unwrap();
            assert_eq!((out["w"].dtype, &out["w"].bytes), (Dtype::F8_E4M3FNUZ, &expected));
            assert_eq!(out["scale"].numbers::<f32>(), [0.74]);
        }
    }

    #[test]
    fn scales_keep_their_dtype_and_shape() {
        let scale = Tensor::new(Dtype::BF16, &[], vec![0x80, 0x3f]);
        let w = Tensor::new(Dtype::F8_E4M3, &[0], vec![]);
        let out = Case::new().input("w", w).input("scale", scale).run::<Fp8Fnuz>().unwrap();
        assert_eq!((out["scale"].dtype, out["scale"].bytes.as_slice()), (Dtype::BF16, &[0x00, 0x40][..]));
        assert_eq!((&out["scale"].shape, &out["w"].shape), (&vec![], &vec![0]));
    }

    #[test]
    fn a_nan_code_is_named() {
        let mut codes = vec![0x80; 5000];
        (codes[4001], codes[4002]) = (0x7f, 0xff);
        let Refused::Data(error) = case(codes).tile_bytes(999).run::<Fp8Fnuz>().unwrap_err() else {
            panic!("the plan is fine")
        };
        assert_eq!((error.index, error.message.as_str()), (Some(4001), "NaN code 0x7F at flat index 4001 of w"));
    }
}
