//! FP8 E4M3 with scales a tensor, a row or a block, back to BF16 or F32. See
//! README.md for the operation order.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::fp8::{self, Dequantizer, Target};
use weightmill_guest::kernels::scaled::{self, BLOCK};
use weightmill_guest::kernels::{BF16, F32, Float, cast, check_ndim, check_shape, float_input, input_of};
use weightmill_guest::prelude::*;
use weightmill_guest::with_float;

/// Parameters.
#[transform(
    name = "fp8-dequantize",
    version = "1.0.0",
    summary = "FP8 E4M3 with scales back to BF16 or F32",
    licence = "Apache-2.0",
    fuel_per_byte = 128
)]
pub struct Fp8Dequantize {
    /// What shares a scale.
    scheme: Scheme,
    /// The result's dtype.
    dtype: To,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
pub enum Scheme {
    /// The tensor.
    Tensor,
    /// Each entry of the first dimension.
    Channel,
    /// Each block of 128 x 128.
    Block,
}

/// The result's dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
pub enum To {
    /// BF16.
    #[choice("BF16")]
    Bf16,
    /// F32.
    #[choice("F32")]
    F32,
}

impl Transform for Fp8Dequantize {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let (w, scale) = (input_of(cx, "w", Dtype::F8_E4M3)?, float_input(cx, "scale")?);
        let dtype = match self.dtype {
            To::Bf16 => Dtype::BF16,
            To::F32 => Dtype::F32,
        };
        let (element, args) = (dtype.bits() / 8, [scale.dtype() as i64]);
        let tiles = match self.scheme {
            Scheme::Tensor => {
                if scale.ndim() > 0 {
                    check_shape(&scale, &[1], "scheme \"tensor\"; a scalar [] will do")?;
                }
                let tiles = cx.cut(w.elements()).reads(&w)?.shared(&scale).writes(element);
                tiles.args(&[args[0], w.elements() as i64]).groups()?
            }
            Scheme::Channel => {
                check_shape(&scale, &[scaled::matrix(&w)?.0, 1], "scheme \"channel\": one for each row of w")?;
                scaled::channel_tiles(cx, &w, &scale, element, &args)?
            }
            Scheme::Block => {
                check_ndim(&w, 2, "for scheme \"block\"")?;
                let blocks = [w.extent(0)?.div_ceil(BLOCK), w.extent(1)?.div_ceil(BLOCK)];
                check_shape(&scale, &blocks, "scheme \"block\": one for each 128 x 128 of w")?;
                scaled::block_tiles(cx, &w, &scale, element, &args)?
            }
        };
        cx.outputs().tiles("w", dtype, w.shape(), tiles)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        match self.dtype {
            To::Bf16 => self.dequantize::<BF16>(tile),
            To::F32 => self.dequantize::<F32>(tile),
        }
    }
}

impl Fp8Dequantize {
    fn dequantize<D: Target>(&self, tile: &mut Tile) -> Result<(), DataError> {
        let (codes, columns) = (tile.bytes(0), tile.args()[1] as usize);
        if let Some(at) = fp8::find_nan(codes) {
            let index = tile.offset() / size_of::<D::Element>() as u64 + at as u64;
            return Err(DataError::at("w", index, format!("NaN code {:#04X} at flat index {index} of w", codes[at]))
                .hint("the checkpoint's FP8 weights are broken, or are not E4M3"));
        }
        let scales = with_float!(Dtype::ALL[tile.args()[0] as usize], S => decoded::<S>(tile));
        let to = tile.output::<D::Element>();
        match self.scheme {
            Scheme::Tensor => Dequantizer::<D>::new(scales[0]).run(codes, to),
            Scheme::Channel => {
                for ((codes, to), &scale) in codes.chunks(columns).zip(to.chunks_mut(columns)).zip(&scales) {
                    Dequantizer::<D>::new(scale).run(codes, to);
                }
            }
            Scheme::Block => blocks::<D>(codes, &scales, columns, to),
        }
        Ok(())
    }
}

fn decoded<S: Float>(tile: &Tile) -> Vec<f32> {
    let scales = tile.input::<S::Element>(1);
    let mut decoded = vec![0.0; scales.len()];
    cast::convert::<S, F32>(scales, &mut decoded);
    decoded
}

fn blocks<D: Target>(codes: &[u8], scales: &[f32], columns: usize, to: &mut [D::Element]) {
    let block = BLOCK as usize;
    let bands = codes.chunks(block * columns).zip(to.chunks_mut(block * columns));
    for ((codes, to), scales) in bands.zip(scales.chunks(columns.div_ceil(block))) {
        let scales: Vec<_> = scales.iter().map(|&scale| Dequantizer::<D>::new(scale)).collect();
        for (codes, to) in codes.chunks(columns).zip(to.chunks_mut(columns)) {
            for ((codes, to), scale) in codes.chunks(block).zip(to.chunks_mut(block)).zip(&scales) {
                scale.run(codes, to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::native::{Case, Refused, Tensor};

    fn codes(shape: &[u64]) -> Tensor {
        let count = shape.iter().product::<u64>();
        let code = |i: u64| ((i * 37 + i / 256) % 256) as u8;
        Tensor::new(Dtype::F8_E4M3, shape, (0..count).map(code).map(|c| if c & 0x7f == 0x7f { 0 } else { c }).collect())
    }

    fn scales(shape: &[u64]) -> Tensor {
        let count = shape.iter().product::<u64>();
        Tensor::of(shape, &(0..count).map(|i| 0.013 * (i + 1) as f32).collect::<Vec<_>>())
    }

    fn case(scheme: &str, dtype: &str, w: Tensor, scale: Tensor) -> Case {
        Case::new().param("scheme", scheme).param("dtype", dtype).input("w", w).input("scale", scale)
    }

    fn check(scheme: &str, w: &Tensor, scale: &Tensor, of: impl Fn(usize) -> usize) {
        let values = scale.numbers::<f32>();
        let expected: Vec<f32> =
            w.bytes.iter().enumerate().map(|(i, &code)| fp8::decode(code) * values[of(i)]).collect();
        let narrow: Vec<u16> = expected.iter().map(|&x| BF16::encode(x)).collect();
        for tile_bytes in [1, 3000, 100_000, 1 << 20] {
            let run = |dtype| {
                let case = case(scheme, dtype, w.clone(), scale.clone());
                case.tile_bytes(tile_bytes).run::<Fp8Dequantize>().unwrap()["w"].clone()
            };
            assert!(run("F32").numbers::<f32>() == expected, "{scheme} {:?} {tile_bytes}", w.shape);
            let bf16 = run("BF16");
            assert!(bf16.numbers::<u16>() == narrow, "{scheme} {:?} {tile_bytes}", w.shape);
            assert_eq!((bf16.dtype, &bf16.shape), (Dtype::BF16, &w.shape));
        }
    }

    #[test]
    fn every_scheme_on_every_shape_with_every_tile_size() {
        for (rows, columns) in [(1_usize, 1_usize), (3, 7), (130, 200), (257, 129), (256, 384)] {
            let w = codes(&[rows as u64, columns as u64]);
            check("tensor", &w, &scales(&[1]), |_| 0);
            check("channel", &w, &scales(&[rows as u64, 1]), |i| i / columns);
            let across = columns.div_ceil(128);
            let shape = [rows.div_ceil(128) as u64, across as u64];
            check("block", &w, &scales(&shape), |i| i / columns / 128 * across + i % columns / 128);
        }
        check("channel", &codes(&[4, 3, 5, 2]), &scales(&[4, 1]), |i| i / 30);
        check("channel", &codes(&[9]), &scales(&[9, 1]), |i| i);
        let scalar = Tensor { shape: vec![], ..scales(&[1]) };
        check("tensor", &codes(&[2, 3]), &scalar, |_| 0);
    }

    #[test]
    fn bands_and_rows_larger_than_a_tile_are_cut() {
        let columns = 50_000_usize;
        let across = columns / 128 + 1;
        check("block", &codes(&[131, columns as u64]), &scales(&[2, across as u64]), |i| {
            i / columns / 128 * across + i % columns / 128
        });
        let columns = (3_usize << 20) + 5;
        check("channel", &codes(&[2, columns as u64]), &scales(&[2, 1]), |i| i / columns);
        let across = columns / 128 + 1;
        check("block", &codes(&[2, columns as u64]), &scales(&[1, across as u64]), |i| i % columns / 128);
    }

    #[test]
    fn a_nan_code_is_named() {
        for (scheme, shape) in [("tensor", [1, 1]), ("channel", [4, 1]), ("block", [1, 2])] {
            let mut w = codes(&[4, 200]);
            (w.bytes[7], w.bytes[455]) = (0x7e, 0xff);
            w.bytes[456] = 0x7f;
            let scale = Tensor { shape: if scheme == "tensor" { vec![] } else { shape.to_vec() }, ..scales(&shape) };
            let case = case(scheme, "BF16", w, scale).tile_bytes(500);
            let Refused::Data(error) = case.run::<Fp8Dequantize>().unwrap_err() else { panic!("the plan is fine") };
            assert_eq!((error.index, error.message.as_str()), (Some(455), "NaN code 0xFF at flat index 455 of w"));
        }
    }

    #[test]
    fn sixteen_bit_scales_are_their_values() {
        let scale = Tensor::new(Dtype::BF16, &[2, 1], vec![0x80, 0x3f, 0x00, 0x40]);
        let w = Tensor::new(Dtype::F8_E4M3, &[2, 1], vec![0x38, 0x38]);
        let out = case("channel", "F32", w, scale).run::<Fp8Dequantize>().unwrap();
        assert_eq!(out["w"].numbers::<f32>(), [1.0, 2.0]);
    }

    #[test]
    fn refusals_name_the_numbers() {
        let refused = |scheme: &str, w: Tensor, scale: Tensor| {
            case(scheme, "BF16", w, scale).run::<Fp8Dequantize>().unwrap_err().message().to_string()
        };
        assert_eq!(
            refused("channel", codes(&[4, 3]), scales(&[4])),
            "scale must be of shape [4, 1] (scheme \"channel\": one for each row of w), found [4]"
        );
        assert_eq!(
            refused("block", codes(&[200, 300]), scales(&[2, 2])),
            "scale must be of shape [2, 3] (scheme \"block\": one for each 128 x 128 of w), found [2, 2]"
        );
        assert_eq!(
            refused("tensor", codes(&[4, 3]), scales(&[4, 1])),
            "scale must be of shape [1] (scheme \"tensor\"; a scalar [] will do), found [4, 1]"
        );
        assert_eq!(refused("tensor", scales(&[4, 3]), scales(&[1])), "w must be F8_E4M3, found F32 [4, 3]");
        let other = case("tensor", "F16", codes(&[1, 1]), scales(&[1])).run::<Fp8Dequantize>().unwrap_err();
        assert_eq!(other.message(), "the parameter dtype must be \"BF16\" or \"F32\", found \"F16\"");
    }

    #[test]
    fn nothing_is_dequantised_to_nothing() {
        for (scheme, shape) in [("tensor", vec![1]), ("channel", vec![0, 1]), ("block", vec![0, 1])] {
            let out = case(scheme, "F32", codes(&[0, 5]), scales(&shape)).run::<Fp8Dequantize>().unwrap();
            assert_eq!((&out["w"].shape, out["w"].bytes.len()), (&vec![0, 5], 0));
        }
    }
}
