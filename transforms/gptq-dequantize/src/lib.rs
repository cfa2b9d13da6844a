//! GPTQ's 4-bit weights to floats. See README.md for the format.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use weightmill_guest::kernels::gptq::Weights;
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
    name = "gptq-dequantize",
    version = "1.0.0",
    summary = "GPTQ 4-bit weights to floats",
    licence = "Apache-2.0",
    fuel_per_byte = 256
)]
pub struct GptqDequantize {
    /// Bits of a code; 4.
    bits: u64,
    /// Rows that share scales and zero points.
    group_size: NonZeroU64,
    /// Whether stored zero points are one less than they mean.
    v1: bool,
    /// The result's dtype.
    dtype: Dtype,
}

/// The inputs of a plan, checked.
struct Inputs {
    qweight: Array,
    qzeros: Array,
    scales: Array,
    rows: u64,
    columns: u64,
    group: u64,
}

impl Inputs {
    /// Bytes of a row of the result.
    fn row_bytes(&self, dtype: Dtype) -> u64 {
        self.columns * (dtype.bits() / 8)
    }
}

impl Transform for GptqDequantize {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let inputs = self.inputs(cx)?;
        let args = [inputs.scales.dtype() as i64, inputs.columns as i64, inputs.group as i64];
        let tiles = match cx.optional("g_idx")? {
            _ if inputs.rows * inputs.columns == 0 => Vec::new(),
            Some(g_idx) => self.any_order(cx, &inputs, &g_idx)?,
            None => {
                let unit = inputs.group / gcd(inputs.group, PER_WORD) * PER_WORD;
                let unit_bytes = unit * (inputs.columns / 2 + inputs.row_bytes(self.dtype));
                if unit_bytes <= GROUP_BYTES.max(cx.tile_bytes()) || unit != inputs.group {
                    let cut = cx.cut(inputs.rows / unit).reads(&inputs.qweight)?;
                    let cut = cut.reads(&inputs.qzeros)?.reads(&inputs.scales)?;
                    cut.writes(unit * inputs.row_bytes(self.dtype)).groups()?
                } else {
                    self.parts_of_groups(&inputs)?
                }
            }
        };
        let tiles: Vec<TileGroup> = tiles.into_iter().map(|group| group.args(&args)).collect();
        cx.outputs().tiles("w", self.dtype, &[inputs.rows, inputs.columns], tiles)
    }

    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        let &[scales, columns, group] = tile.args() else { unreachable!("plan gives three arguments") };
        let (scales, columns) = (Dtype::ALL[scales as usize], columns as usize);
        let rows = tile.bytes(0).len() * 2 / columns;
        let groups = if tile.inputs() > 3 {
            let first = tile.offset() / (columns as u64 * (self.dtype.bits() / 8));
            let all = tile.bytes(3).len() / (columns * (scales.bits() / 8) as usize);
            groups_of(tile.input(1), all, first)?
        } else {
            (0..rows).map(|row| (row as u64 / group as u64) as u32).collect()
        };
        with_float!(scales, S => with_float!(self.dtype, D => self.dequantize::<S, D>(tile, columns, &groups)));
        Ok(())
    }
}

impl GptqDequantize {
    fn inputs(&self, cx: &Plan) -> Result<Inputs> {
        check_float_param("dtype", self.dtype)?;
        if self.bits != 4 {
            return Err(PlanError::param("bits", format!("the parameter bits must be 4, found {}", self.bits)));
        }
        let (qweight, qzeros) = (input_of(cx, "qweight", Dtype::I32)?, input_of(cx, "qzeros", Dtype::I32)?);
        let scales = float_input(cx, "scales")?;
        check_ndim(&qweight, 2, "[K/8, N]")?;
        let (words, columns, group) = (qweight.extent(0)?, qweight.extent(1)?, self.group_size.get());
        let rows = words * PER_WORD;
        if !columns.is_multiple_of(PER_WORD) {
            return Err(qweight.refuse(format!("the {columns} columns of qweight do not divide by 8")));
        }
        if !rows.is_multiple_of(group) {
            let message =
                format!("the {rows} rows of qweight ({words} words of 8) do not divide by the group_size {group}");
            return Err(PlanError::param("group_size", message)
                .hint("group_size is in the model's quantisation config; -1 there means all rows"));
        }
        let groups = rows / group;
        check_shape(&qzeros, &[groups, columns / PER_WORD], "[K/group_size, N/8]")?;
        check_shape(&scales, &[groups, columns], "[K/group_size, N]")?;
        Ok(Inputs { qweight, qzeros, scales, rows, columns, group })
    }

    /// Tiles that lie inside groups too large for one.
    fn parts_of_groups(&self, inputs: &Inputs) -> Result<Vec<TileGroup>> {
        let row_bytes = inputs.columns / 2 + inputs.row_bytes(self.dtype);
        let rows = (GROUP_BYTES / row_bytes / TOGETHER).max(1) * TOGETHER;
        let mut tiles = Vec::new();
        for group in 0..inputs.rows / inputs.group {
            let words = group * inputs.group / PER_WORD;
            let qweight = inputs.qweight.slice(0, words..words + inputs.group / PER_WORD)?;
            for run in runs(inputs.group, rows) {
                let (start, len) = (run.start / PER_WORD, run.len / PER_WORD);
                let own = qweight.slice(0, start..start + run.count * len)?.split(0, &[run.count, len])?;
                let tile = TileGroup::new(run.count, run.len * inputs.row_bytes(self.dtype)).window(&own)?;
                let tile = tile.shared(&inputs.qzeros.slice(0, group..group + 1)?)?;
                tiles.push(tile.shared(&inputs.scales.slice(0, group..group + 1)?)?);
            }
        }
        Ok(tiles)
    }

    /// Tiles of any rows, which see all groups.
    fn any_order(&self, cx: &Plan, inputs: &Inputs, g_idx: &Array) -> Result<Vec<TileGroup>> {
        if g_idx.dtype() != Dtype::I32 {
            return Err(g_idx.refuse(format!("g_idx must be I32, found {}", g_idx.dtype())));
        }
        check_shape(g_idx, &[inputs.rows], "an entry for each of K rows")?;
        let words = inputs.rows / PER_WORD;
        let g_idx = g_idx.split(0, &[words, PER_WORD])?;
        let shared = inputs.qzeros.len_bytes() + inputs.scales.len_bytes();
        let word_bytes = inputs.columns * 4 + PER_WORD * (4 + inputs.row_bytes(self.dtype));
        // Every tile reads what is shared: it should not be most of the work.
        let per_tile = (cx.tile_bytes().max(shared) / word_bytes).next_multiple_of(TOGETHER / PER_WORD).max(1);
        let per_tile = per_tile.min(words);
        let total = shared + per_tile * word_bytes;
        if total > weightmill_guest::abi::limits::TILE_BYTES {
            let message = format!("scales and qzeros of {shared} bytes are too large to be used in the order of g_idx");
            return Err(g_idx.refuse(message).hint("without act-order, leave g_idx out of the step's inputs"));
        }
        let mut tiles = Vec::new();
        for run in runs(words, per_tile) {
            let cut = |array: &Array| array.slice(0, run.range())?.split(0, &[run.count, run.len]);
            let tile = TileGroup::new(run.count, run.len * PER_WORD * inputs.row_bytes(self.dtype));
            let tile = tile.window(&cut(&inputs.qweight)?)?.window(&cut(&g_idx)?)?;
            tiles.push(tile.shared(&inputs.qzeros)?.shared(&inputs.scales)?);
        }
        Ok(tiles)
    }

    fn dequantize<S: Float, D: Float>(&self, tile: &mut Tile, columns: usize, groups: &[u32]) {
        let last = tile.inputs() - 1;
        let weights = Weights::<S> {
            words: tile.input(0),
            zeros: tile.input(last - 1),
            scales: tile.input(last),
            columns,
            v1: self.v1,
        };
        weights.dequantize::<D>(groups, tile.output());
    }
}

/// The groups of the rows from number `first` on, if there are such.
fn groups_of(g_idx: &[i32], groups: usize, first: u64) -> Result<Vec<u32>, DataError> {
    let group = |(row, &group): (usize, &i32)| match u32::try_from(group) {
        Ok(group) if (group as usize) < groups => Ok(group),
        _ => {
            let index = first + row as u64;
            let message = format!("group {group} at index {index} of g_idx, but there are {groups} groups");
            Err(DataError::at("g_idx", index, message).hint("check that g_idx belongs to the same layer"))
        }
    };
    g_idx.iter().enumerate().map(group).collect()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::kernels::{BF16, F16};
    use weightmill_guest::native::{Case, Refused, Tensor};

    /// Codes, zero points and scales as plain numbers.
    struct Matrix {
        rows: usize,
        columns: usize,
        group: usize,
        codes: Vec<u32>,
        zeros: Vec<u32>,
        scales: Vec<f32>,
    }

    impl Matrix {
        fn new(rows: usize, columns: usize, group: usize) -> Self {
            let some = |count: usize, seed: u32| -> Vec<u32> {
                (0..count as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) ^ seed) >> 11 & 15).collect()
            };
            let groups = rows / group * columns;
            Matrix {
                rows,
                columns,
                group,
                codes: some(rows * columns, 1),
                zeros: some(groups, 0x55_0000),
                scales: (0..groups).map(|i| 0.25 + i as f32 / 64.0).collect(),
            }
        }

        fn case(&self) -> Case {
            let (rows, columns, groups) = (self.rows, self.columns, self.rows / self.group);
            let mut words = vec![0_u32; rows / 8 * columns];
            for (i, code) in self.codes.iter().enumerate() {
                let (row, column) = (i / columns, i % columns);
                words[row / 8 * columns + column] |= code << (4 * (row % 8));
            }
            let mut zeros = vec![0_u32; groups * columns / 8];
            self.zeros.iter().enumerate().for_each(|(i, zero)| zeros[i / 8] |= zero << (4 * (i % 8)));
            let i32s = |words: &[u32]| words.iter().map(|&word| word as i32).collect::<Vec<_>>();
            Case::new()
                .param("bits", 4)
                .param("group_size", self.group as u64)
                .param("dtype", "F32")
                .input("qweight", Tensor::of(&[rows as u64 / 8, columns as u64], &i32s(&words)))
                .input("qzeros", Tensor::of(&[groups as u64, columns as u64 / 8], &i32s(&zeros)))
                .input("scales", Tensor::of(&[groups as u64, columns as u64], &self.scales))
        }

        fn expected(&self, group_of: impl Fn(usize) -> usize, plus: i32) -> Vec<f32> {
            let value = |(i, &code): (usize, &u32)| {
                let at = group_of(i / self.columns) * self.columns + i % self.columns;
                self.scales[at] * (code as i32 - (self.zeros[at] as i32 + plus)) as f32
            };
            self.codes.iter().enumerate().map(value).collect()
        }
    }

    #[test]
    fn every_shape_and_group_with_every_tile_size() {
        for (rows, columns, group) in [(8, 8, 8), (64, 24, 16), (64, 40, 64), (96, 8, 12), (48, 16, 3), (256, 72, 128)]
        {
            let matrix = Matrix::new(rows, columns, group);
            for (v1, plus) in [(true, 1), (false, 0)] {
                let expected = matrix.expected(|row| row / group, plus);
                for tile_bytes in [1, 3000, 1 << 20] {
                    let case = matrix.case().param("v1", v1).tile_bytes(tile_bytes);
                    let w = case.clone().run::<GptqDequantize>().unwrap()["w"].clone();
                    assert_eq!(w.shape, [rows as u64, columns as u64]);
                    assert!(w.numbers::<f32>() == expected, "{rows} {columns} {group} {v1} {tile_bytes}");
                    let half = case.param("dtype", "F16").run::<GptqDequantize>().unwrap()["w"].numbers::<u16>();
                    assert!(half == expected.iter().map(|&x| F16::encode(x)).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn groups_larger_than_a_tile_are_cut() {
        let matrix = Matrix::new(2 * 1024, 1024, 1024);
        let expected = matrix.expected(|row| row / 1024, 0);
        let expected: Vec<u16> = expected.iter().map(|&x| BF16::encode(x)).collect();
        // 1.5 MiB and 2.5 MiB a group with 16-bit results; 4.5 MiB with F32.
        let case = matrix.case().tile_bytes(1 << 16);
        let w = case.clone().param("dtype", "BF16").run::<GptqDequantize>().unwrap()["w"].numbers::<u16>();
        assert!(w == expected);
        let w = case.run::<GptqDequantize>().unwrap()["w"].numbers::<f32>();
        assert!(w.iter().map(|&x| BF16::encode(x)).eq(expected));
    }

    #[test]
    fn g_idx_gives_every_row_its_group() {
        let matrix = Matrix::new(64, 16, 16);
        for (name, group_of) in
            [("shuffled", &(|row: usize| row * 7 % 64 / 16) as &dyn Fn(usize) -> usize), ("plain", &|row| row / 16)]
        {
            let g_idx: Vec<i32> = (0..64).map(|row| group_of(row) as i32).collect();
            let case = matrix.case().input("g_idx", Tensor::of(&[64], &g_idx)).param("v1", true);
            for tile_bytes in [1, 2000, 1 << 20] {
                let w = case.clone().tile_bytes(tile_bytes).run::<GptqDequantize>().unwrap()["w"].numbers::<f32>();
                assert!(w == matrix.expected(group_of, 1), "{name} {tile_bytes}");
            }
        }
        let mut g_idx = vec![0; 64];
        (g_idx[41], g_idx[42]) = (4, -1);
        let case = matrix.case().input("g_idx", Tensor::of(&[64], &g_idx)).tile_bytes(1);
        let Refused::Data(error) = case.run::<GptqDequantize>().unwrap_err() else { panic!("the plan is fine") };
        assert_eq!(error.index, Some(41));
        assert_eq!(error.message, "group 4 at index 41 of g_idx, but there are 4 groups");
    }

    #[test]
    fn refusals_name_the_numbers() {
        let matrix = Matrix::new(64, 16, 16);
        let message = |case: Case| case.run::<GptqDequantize>().unwrap_err().message().to_string();
        assert_eq!(message(matrix.case().param("bits", 8)), "the parameter bits must be 4, found 8");
        assert_eq!(
            message(matrix.case().param("group_size", 24)),
            "the 64 rows of qweight (8 words of 8) do not divide by the group_size 24"
        );
        assert_eq!(
            message(matrix.case().param("group_size", 32)),
            "qzeros must be of shape [2, 2] ([K/group_size, N/8]), found [4, 2]"
        );
        assert_eq!(
            message(matrix.case().input("g_idx", Tensor::of(&[32], &[0_i32; 32]))),
            "g_idx must be of shape [64] (an entry for each of K rows), found [32]"
        );
    }
}
