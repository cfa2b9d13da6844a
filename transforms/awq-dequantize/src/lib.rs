//! AWQ's 4-bit weights to floats. See README.md for the format.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::awq::Weights;
use weightmill_guest::kernels::scaled::runs;
use weightmill_guest::kernels::{Float, check_float_param, check_ndim, check_shape, float_input, input_of};
use weightmill_guest::prelude::*;
use weightmill_guest::with_float;

/// Codes in a word.
const PER_WORD: u64 = 8;
/// Rows that are looked up together: tiles inside a group are multiples.
const TOGETHER: u64 = 16;
/// Groups up to this size are a tile, even where the host would like smaller
/// ones: what is computed once a group is computed once.
const GROUP_BYTES: u64 = 4 << 20;

/// Parameters.
#[transform(
    name = "awq-dequantize",
    version = "1.0.0",
    summary = "AWQ 4-bit weights to floats",
    licence = "Apache-2.0",
    fuel_per_byte = 256
)]
pub struct AwqDequantize {
    /// Bits of a code; 4.
    bits: u64,
    /// Rows that share scales and zero points.
    group_size: NonZeroU64,
    /// The result's dtype.
    dtype: Dtype,
}

impl Transform for AwqDequantize {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        check_float_param("dtype", self.dtype)?;
        if self.bits != 4 {
            return Err(PlanError::param("bits", format!("the parameter bits must be 4, found {}", self.bits)));
        }
        let (qweight, qzeros) = (input_of(cx, "qweight", Dtype::I32)?, input_of(cx, "qzeros", Dtype::I32)?);
        let scales = float_input(cx, "scales")?;
        check_ndim(&qweight, 2, "[K, N/8]")?;
        let (rows, words, group) = (qweight.extent(0)?, qweight.extent(1)?, self.group_size.get());
        let columns = words * PER_WORD;
        if !rows.is_multiple_of(group) {
            let message = format!("the {rows} rows of qweight do not divide by the group_size {group}");
            return Err(PlanError::param("group_size", message)
                .hint("group_size is in the model's quantisation config; -1 there means all rows"));
        }
        check_shape(&qzeros, &[rows / group, words], "[K/group_size, N/8]")?;
        check_shape(&scales, &[rows / group, columns], "[K/group_size, N]")?;
        let row_bytes = columns * (self.dtype.bits() / 8);
        let tiles = if rows * columns == 0 {
            Vec::new()
        } else if group * (row_bytes + columns / 2) <= GROUP_BYTES.max(cx.tile_bytes()) {
            let cut = cx.cut(rows / group).reads(&qweight)?.reads(&qzeros)?.reads(&scales)?;
            cut.writes(group * row_bytes).groups()?
        } else {
            parts_of_groups(&qweight, &qzeros, &scales, group, row_bytes)?
        };
        let args = [scales.dtype() as i64, columns as i64, group as i64];
        let tiles: Vec<TileGroup> = tiles.into_iter().map(|tile| tile.args(&args)).collect();
        cx.outputs().tiles("w", self.dtype, &[rows, columns], tiles)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        let &[scales, columns, group] = tile.args() else { unreachable!("plan gives three arguments") };
        let rows = tile.bytes(0).len() as u64 * 2 / columns as u64;
        let groups: Vec<u32> = (0..rows).map(|row| (row / group as u64) as u32).collect();
        with_float!(Dtype::ALL[scales as usize], S => with_float!(self.dtype, D => {
            dequantize::<S, D>(tile, columns as usize, &groups);
        }));
        Ok(())
    }
}

/// Tiles that lie inside groups too large for one.
fn parts_of_groups(
    qweight: &Array,
    qzeros: &Array,
    scales: &Array,
    group: u64,
    row_bytes: u64,
) -> Result<Vec<TileGroup>> {
    let own_bytes = qweight.extent(1)? * 4 + row_bytes;
    let rows = (GROUP_BYTES / own_bytes / TOGETHER).max(1) * TOGETHER;
    let mut tiles = Vec::new();
    for number in 0..qzeros.extent(0)? {
        let own = qweight.slice(0, number * group..(number + 1) * group)?;
        for run in runs(group, rows) {
            let own = own.slice(0, run.range())?.split(0, &[run.count, run.len])?;
            let tile = TileGroup::new(run.count, run.len * row_bytes).window(&own)?;
            let tile = tile.shared(&qzeros.slice(0, number..number + 1)?)?;
            tiles.push(tile.shared(&scales.slice(0, number..number + 1)?)?);
        }
    }
    Ok(tiles)
}

fn dequantize<S: Float, D: Float>(tile: &mut Tile, columns: usize, groups: &[u32]) {
    let weights = Weights::<S> { words: tile.input(0), zeros: tile.input(1), scales: tile.input(2), columns };
    weights.dequantize::<D>(groups, tile.output());
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::kernels::{BF16, F16};
    use weightmill_guest::native::{Case, Tensor};

    /// Column of a word by nibble, as the format has it.
    const COLUMN: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

    fn packed(numbers: &[u32]) -> Vec<i32> {
        let word = |eight: &[u32]| {
            COLUMN.iter().enumerate().fold(0, |word, (nibble, &column)| word | eight[column] << (4 * nibble)) as i32
        };
        numbers.chunks(8).map(word).collect()
    }

    fn case(rows: usize, columns: usize, group: usize) -> (Case, Vec<f32>) {
        let some = |count: usize, seed: u32| -> Vec<u32> {
            (0..count as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) ^ seed) >> 11 & 15).collect()
        };
        let groups = rows / group;
        let (codes, zeros) = (some(rows * columns, 1), some(groups * columns, 0x55_0000));
        let scales: Vec<f32> = (0..groups * columns).map(|i| 0.25 + i as f32 / 64.0).collect();
        let shape = |rows: usize, columns: usize| [rows as u64, columns as u64];
        let case = Case::new()
            .param("bits", 4)
            .param("group_size", group as u64)
            .param("dtype", "F32")
            .input("qweight", Tensor::of(&shape(rows, columns / 8), &packed(&codes)))
            .input("qzeros", Tensor::of(&shape(groups, columns / 8), &packed(&zeros)))
            .input("scales", Tensor::of(&shape(groups, columns), &scales));
        let value = |(i, &code): (usize, &u32)| {
            let at = i / columns / group * columns + i % columns;
            scales[at] * (code as i32 - zeros[at] as i32) as f32
        };
        (case, codes.iter().enumerate().map(value).collect())
    }

    #[test]
    fn every_shape_and_group_with_every_tile_size() {
        for (rows, columns, group) in [(1, 8, 1), (64, 24, 16), (64, 40, 64), (96, 8, 12), (45, 16, 3), (256, 72, 128)]
        {
            let (case, expected) = case(rows, columns, group);
            for tile_bytes in [1, 3000, 1 << 20] {
                let case = case.clone().tile_bytes(tile_bytes);
                let w = case.clone().run::<AwqDequantize>().unwrap()["w"].clone();
                assert_eq!(w.shape, [rows as u64, columns as u64]);
                assert!(w.numbers::<f32>() == expected, "{rows} {columns} {group} {tile_bytes}");
                let half = case.param("dtype", "F16").run::<AwqDequantize>().unwrap()["w"].numbers::<u16>();
                assert!(half == expected.iter().map(|&x| F16::encode(x)).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn groups_larger_than_a_tile_are_cut() {
        let (case, expected) = case(2 * 1040, 1024, 1040);
        let expected: Vec<u16> = expected.iter().map(|&x| BF16::encode(x)).collect();
        let w = case.tile_bytes(1 << 16).run::<AwqDequantize>().unwrap()["w"].numbers::<f32>();
        assert!(w.iter().map(|&x| BF16::encode(x)).eq(expected));
    }

    #[test]
    fn refusals_name_the_numbers() {
        let message = |case: Case| case.run::<AwqDequantize>().unwrap_err().message().to_string();
        let (case, _) = case(64, 16, 16);
        assert_eq!(message(case.clone().param("bits", 3)), "the parameter bits must be 4, found 3");
        assert_eq!(
            message(case.clone().param("group_size", 24)),
            "the 64 rows of qweight do not divide by the group_size 24"
        );
        assert_eq!(
            message(case.param("group_size", 32)),
            "qzeros must be of shape [2, 2] ([K/group_size, N/8]), found [4, 2]"
        );
    }
}
