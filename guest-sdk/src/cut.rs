//! Tile groups, and the cutting of a map into them.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use crate::abi::{TileGroup, limits};
use crate::error::{PlanError, Result};
use crate::view::Array;

/// Tiles end on the boundaries of what the host hashes, where they can.
const LEAF_BYTES: u64 = 16_384;

impl TileGroup {
    /// `count` tiles of `len` output bytes each.
    ///
    /// ```
    /// use weightmill_guest::prelude::*;
    ///
    /// // Each of 4 tiles reads 2 of 8 rows, and all of `scale`.
    /// let w = Array::input(0, "w", Dtype::F32, &[8, 6])?;
    /// let scale = Array::input(1, "scale", Dtype::F32, &[1])?;
    /// let group = TileGroup::new(4, 24).window(&w.split(0, &[4, 2])?)?.shared(&scale)?;
    /// assert_eq!(group.inputs.len(), 2);
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn new(count: u64, len: u64) -> Self {
        TileGroup { count, len, inputs: Vec::new(), args: Vec::new() }
    }

    /// A further input window: tile `i` of the group gets entry `i` of the
    /// array's first dimension.
    ///
    /// # Errors
    /// If that dimension does not have an entry a tile, or the entries are not
    /// laid out alike.
    pub fn window(mut self, array: &Array) -> Result<Self> {
        if array.shape().first() != Some(&self.count) {
            return Err(array.refuse(format!(
                "a window of {} of shape {:?} does not have an entry for each of {} tiles",
                array.role(),
                array.shape(),
                self.count
            )));
        }
        self.inputs.push(array.window_parts()?);
        Ok(self)
    }

    /// A further input window, in which every tile gets the whole array.
    ///
    /// # Errors
    /// If the array has no parts.
    pub fn shared(self, array: &Array) -> Result<Self> {
        let count = self.count;
        self.window(&array.broadcast(0, count)?)
    }

    /// Integers for `run`.
    #[must_use]
    pub fn args(mut self, args: &[i64]) -> Self {
        self.args = args.to_vec();
        self
    }
}

#[derive(Clone, Debug)]
enum Window {
    /// `[units, …]`: a tile gets those of its own units.
    PerUnit(Array),
    /// Every tile gets all of it.
    Shared(Array),
}

#[derive(Clone, Copy, Debug)]
enum Writes {
    PerUnit(u64),
    PerTile(u64),
}

/// A map over units that can be computed alone (elements, rows, blocks), on
/// its way to tiles.
///
/// Tiles are as large as the host would like all windows of one to be
/// together, end on 16,384-byte boundaries of the output where they can, and
/// are all equal but for a last, shorter one.
///
/// ```
/// # use weightmill_guest::native::{Case, Tensor};
/// use weightmill_guest::prelude::*;
///
/// # let case = Case::new().input("w", Tensor::counting(Dtype::F32, &[1000, 1000], 0));
/// # case.with_plan(|cx| {
/// // F32 to BF16: a unit is an element, of 4 bytes to read and 2 to write.
/// let w = cx.input("w")?;
/// let groups = cx.cut(w.elements()).reads(&w)?.writes(2).groups()?;
/// assert_eq!((groups[0].count, groups[0].len), (5, 344_064));
/// assert_eq!((groups[1].count, groups[1].len), (1, 279_680));
/// # Ok::<(), PlanError>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Cut {
    units: u64,
    tile_bytes: u64,
    windows: Vec<Window>,
    writes: Writes,
    args: Vec<i64>,
}

impl Cut {
    pub(crate) fn new(units: u64, tile_bytes: u64) -> Self {
        Cut { units, tile_bytes, windows: Vec::new(), writes: Writes::PerUnit(0), args: Vec::new() }
    }

    /// A further input window: each unit reads its equal share of `array`, in
    /// row-major order.
    ///
    /// # Errors
    /// If the elements do not divide by the units.
    ///
    /// ```
    /// # use weightmill_guest::native::{Case, Tensor};
    /// use weightmill_guest::prelude::*;
    ///
    /// # let case = Case::new().input("w", Tensor::counting(Dtype::F32, &[8, 4], 0)).tile_bytes(64);
    /// # case.with_plan(|cx| {
    /// // A unit is a row; each writes a half.
    /// let w = cx.input("w")?;
    /// assert_eq!(cx.cut(8).reads(&w)?.writes(2).units_per_tile(), 3);
    /// assert!(cx.cut(5).reads(&w).is_err());
    /// # Ok::<(), PlanError>(())
    /// # }).unwrap();
    /// ```
    pub fn reads(mut self, array: &Array) -> Result<Self> {
        let elements = array.elements();
        if self.units == 0 || !elements.is_multiple_of(self.units) {
            if elements == 0 && self.units == 0 {
                return Ok(self);
            }
            return Err(array.refuse(format!(
                "the {elements} elements of {} do not divide by {} units",
                array.role(),
                self.units
            )));
        }
        self.windows.push(Window::PerUnit(array.reshape(&[self.units, elements / self.units])?));
        Ok(self)
    }

    /// A further input window, in which every tile gets the whole array.
    #[must_use]
    pub fn shared(mut self, array: &Array) -> Self {
        self.windows.push(Window::Shared(array.clone()));
        self
    }

    /// Each unit writes `bytes`.
    #[must_use]
    pub fn writes(mut self, bytes: u64) -> Self {
        self.writes = Writes::PerUnit(bytes);
        self
    }

    /// Each tile writes `bytes`, however many units it reads: a partial sum
    /// or maximum. [`tiles`](Self::tiles) is how many there are.
    ///
    /// ```
    /// # use weightmill_guest::native::{Case, Tensor};
    /// use weightmill_guest::prelude::*;
    ///
    /// # let case = Case::new().input("w", Tensor::counting(Dtype::F32, &[8, 4], 0)).tile_bytes(64);
    /// # case.with_plan(|cx| {
    /// let cut = cx.cut(8).reads(&cx.input("w")?)?.writes_per_tile(4).args(&[7]);
    /// let groups = cut.groups()?;
    /// assert_eq!((cut.tiles(), groups[0].count, groups[0].len, groups[1].len), (3, 2, 4, 4));
    /// # Ok::<(), PlanError>(())
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn writes_per_tile(mut self, bytes: u64) -> Self {
        self.writes = Writes::PerTile(bytes);
        self
    }

    /// Integers for `run`, the same for every tile.
    #[must_use]
    pub fn args(mut self, args: &[i64]) -> Self {
        self.args = args.to_vec();
        self
    }

    /// How many units each tile takes, but for a shorter last one.
    pub fn units_per_tile(&self) -> u64 {
        let (mut per_unit, mut fixed) = (0_u64, 0_u64);
        for window in &self.windows {
            match window {
                Window::PerUnit(array) => per_unit += array.len_bytes() / self.units.max(1),
                Window::Shared(array) => fixed += array.len_bytes(),
            }
        }
        let (out_per_unit, out_per_tile) = match self.writes {
            Writes::PerUnit(bytes) => (bytes, 0),
            Writes::PerTile(bytes) => (0, bytes),
        };
        let budget = self.tile_bytes.saturating_sub(fixed.saturating_add(out_per_tile)).max(self.tile_bytes / 4);
        let fit = budget / per_unit.saturating_add(out_per_unit).max(1);
        let step = if out_per_unit == 0 { 1 } else { LEAF_BYTES / gcd(LEAF_BYTES, out_per_unit) };
        let units = if fit >= step { fit / step * step } else { fit };
        units.clamp(1, self.units.max(1))
    }

    /// How many tiles there are.
    pub fn tiles(&self) -> u64 {
        self.units.div_ceil(self.units_per_tile())
    }

    /// The tiles; none where units write nothing.
    ///
    /// # Errors
    /// If a single unit is too large for a tile, or the windows of the tiles
    /// are not laid out alike.
    pub fn groups(&self) -> Result<Vec<TileGroup>> {
        let mut groups = Vec::new();
        if matches!(self.writes, Writes::PerUnit(0)) {
            return Ok(groups);
        }
        let units = self.units_per_tile();
        let whole = self.units / units;
        if whole > 0 {
            groups.push(self.group(0, whole, units)?);
        }
        if !self.units.is_multiple_of(units) {
            groups.push(self.group(whole * units, 1, self.units % units)?);
        }
        Ok(groups)
    }

    fn group(&self, first: u64, count: u64, units: u64) -> Result<TileGroup> {
        let len = match self.writes {
            Writes::PerUnit(bytes) => units.saturating_mul(bytes),
            Writes::PerTile(bytes) => bytes,
        };
        let mut window_bytes = len;
        let mut group = TileGroup::new(count, len).args(&self.args);
        for window in &self.windows {
            group = match window {
                Window::PerUnit(array) => {
                    let own = array.slice(0, first..first + count * units)?.split(0, &[count, units])?;
                    window_bytes = window_bytes.saturating_add(own.len_bytes() / count);
                    group.window(&own)?
                }
                Window::Shared(array) => {
                    window_bytes = window_bytes.saturating_add(array.len_bytes());
                    group.shared(array)?
                }
            };
        }
        if window_bytes > limits::TILE_BYTES {
            let role = self.windows.first().map_or("", |window| match window {
                Window::PerUnit(array) | Window::Shared(array) => array.role(),
            });
            return Err(PlanError::input(
                role,
                format!("a tile would need {window_bytes} bytes of windows, more than {}", limits::TILE_BYTES),
            ));
        }
        Ok(group)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl From<TileGroup> for Vec<TileGroup> {
    fn from(group: TileGroup) -> Self {
        vec![group]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Dtype, Part};

    fn w(rows: u64, row: u64) -> Array {
        Array::input(0, "w", Dtype::BF16, &[rows, row]).unwrap()
    }

    #[test]
    fn tiles_end_on_leaves_where_they_can() {
        for (rows, row, tile_bytes) in [(4096, 4096, 1 << 20), (7, 3, 1 << 20), (1000, 16_384, 65_536), (5, 9, 16)] {
            let cut = Cut::new(rows, tile_bytes).reads(&w(rows, row)).unwrap().writes(row);
            let groups = cut.groups().unwrap();
            let total: u64 = groups.iter().map(|g| g.count * g.len).sum();
            assert_eq!(total, rows * row);
            assert_eq!(groups.iter().map(|g| g.count).sum::<u64>(), cut.tiles());
            let per_leaf = LEAF_BYTES / gcd(LEAF_BYTES, row);
            if per_leaf * row * 3 <= tile_bytes && rows >= per_leaf {
                assert_eq!(groups[0].len % LEAF_BYTES, 0);
            }
        }
    }

    #[test]
    fn a_window_moves_on_with_its_tile_and_a_shared_one_stays() {
        let scale = Array::input(1, "scale", Dtype::F32, &[3]).unwrap();
        let cut = Cut::new(10, 40).reads(&w(10, 4)).unwrap().shared(&scale).writes(2);
        let groups = cut.groups().unwrap();
        assert_eq!(groups[0].inputs[0], [Part::Copy { copy: 0, offset: 0, len: 16, strides: vec![16] }]);
        assert_eq!(groups[0].inputs[1], [Part::Copy { copy: 1, offset: 0, len: 12, strides: vec![] }]);
        assert_eq!((groups[0].count, groups[0].len), (5, 4));
        assert_eq!(groups.len(), 1);
        let cut = Cut::new(10, 40).reads(&w(10, 4)).unwrap().shared(&scale).writes_per_tile(4);
        let rest = &cut.groups().unwrap()[1];
        assert_eq!(rest.inputs[0], [Part::Copy { copy: 0, offset: 72, len: 8, strides: vec![] }]);
    }

    #[test]
    fn nothing_to_do_is_no_tile() {
        let empty = Array::input(0, "w", Dtype::F32, &[0, 4]).unwrap();
        assert_eq!(Cut::new(0, 64).reads(&empty).unwrap().writes(4).groups().unwrap(), []);
    }

    #[test]
    fn uneven_windows_and_huge_units_are_refused() {
        let both = Array::concat(0, &[w(3, 4), w(5, 4)]).unwrap();
        let error = Cut::new(8, 16).reads(&both).unwrap().writes(4).groups().unwrap_err();
        assert!(error.message().contains("differently laid out"), "{error}");
        let error = Cut::new(1, 64).reads(&w(1, 64 << 20)).unwrap().writes(4).groups().unwrap_err();
        assert!(error.message().contains("more than 67108864"), "{error}");
    }
}
