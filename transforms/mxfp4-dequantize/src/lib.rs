//! MXFP4 blocks with their scales to BF16. See README.md for the format.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::{check_shape, input_of, mxfp4};
use weightmill_guest::prelude::*;

/// Values of a block.
const VALUES: u64 = 2 * mxfp4::BLOCK as u64;

/// Parameters.
#[transform(
    name = "mxfp4-dequantize",
    version = "1.0.0",
    summary = "MXFP4 blocks to BF16",
    licence = "Apache-2.0",
    fuel_per_byte = 64
)]
pub struct Mxfp4Dequantize {
    /// The result's dtype.
    dtype: To,
}

/// The result's dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
pub enum To {
    /// BF16, in which every value but an overflow is exact.
    #[choice("BF16")]
    Bf16,
}

impl Transform for Mxfp4Dequantize {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let To::Bf16 = self.dtype;
        let (blocks, scales) = (input_of(cx, "blocks", Dtype::U8)?, input_of(cx, "scales", Dtype::U8)?);
        let [rows @ .., per_row] = scales.shape() else {
            return Err(scales.refuse("scales must be of shape [..., R, B], found a scalar"));
        };
        if rows.is_empty() {
            return Err(scales
                .refuse(format!("scales must be of shape [..., R, B], found {:?}", scales.shape()))
                .hint("use permute with reshape to give it rows"));
        }
        let mut expected = scales.shape().to_vec();
        expected.push(mxfp4::BLOCK as u64);
        check_shape(&blocks, &expected, "16 bytes for each entry of scales")?;
        let columns = per_row.checked_mul(VALUES);
        let columns = columns.ok_or_else(|| scales.refuse(format!("{per_row} blocks a row are too many")))?;
        let mut shape = rows.to_vec();
        shape.push(columns);
        let tiles = cx.cut(scales.elements()).reads(&blocks)?.reads(&scales)?.writes(VALUES * 2);
        cx.outputs().tiles("w", Dtype::BF16, &shape, tiles.groups()?)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        let (blocks, scales) = (tile.bytes(0), tile.bytes(1));
        if let Some(at) = mxfp4::find_nan(scales) {
            let index = tile.offset() / (VALUES * 2) + at as u64;
            return Err(DataError::at("scales", index, format!("NaN scale 0xFF at flat index {index} of scales"))
                .hint("the checkpoint's MXFP4 weights are broken, or blocks and scales are swapped"));
        }
        mxfp4::dequantize(blocks, scales, tile.output());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::kernels::{BF16, Float};
    use weightmill_guest::native::{Case, Refused, Tensor};

    fn case(shape: &[u64], scale: impl Fn(usize) -> u8) -> (Case, Vec<u8>, Vec<u8>) {
        let count = shape.iter().product::<u64>() as usize;
        let blocks: Vec<u8> = (0..count * 16).map(|i| (i * 73 % 251) as u8).collect();
        let scales: Vec<u8> = (0..count).map(scale).collect();
        let mut wide = shape.to_vec();
        wide.push(16);
        let case = Case::new()
            .param("dtype", "BF16")
            .input("blocks", Tensor::new(Dtype::U8, &wide, blocks.clone()))
            .input("scales", Tensor::new(Dtype::U8, shape, scales.clone()));
        (case, blocks, scales)
    }

    #[test]
    fn low_nibbles_come_first_and_blocks_have_their_scales() {
        const TABLE: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for shape in [vec![1, 1], vec![7, 3], vec![2, 5, 9], vec![300, 4]] {
            let (case, blocks, scales) = case(&shape, |i| (i * 11 % 255) as u8);
            let value = |i: usize| {
                let nibble = blocks[i / 2] >> (4 * (i % 2)) & 15;
                let power = 2.0_f64.powi(i32::from(scales[i / 32]) - 127);
                let sign = if nibble & 8 == 0 { 1.0 } else { -1.0 };
                BF16::encode((sign * TABLE[usize::from(nibble & 7)] * power) as f32)
            };
            let expected: Vec<u16> = (0..scales.len() * 32).map(value).collect();
            for tile_bytes in [1, 5000, 1 << 20] {
                let w = case.clone().tile_bytes(tile_bytes).run::<Mxfp4Dequantize>().unwrap()["w"].clone();
                assert!(w.numbers::<u16>() == expected, "{shape:?} {tile_bytes}");
                let (last, rows) = w.shape.split_last().unwrap();
                assert_eq!((rows, *last), (&shape[..shape.len() - 1], shape[shape.len() - 1] * 32));
            }
        }
    }

    #[test]
    fn a_nan_scale_is_named() {
        let (case, ..) = case(&[100, 4], |i| if i >= 333 { 255 } else { 100 });
        let refused = case.tile_bytes(2000).run::<Mxfp4Dequantize>().unwrap_err();
        let Refused::Data(error) = refused else { panic!("the plan is fine") };
        assert_eq!(error.role.as_deref(), Some("scales"));
        assert_eq!((error.index, error.message.as_str()), (Some(333), "NaN scale 0xFF at flat index 333 of scales"));
    }

    #[test]
    fn refusals_name_the_numbers() {
        let u8s = |shape: &[u64]| Tensor::new(Dtype::U8, shape, vec![0; shape.iter().product::<u64>() as usize]);
        let refused = |blocks: Tensor, scales: Tensor| {
            let case = Case::new().param("dtype", "BF16").input("blocks", blocks).input("scales", scales);
            case.run::<Mxfp4Dequantize>().unwrap_err().message().to_string()
        };
        assert_eq!(
            refused(u8s(&[2, 3, 8]), u8s(&[2, 3])),
            "blocks must be of shape [2, 3, 16] (16 bytes for each entry of scales), found [2, 3, 8]"
        );
        assert_eq!(refused(u8s(&[3, 16]), u8s(&[3])), "scales must be of shape [..., R, B], found [3]");
        assert_eq!(refused(u8s(&[16]), u8s(&[])), "scales must be of shape [..., R, B], found a scalar");
        let bytes = Tensor::new(Dtype::F8_E8M0, &[2, 3], vec![0; 6]);
        assert_eq!(refused(u8s(&[2, 3, 16]), bytes), "scales must be U8, found F8_E8M0 [2, 3]");
        let case = Case::new().param("dtype", "F32").input("blocks", u8s(&[1, 1, 16])).input("scales", u8s(&[1, 1]));
        let refused = case.run::<Mxfp4Dequantize>().unwrap_err();
        assert_eq!(refused.message(), "the parameter dtype must be \"BF16\", found \"F32\"");
    }

    #[test]
    fn nothing_is_dequantised_to_nothing() {
        let (case, ..) = case(&[0, 4], |_| 0);
        assert_eq!(case.run::<Mxfp4Dequantize>().unwrap()["w"].shape, [0, 128]);
    }
}
