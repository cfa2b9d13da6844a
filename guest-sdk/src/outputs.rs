//! What a plan makes.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::abi::{Dtype, Part, PlanAnswer, PlanOutput, Scratch, TileGroup};
use crate::error::{PlanError, Result};
use crate::view::Array;

/// Source numbers of outputs and scratch tensors depend on how many outputs
/// there are, which is known at the end only; until then they stand above
/// these, beyond any real source number.
const FIRST_OUTPUT: u64 = 1 << 60;
const FIRST_SCRATCH: u64 = 1 << 61;

/// The outputs of a plan, in the order in which they are added.
///
/// ```
/// # use weightmill_guest::native::{Case, Tensor};
/// use weightmill_guest::prelude::*;
///
/// # let case = Case::new().input("w", Tensor::counting(Dtype::F32, &[8, 16], 0));
/// # case.with_plan(|cx| {
/// // Two passes: tiles that write partial maxima, then tiles that read them.
/// let w = cx.input("w")?;
/// let pass = cx.cut(8).reads(&w)?.writes_per_tile(4);
/// let mut outputs = cx.outputs();
/// let amax = outputs.scratch(Dtype::F32, &[pass.tiles()], pass.groups()?)?;
/// let outputs = outputs.tiles("w", Dtype::F32, w.shape(), cx.cut(8).reads(&w)?.shared(&amax).writes(64).groups()?)?;
/// # let _ = outputs;
/// # Ok::<(), PlanError>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Outputs {
    inputs: u64,
    outputs: Vec<PlanOutput>,
    scratch: Vec<Scratch>,
}

impl Outputs {
    pub(crate) fn new(inputs: usize) -> Self {
        Outputs { inputs: inputs as u64, outputs: Vec::new(), scratch: Vec::new() }
    }

    /// Adds an output that is `array`: bytes moved, by the host.
    ///
    /// # Errors
    /// If the array has no parts, or reads anything but inputs.
    ///
    /// ```
    /// # use weightmill_guest::native::{Case, Tensor};
    /// use weightmill_guest::prelude::*;
    ///
    /// # let case = Case::new().input("w", Tensor::counting(Dtype::F32, &[8, 4], 0)).tile_bytes(64);
    /// # case.with_plan(|cx| {
    /// let outputs = cx.outputs().view("top", cx.input("w")?.slice(0, ..2)?)?;
    /// assert!(outputs.view("top", cx.input("w")?).is_err());
    /// # Ok::<(), PlanError>(())
    /// # }).unwrap();
    /// ```
    pub fn view(mut self, role: &str, array: Array) -> Result<Self> {
        let parts = array.parts()?;
        if !reads_below(&parts, self.inputs) {
            return Err(PlanError::input(role, format!("the view {role} may read inputs only")));
        }
        self.add(role, array.dtype(), array.shape(), Some(parts), None)?;
        Ok(self)
    }

    /// Adds an output that `run` computes.
    ///
    /// # Errors
    /// If the tiles together are not as long as the tensor.
    ///
    /// ```
    /// # use weightmill_guest::native::{Case, Tensor};
    /// use weightmill_guest::prelude::*;
    ///
    /// # let case = Case::new().input("w", Tensor::counting(Dtype::F32, &[8, 4], 0)).tile_bytes(64);
    /// # case.with_plan(|cx| {
    /// let w = cx.input("w")?;
    /// let halves = cx.cut(w.elements()).reads(&w)?.writes(2).groups()?;
    /// assert!(cx.outputs().tiles("w", Dtype::BF16, w.shape(), halves.clone()).is_ok());
    /// assert!(cx.outputs().tiles("w", Dtype::F32, w.shape(), halves).is_err());
    /// # Ok::<(), PlanError>(())
    /// # }).unwrap();
    /// ```
    pub fn tiles(mut self, role: &str, dtype: Dtype, shape: &[u64], groups: impl Into<Vec<TileGroup>>) -> Result<Self> {
        let groups = groups.into();
        check_len(role, dtype, shape, &groups)?;
        self.add(role, dtype, shape, None, Some(groups))?;
        Ok(self)
    }

    fn add(
        &mut self,
        role: &str,
        dtype: Dtype,
        shape: &[u64],
        view: Option<Vec<Part>>,
        tiles: Option<Vec<TileGroup>>,
    ) -> Result<()> {
        if self.has(role) {
            return Err(PlanError::input(role, format!("the output {role} is made twice")));
        }
        self.outputs.push(PlanOutput { role: role.into(), dtype, shape: shape.to_vec(), view, tiles });
        Ok(())
    }

    /// Adds a tensor that stays inside the plan, and gives it for tiles to read.
    ///
    /// # Errors
    /// If the tiles together are not as long as the tensor.
    pub fn scratch(&mut self, dtype: Dtype, shape: &[u64], groups: impl Into<Vec<TileGroup>>) -> Result<Array> {
        let (groups, number) = (groups.into(), self.scratch.len() as u64);
        check_len("scratch", dtype, shape, &groups)?;
        self.scratch.push(Scratch { dtype, shape: shape.to_vec(), tiles: groups });
        Array::input(FIRST_SCRATCH + number, "scratch", dtype, shape)
    }

    /// An output that was added before, for later tiles to read.
    ///
    /// # Errors
    /// If there is none in that role.
    ///
    /// ```
    /// # use weightmill_guest::native::{Case, Tensor};
    /// use weightmill_guest::prelude::*;
    ///
    /// # let case = Case::new().input("w", Tensor::counting(Dtype::F32, &[8, 4], 0)).tile_bytes(64);
    /// # case.with_plan(|cx| {
    /// let w = cx.input("w")?;
    /// let outputs = cx.outputs().tiles("sum", Dtype::F32, &[1], TileGroup::new(1, 4).shared(&w)?)?;
    /// assert_eq!(outputs.array("sum")?.shape(), [1]);
    /// assert!(outputs.array("total").is_err());
    /// # Ok::<(), PlanError>(())
    /// # }).unwrap();
    /// ```
    pub fn array(&self, role: &str) -> Result<Array> {
        match self.outputs.iter().position(|output| output.role == role) {
            Some(number) => {
                let output = &self.outputs[number];
                Array::input(FIRST_OUTPUT + number as u64, role, output.dtype, &output.shape)
            }
            None => Err(PlanError::input(role, format!("the output {role} is read before it is made"))),
        }
    }

    pub(crate) fn has(&self, role: &str) -> bool {
        self.outputs.iter().any(|output| output.role == role)
    }

    pub(crate) fn roles(&self) -> Vec<&str> {
        self.outputs.iter().map(|output| output.role.as_str()).collect()
    }

    /// The answer, with the source numbers that the host knows.
    pub(crate) fn finish(mut self) -> PlanAnswer {
        let (first_output, first_scratch) = (self.inputs, self.inputs + self.outputs.len() as u64);
        let groups = self.outputs.iter_mut().filter_map(|output| output.tiles.as_mut());
        let groups = groups.chain(self.scratch.iter_mut().map(|scratch| &mut scratch.tiles)).flatten();
        for parts in groups.flat_map(|group| group.inputs.iter_mut()) {
            renumber(parts, &|source| match source {
                FIRST_SCRATCH.. => source - FIRST_SCRATCH + first_scratch,
                FIRST_OUTPUT.. => source - FIRST_OUTPUT + first_output,
                _ => source,
            });
        }
        PlanAnswer::Plan { outputs: self.outputs, scratch: self.scratch }
    }
}

fn check_len(role: &str, dtype: Dtype, shape: &[u64], groups: &[TileGroup]) -> Result<()> {
    let tiles = groups.iter().try_fold(0_u64, |all, group| all.checked_add(group.count.checked_mul(group.len)?));
    if tiles.is_some() && tiles == dtype.tensor_bytes(shape) {
        return Ok(());
    }
    let shown = |bytes: Option<u64>| bytes.map_or_else(|| String::from("no valid number of"), |n| format!("{n}"));
    Err(PlanError::input(
        role,
        format!(
            "the tiles of {role} are {} bytes together, but {dtype} {shape:?} is {}",
            shown(tiles),
            shown(dtype.tensor_bytes(shape))
        ),
    ))
}

fn reads_below(parts: &[Part], sources: u64) -> bool {
    parts.iter().all(|part| match part {
        Part::Copy { copy, .. } => *copy < sources,
        Part::Fill { .. } => true,
        Part::Repeat { parts, .. } => reads_below(parts, sources),
    })
}

fn renumber(parts: &mut [Part], number: &impl Fn(u64) -> u64) {
    for part in parts {
        match part {
            Part::Copy { copy, .. } => *copy = number(*copy),
            Part::Fill { .. } => {}
            Part::Repeat { parts, .. } => renumber(parts, number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_and_scratch_are_numbered_after_the_inputs() {
        let mut outputs = Outputs::new(3);
        let amax = outputs.scratch(Dtype::F32, &[1], TileGroup::new(1, 4)).unwrap();
        let outputs = outputs.tiles("scale", Dtype::F32, &[1], TileGroup::new(1, 4).shared(&amax).unwrap()).unwrap();
        let scale = outputs.array("scale").unwrap();
        let group = TileGroup::new(1, 4).shared(&scale).unwrap();
        let PlanAnswer::Plan { outputs, .. } = outputs.tiles("w", Dtype::F32, &[1], group).unwrap().finish() else {
            panic!("it plans")
        };
        let source = |output: &PlanOutput| match output.tiles.as_ref().unwrap()[0].inputs[0][0] {
            Part::Copy { copy, .. } => copy,
            _ => panic!("a copy"),
        };
        assert_eq!((source(&outputs[0]), source(&outputs[1])), (5, 3));
    }

    #[test]
    fn what_the_host_would_refuse_is_refused_with_numbers() {
        let error = Outputs::new(0).tiles("w", Dtype::F32, &[2], TileGroup::new(3, 4)).unwrap_err();
        assert_eq!(error.message(), "the tiles of w are 12 bytes together, but F32 [2] is 8");
        let mut outputs = Outputs::new(1);
        let scratch = outputs.scratch(Dtype::F32, &[1], TileGroup::new(1, 4)).unwrap();
        assert!(outputs.view("w", scratch).is_err());
        let w = Array::input(0, "w", Dtype::F32, &[2]).unwrap();
        let error = Outputs::new(1).view("w", w.clone()).unwrap().view("w", w).unwrap_err();
        assert_eq!(error.message(), "the output w is made twice");
    }
}
