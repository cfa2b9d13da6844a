//! Between F32, F16 and BF16. See README.md for the roundings.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::{Float, cast, check_float_param, float_input};
use weightmill_guest::prelude::*;
use weightmill_guest::with_float;

/// Parameters.
#[transform(
    name = "cast",
    version = "1.0.0",
    summary = "converts between F32, F16 and BF16",
    licence = "Apache-2.0",
    fuel_per_byte = 64
)]
pub struct Cast {
    /// The dtype to convert to.
    dtype: Dtype,
}

impl Transform for Cast {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        check_float_param("dtype", self.dtype)?;
        let w = float_input(cx, "w")?;
        if w.dtype() == self.dtype {
            return cx.outputs().view("w", w);
        }
        let tiles = cx.cut(w.elements()).reads(&w)?.writes(self.dtype.bits() / 8).args(&[w.dtype() as i64]);
        cx.outputs().tiles("w", self.dtype, w.shape(), tiles.groups()?)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        let from = Dtype::ALL[tile.args()[0] as usize];
        with_float!(from, S => with_float!(self.dtype, D => convert::<S, D>(tile)));
        Ok(())
    }
}

fn convert<S: Float, D: Float>(tile: &mut Tile) {
    let from = tile.input::<S::Element>(0);
    cast::convert::<S, D>(from, tile.output::<D::Element>());
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::abi::Part;
    use weightmill_guest::native::{Case, Tensor};

    fn halves(dtype: Dtype, shape: &[u64], bits: &[u16]) -> Tensor {
        Tensor::new(dtype, shape, bits.iter().flat_map(|u| u.to_le_bytes()).collect())
    }

    #[test]
    fn ties_go_to_even_and_nan_payloads_are_cut() {
        let bits = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x7f80_0001, 0x7fc1_2345, 0xffff_ffff_u32, 0x477f_f000];
        let w = Tensor::of(&[7], &bits.map(f32::from_bits));
        let to =
            |dtype: &str| Case::new().param("dtype", dtype).input("w", w.clone()).run::<Cast>().unwrap()["w"].clone();
        assert_eq!(to("BF16").numbers::<u16>(), [0x3f80, 0x3f82, 0x3f81, 0x7fc0, 0x7fc1, 0xffff, 0x4780]);
        assert_eq!(to("F16").numbers::<u16>()[3..], [0x7e00, 0x7e09, 0xffff, 0x7c00]);
        assert_eq!(to("F16").dtype, Dtype::F16);
    }

    #[test]
    fn every_pair_works_and_tiles_change_nothing() {
        let elements = 5 * 1237;
        let names = ["F32", "F16", "BF16"];
        for from in names {
            for to in names {
                let from: Dtype = from.parse().unwrap();
                let w = Tensor::counting(from, &[5, 1237], 0x3c00_0000);
                let case = Case::new().param("dtype", to).input("w", w.clone());
                let whole = case.clone().run::<Cast>().unwrap()["w"].clone();
                assert_eq!((whole.dtype.as_str(), whole.bytes.len() as u64), (to, elements * whole.dtype.bits() / 8));
                for tile_bytes in [1, 100, 5000, 1 << 15] {
                    assert_eq!(case.clone().tile_bytes(tile_bytes).run::<Cast>().unwrap()["w"], whole);
                }
                if whole.dtype == from {
                    assert_eq!(whole, w);
                }
            }
        }
        let back = Case::new().param("dtype", "BF16").input("w", halves(Dtype::BF16, &[2], &[0x7f81, 0x0001]));
        let wide = back.clone().param("dtype", "F32").run::<Cast>().unwrap()["w"].clone();
        assert_eq!(wide.numbers::<u32>(), [0x7f81_0000, 0x0001_0000]);
    }

    #[test]
    fn its_own_dtype_is_the_identity() {
        let case = Case::new().param("dtype", "F16").input("w", halves(Dtype::F16, &[3], &[0x7c01, 1, 2]));
        assert_eq!(case.view::<Cast>("w").unwrap(), [Part::Copy { copy: 0, offset: 0, len: 6, strides: vec![] }]);
    }

    #[test]
    fn scalars_and_empty_tensors_are_tensors() {
        for shape in [&[][..], &[0], &[3, 0, 2]] {
            let count = shape.iter().product::<u64>() as usize;
            let case = Case::new().param("dtype", "BF16").input("w", Tensor::of(shape, &vec![1.5_f32; count]));
            let w = case.run::<Cast>().unwrap()["w"].clone();
            assert_eq!((w.shape.as_slice(), w.numbers::<u16>()), (shape, vec![0x3fc0; count]));
        }
    }

    #[test]
    fn other_dtypes_are_refused() {
        let w = Tensor::of(&[2, 1], &[1_i32, 2]);
        let case = Case::new().param("dtype", "BF16").input("w", w.clone());
        assert_eq!(case.run::<Cast>().unwrap_err().message(), "w must be F32, F16 or BF16, found I32 [2, 1]");
        let case = Case::new().param("dtype", "F64").input("w", Tensor::of(&[1], &[1.0_f32]));
        let refused = case.run::<Cast>().unwrap_err();
        assert_eq!(refused.message(), "the parameter dtype must be F32, F16 or BF16, found F64");
    }
}
