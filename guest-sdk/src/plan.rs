//! What a transform sees while it plans: metadata only.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::cell::Cell;
use core::ops::Range;

use crate::abi::{PlanInput, Tp};
use crate::cut::Cut;
use crate::error::{PlanError, Result, separated};
use crate::outputs::Outputs;
use crate::view::Array;
use crate::wire::Request;

/// The context of a plan: inputs, tensor parallelism, the host's tile size.
///
/// It remembers which inputs were asked for, so that one that the transform
/// does not know is an error rather than ignored.
///
/// ```
/// use weightmill_guest::native::{Case, Tensor};
/// use weightmill_guest::prelude::*;
///
/// let case = Case::new().input("w", Tensor::of(&[2], &[1_u8, 2])).output("w").tp(1, 2);
/// case.with_plan(|cx| {
///     assert_eq!(cx.input("w")?.shape(), [2]);
///     assert_eq!((cx.tp().rank, cx.wants("w"), cx.wants("scale")), (1, true, false));
///     cx.outputs().view("w", cx.input("w")?)
/// })
/// .unwrap();
/// ```
#[derive(Debug)]
pub struct Plan<'a> {
    request: &'a Request,
    seen: Vec<Cell<bool>>,
}

impl<'a> Plan<'a> {
    /// The context of `request`.
    pub fn new(request: &'a Request) -> Self {
        Plan { request, seen: vec![Cell::new(false); request.inputs.len()] }
    }

    fn of_role(&self, role: &str) -> impl Iterator<Item = (usize, &'a PlanInput)> {
        let request = self.request;
        let inputs = request.inputs.iter().enumerate().filter(move |(_, input)| input.role == role);
        let found: Vec<_> = inputs.collect();
        found.iter().for_each(|(number, _)| self.seen[*number].set(true));
        found.into_iter()
    }

    fn array(number: usize, input: &PlanInput) -> Result<Array> {
        Array::input(number as u64, &input.role, input.dtype, &input.shape)
    }

    /// The input in `role`.
    ///
    /// # Errors
    /// If there is none, or a list.
    ///
    /// ```
    /// # use weightmill_guest::native::Case;
    /// let error = Case::new().with_plan(|cx| cx.input("w")).unwrap_err();
    /// assert_eq!(error.message(), "there is no input w");
    /// ```
    pub fn input(&self, role: &str) -> Result<Array> {
        self.optional(role)?.ok_or_else(|| self.no_input(role))
    }

    /// The input in `role`, if the recipe gives one.
    ///
    /// # Errors
    /// If it is a list.
    ///
    /// ```
    /// # use weightmill_guest::native::Case;
    /// assert_eq!(Case::new().with_plan(|cx| cx.optional("g_idx")).unwrap(), None);
    /// ```
    pub fn optional(&self, role: &str) -> Result<Option<Array>> {
        let mut found = self.of_role(role);
        let Some((number, input)) = found.next() else { return Ok(None) };
        match found.count() {
            0 => Self::array(number, input).map(Some),
            more => Err(PlanError::input(role, format!("expected one tensor in {role}, found a list of {}", more + 1))
                .hint("use a plain capture such as {e} instead of the list capture {*e}")),
        }
    }

    /// The inputs in `role`, in order.
    ///
    /// # Errors
    /// If there is none.
    ///
    /// ```
    /// # use weightmill_guest::native::{Case, Tensor};
    /// let expert = Tensor::of(&[2], &[1_u8, 2]);
    /// let case = Case::new().input("w1", expert.clone()).input("w1", expert);
    /// assert_eq!(case.with_plan(|cx| cx.list("w1")).unwrap().len(), 2);
    /// assert!(case.with_plan(|cx| cx.input("w1")).is_err());
    /// ```
    pub fn list(&self, role: &str) -> Result<Vec<Array>> {
        let arrays: Vec<Array> =
            self.of_role(role).map(|(number, input)| Self::array(number, input)).collect::<Result<_>>()?;
        if arrays.is_empty() { Err(self.no_input(role)) } else { Ok(arrays) }
    }

    fn no_input(&self, role: &str) -> PlanError {
        PlanError::input(role, format!("there is no input {role}")).hint(format!("add {role} to the step's inputs"))
    }

    /// Tensor parallel size and this rank: `{0, 1}` unless the transform says
    /// `uses_tp`.
    pub fn tp(&self) -> Tp {
        self.request.tp
    }

    /// Bytes that the host would like the windows of a tile to have together.
    pub fn tile_bytes(&self) -> u64 {
        self.request.tile_bytes
    }

    /// Whether the recipe asks for output `role`.
    pub fn wants(&self, role: &str) -> bool {
        self.request.outputs.iter().any(|output| output == role)
    }

    /// The outputs, empty as yet.
    pub fn outputs(&self) -> Outputs {
        Outputs::new(self.request.inputs.len())
    }

    /// A map over `units` pieces that can be computed alone, to be cut into
    /// tiles of the size that the host would like.
    pub fn cut(&self, units: u64) -> Cut {
        Cut::new(units, self.request.tile_bytes)
    }

    /// Refuses inputs that the transform never asked for, and requested
    /// outputs that it does not make.
    pub(crate) fn check(&self, outputs: &Outputs) -> Result<()> {
        if let Some(number) = self.seen.iter().position(|seen| !seen.get()) {
            let role = self.request.inputs[number].role.as_str();
            let mut known: Vec<&str> = Vec::new();
            for (input, seen) in self.request.inputs.iter().zip(&self.seen) {
                if seen.get() && !known.contains(&input.role.as_str()) {
                    known.push(&input.role);
                }
            }
            return Err(PlanError::input(role, format!("this transform takes no input {role} here"))
                .hint(format!("it uses {}", or_none(&known))));
        }
        match self.request.outputs.iter().find(|role| !outputs.has(role)) {
            Some(role) => Err(PlanError::input(role.as_str(), format!("this transform makes no output {role} here"))
                .hint(format!("it makes {}", or_none(&outputs.roles())))),
            None => Ok(()),
        }
    }
}

fn or_none(names: &[&str]) -> String {
    if names.is_empty() { "none".into() } else { separated(names, ", ") }
}

impl Tp {
    /// This rank's equal share of `extent` entries.
    ///
    /// # Errors
    /// If they do not divide by the tensor parallel size.
    ///
    /// ```
    /// use weightmill_guest::prelude::*;
    ///
    /// let tp = Tp { rank: 1, size: 2 };
    /// assert_eq!(tp.range(12, "query heads")?, 6..12);
    /// let error = tp.range(7, "query heads").unwrap_err();
    /// assert_eq!(error.message(), "7 query heads do not divide by the tp size 2");
    /// # Ok::<(), PlanError>(())
    /// ```
    pub fn range(self, extent: u64, what: &str) -> Result<Range<u64>> {
        if !extent.is_multiple_of(self.size) {
            return Err(PlanError::tp(format!("{extent} {what} do not divide by the tp size {}", self.size))
                .hint(format!("use a tp size that divides {extent}, or set tp = false on the step")));
        }
        let share = extent / self.size;
        Ok(self.rank * share..(self.rank + 1) * share)
    }
}
