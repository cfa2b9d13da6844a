use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use serde_json::{Map, Value};

use super::{Tensor, Window, gather, plan, run, to_guest};
use crate::abi::{
    ABI_VERSION, Part, PlanAnswer, PlanErrorBody, PlanInput, PlanOutput, PlanRequest, RunBlock, RunError, TileGroup, Tp,
};
use crate::module::Transform;
use crate::plan::Plan;
use crate::tile::Tile;

/// Why a case has no outputs.
///
/// ```
/// use weightmill_guest::native::{Case, Refused};
/// use weightmill_guest::prelude::*;
///
/// #[transform(name = "never", version = "1.0.0")]
/// struct Never;
/// impl Transform for Never {
///     fn plan(&self, _: &Plan) -> Result<Outputs> {
///         Err(PlanError::tp("no").hint("never"))
///     }
/// }
/// let refused = Case::new().run::<Never>().unwrap_err();
/// assert!(matches!(refused, Refused::Plan(_)));
/// assert_eq!((refused.message(), refused.hint()), ("no", "never"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The transform does not plan.
    Plan(PlanErrorBody),
    /// A tile cannot be computed.
    Data(RunError),
}

impl Refused {
    /// What was expected and what was found.
    pub fn message(&self) -> &str {
        match self {
            Refused::Plan(error) => &error.message,
            Refused::Data(error) => &error.message,
        }
    }

    /// What to do.
    pub fn hint(&self) -> &str {
        let hint = match self {
            Refused::Plan(error) => &error.hint,
            Refused::Data(error) => &error.hint,
        };
        hint.as_deref().unwrap_or("")
    }
}

/// One use of a transform: parameters, tensor parallelism, inputs.
///
/// ```
/// use weightmill_guest::native::{Case, Tensor};
/// use weightmill_guest::prelude::*;
///
/// #[transform(name = "first", version = "1.0.0", summary = "the first rows")]
/// struct First {
///     rows: u64,
/// }
/// impl Transform for First {
///     fn plan(&self, cx: &Plan) -> Result<Outputs> {
///         cx.outputs().view("w", cx.input("w")?.slice(0, ..self.rows)?)
///     }
/// }
/// let case = Case::new().param("rows", 2).input("w", Tensor::of(&[3], &[7_u8, 8, 9]));
/// assert_eq!(case.run::<First>().unwrap()["w"].bytes, [7, 8]);
/// let refused = case.param("rows", 4).run::<First>().unwrap_err();
/// assert_eq!(refused.message(), "0..4 is not a range of dimension 0 of w, which has 3 entries");
/// ```
#[derive(Clone, Debug)]
pub struct Case {
    params: Map<String, Value>,
    tp: Tp,
    tile_bytes: u64,
    inputs: BTreeMap<String, Vec<Tensor>>,
    outputs: Vec<String>,
}

impl Default for Case {
    fn default() -> Self {
        Case::new()
    }
}

impl Case {
    /// No parameters, no tensor parallelism, no inputs.
    pub fn new() -> Self {
        Case { params: Map::new(), tp: Tp::ONE, tile_bytes: 1 << 20, inputs: BTreeMap::new(), outputs: Vec::new() }
    }

    /// With a parameter.
    #[must_use]
    pub fn param(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.params.insert(name.into(), value.into());
        self
    }

    /// As rank `rank` of `size`.
    #[must_use]
    pub fn tp(mut self, rank: u64, size: u64) -> Self {
        self.tp = Tp { rank, size };
        self
    }

    /// With another tile size.
    #[must_use]
    pub fn tile_bytes(mut self, tile_bytes: u64) -> Self {
        self.tile_bytes = tile_bytes;
        self
    }

    /// With a further input; several in one role are a list.
    #[must_use]
    pub fn input(mut self, role: &str, tensor: Tensor) -> Self {
        self.inputs.entry(role.into()).or_default().push(tensor);
        self
    }

    /// Asking for output `role`; every output is made anyway.
    #[must_use]
    pub fn output(mut self, role: &str) -> Self {
        self.outputs.push(role.into());
        self.outputs.sort();
        self
    }

    /// The request that the host would send.
    pub fn request(&self) -> PlanRequest {
        let each = |(role, tensors): (&String, &Vec<Tensor>)| {
            let role = role.clone();
            let input = move |(index, tensor): (usize, &Tensor)| PlanInput {
                dtype: tensor.dtype,
                index: index as u64,
                role: role.clone(),
                shape: tensor.shape.clone(),
            };
            tensors.iter().enumerate().map(input).collect::<Vec<_>>()
        };
        PlanRequest {
            abi: ABI_VERSION,
            inputs: self.inputs.iter().flat_map(each).collect(),
            outputs: self.outputs.clone(),
            params: Value::Object(self.params.clone()),
            tile_bytes: self.tile_bytes,
            tp: self.tp,
        }
    }

    /// Calls `f` with what a transform would see in `plan`.
    ///
    /// # Panics
    /// If the parameters hold a number that JSON does not have.
    ///
    /// ```
    /// use weightmill_guest::native::Case;
    ///
    /// assert_eq!(Case::new().tile_bytes(4096).with_plan(|cx| cx.tile_bytes()), 4096);
    /// ```
    pub fn with_plan<R>(&self, f: impl FnOnce(&Plan) -> R) -> R {
        f(&Plan::new(&to_guest(&self.request())))
    }

    /// The parts of a view.
    ///
    /// # Errors
    /// If the transform does not plan.
    ///
    /// # Panics
    /// If there is no view in that role.
    ///
    /// ```
    /// use weightmill_guest::abi::Part;
    /// use weightmill_guest::native::{Case, Tensor};
    /// use weightmill_guest::prelude::*;
    ///
    /// #[transform(name = "same", version = "1.0.0")]
    /// struct Same;
    /// impl Transform for Same {
    ///     fn plan(&self, cx: &Plan) -> Result<Outputs> {
    ///         cx.outputs().view("w", cx.input("w")?)
    ///     }
    /// }
    /// let view = Case::new().input("w", Tensor::of(&[3], &[7_u8, 8, 9])).view::<Same>("w").unwrap();
    /// assert_eq!(view, [Part::Copy { copy: 0, offset: 0, len: 3, strides: vec![] }]);
    /// ```
    pub fn view<T: Transform>(&self, role: &str) -> Result<Vec<Part>, PlanErrorBody> {
        match plan::<T>(&self.request()) {
            PlanAnswer::Error { error } => Err(error),
            PlanAnswer::Plan { outputs, .. } => {
                let output = outputs.into_iter().find(|output| output.role == role);
                let view = output.and_then(|output| output.view);
                Ok(view.unwrap_or_else(|| panic!("{role} is no view of the plan")))
            }
        }
    }

    /// All outputs.
    ///
    /// # Errors
    /// If the transform does not plan, or refuses the data.
    ///
    /// # Panics
    /// If the plan does not describe its outputs exactly: the author's mistake.
    pub fn run<T: Transform>(&self) -> Result<BTreeMap<String, Tensor>, Refused> {
        let request = self.request();
        let (outputs, scratch) = match plan::<T>(&request) {
            PlanAnswer::Error { error } => return Err(Refused::Plan(error)),
            PlanAnswer::Plan { outputs, scratch } => (outputs, scratch),
        };
        let inputs = request.inputs.len();
        let mut made: Vec<Option<Vec<u8>>> = self.inputs.values().flatten().map(|t| Some(t.bytes.clone())).collect();
        made.resize(inputs + outputs.len() + scratch.len(), None);
        let tensors: Vec<PlanOutput> = outputs
            .iter()
            .cloned()
            .chain(scratch.into_iter().map(|s| PlanOutput {
                role: String::from("scratch"),
                dtype: s.dtype,
                shape: s.shape,
                view: None,
                tiles: Some(s.tiles),
            }))
            .collect();
        while made.contains(&None) {
            let before = made.iter().flatten().count();
            for (target, tensor) in tensors.iter().enumerate() {
                if made[inputs + target].is_none() && reads(tensor).iter().all(|&source| made[source].is_some()) {
                    let bytes = make::<T>(&request.params, target, tensor, &made).map_err(Refused::Data)?;
                    assert_eq!(tensor.dtype.tensor_bytes(&tensor.shape), Some(bytes.len() as u64), "{}", tensor.role);
                    made[inputs + target] = Some(bytes);
                }
            }
            assert!(made.iter().flatten().count() > before, "the plan's tensors read each other in a circle");
        }
        let bytes = made.into_iter().skip(inputs).flatten();
        Ok(outputs.into_iter().zip(bytes).map(|(o, b)| (o.role, Tensor::new(o.dtype, &o.shape, b))).collect())
    }
}

fn make<T: Transform>(
    params: &Value,
    target: usize,
    tensor: &PlanOutput,
    sources: &[Option<Vec<u8>>],
) -> Result<Vec<u8>, RunError> {
    let mut bytes = Vec::new();
    if let Some(view) = &tensor.view {
        gather(view, sources, &mut Vec::new(), &mut bytes);
        return Ok(bytes);
    }
    let mut position = 0;
    for (group, TileGroup { count, len, inputs, args }) in tensor.tiles.iter().flatten().enumerate() {
        for turn in 0..*count {
            let windows: Vec<Window> = inputs
                .iter()
                .map(|parts| {
                    let mut window = Vec::new();
                    gather(parts, sources, &mut vec![turn], &mut window);
                    Window::of(&window)
                })
                .collect();
            let block = RunBlock {
                target: target as u32,
                group: group as u32,
                turn: turn as u32,
                tile: position,
                offset: bytes.len() as u64,
                ..RunBlock::default()
            };
            let mut out = Window::zeroed(*len as usize);
            let inputs = windows.iter().map(Window::bytes).collect();
            run::<T>(params, &mut Tile::new(block, inputs, args, out.bytes_mut()))?;
            bytes.extend_from_slice(out.bytes());
            position += 1;
        }
    }
    Ok(bytes)
}

fn reads(tensor: &PlanOutput) -> Vec<usize> {
    fn collect(parts: &[Part], sources: &mut Vec<usize>) {
        for part in parts {
            match part {
                Part::Copy { copy, .. } => sources.push(*copy as usize),
                Part::Fill { .. } => {}
                Part::Repeat { parts, .. } => collect(parts, sources),
            }
        }
    }
    let mut sources = Vec::new();
    collect(tensor.view.as_deref().unwrap_or(&[]), &mut sources);
    for group in tensor.tiles.iter().flatten() {
        group.inputs.iter().for_each(|parts| collect(parts, &mut sources));
    }
    sources
}
