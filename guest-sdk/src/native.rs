//! Running a transform without a sandbox: for its tests, and for measuring
//! what the sandbox costs.
//!
//! [`Case`] is a whole small host: it plans, gathers windows, runs tiles in
//! the order of what they read, and gives the outputs' bytes. It is written
//! for clarity, not for speed; hosts have an executor of their own.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use serde_json::{Map, Value};

use crate::abi::{
    ABI_VERSION, ALIGN, Dtype, Part, PlanAnswer, PlanErrorBody, PlanInput, PlanOutput, PlanRequest, RunBlock, RunError,
    TileGroup, Tp,
};
use crate::json;
use crate::module::{self, Transform};
use crate::plan::Plan;
use crate::pod::{self, Pod};
use crate::tile::Tile;
use crate::wire;

/// Answers a plan request.
///
/// ```
/// use weightmill_guest::abi::{PlanAnswer, PlanRequest, Tp};
/// use weightmill_guest::prelude::*;
///
/// #[transform(name = "nothing", version = "1.0.0")]
/// struct Nothing;
/// impl Transform for Nothing {
///     fn plan(&self, cx: &Plan) -> Result<Outputs> {
///         Ok(cx.outputs())
///     }
/// }
/// let request = PlanRequest {
///     abi: 1,
///     inputs: vec![],
///     outputs: vec!["w".into()],
///     params: serde_json::json!({}),
///     tile_bytes: 1 << 20,
///     tp: Tp::ONE,
/// };
/// assert!(matches!(weightmill_guest::native::plan::<Nothing>(&request), PlanAnswer::Error { .. }));
/// ```
///
/// # Panics
/// If the parameters hold a number that JSON does not have.
pub fn plan<T: Transform>(request: &PlanRequest) -> PlanAnswer {
    module::plan::<T>(&to_guest(request))
}

/// The request as a module reads it.
fn to_guest(request: &PlanRequest) -> wire::Request {
    let document = serde_json::to_vec(request).unwrap_or_else(|why| panic!("the request is no JSON: {why}"));
    wire::read_request(&document).unwrap_or_else(|why| panic!("{why}"))
}

/// Computes a tile.
///
/// # Errors
/// What the transform says of the data.
///
/// # Panics
/// If the parameters hold a number that JSON does not have.
///
/// ```
/// use weightmill_guest::native::{Window, run};
/// use weightmill_guest::prelude::*;
///
/// #[transform(name = "ones", version = "1.0.0")]
/// struct Ones;
/// impl Transform for Ones {
///     fn plan(&self, cx: &Plan) -> Result<Outputs> {
///         cx.outputs().tiles("w", Dtype::U8, &[4], TileGroup::new(1, 4))
///     }
///     fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
///         tile.output_bytes().fill(1);
///         Ok(())
///     }
/// }
/// let mut out = Window::zeroed(4);
/// run::<Ones>(&serde_json::json!({}), &mut Tile::new(Default::default(), vec![], &[], out.bytes_mut())).unwrap();
/// assert_eq!(out.bytes(), [1, 1, 1, 1]);
/// ```
pub fn run<T: Transform>(params: &Value, tile: &mut Tile<'_>) -> Result<(), RunError> {
    let params = json::Value::parse(&serde_json::to_vec(params).unwrap_or_default())
        .unwrap_or_else(|why| panic!("the parameters are no JSON: {why}"));
    module::run::<T>(&params, tile)
}

/// Bytes that begin on a 64-byte boundary, as a tile's windows do.
///
/// ```
/// use weightmill_guest::native::Window;
///
/// let mut window = Window::zeroed(8);
/// window.bytes_mut()[4] = 1;
/// assert_eq!(window.numbers::<u32>(), [0, 1]);
/// assert_eq!(Window::of(&[1.0_f32]).bytes(), [0, 0, 0x80, 0x3f]);
/// ```
#[derive(Clone, Debug)]
pub struct Window {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Window {
    /// `len` bytes of 0.
    pub fn zeroed(len: usize) -> Self {
        let room = vec![0; len + ALIGN];
        let start = room.as_ptr().align_offset(ALIGN);
        Window { room, start, len }
    }

    /// A copy of `numbers`.
    pub fn of<T: Pod>(numbers: &[T]) -> Self {
        let bytes = pod::bytes_of(numbers);
        let mut window = Window::zeroed(bytes.len());
        window.bytes_mut().copy_from_slice(bytes);
        window
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.start + self.len]
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.start + self.len]
    }

    /// The bytes as numbers.
    pub fn numbers<T: Pod>(&self) -> &[T] {
        pod::of(self.bytes())
    }
}

/// A tensor in memory.
///
/// ```
/// use weightmill_guest::native::Tensor;
///
/// let tensor = Tensor::of(&[2, 2], &[1.0_f32, 2.0, 3.0, 4.0]);
/// assert_eq!(tensor.bytes.len(), 16);
/// assert_eq!(tensor.numbers::<f32>(), [1.0, 2.0, 3.0, 4.0]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// The elements, row-major.
    pub bytes: Vec<u8>,
}

/// A number type that is a dtype.
pub trait Element: Pod {
    /// The dtype.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($number:ty: $dtype:ident),+) => { $( impl Element for $number { const DTYPE: Dtype = Dtype::$dtype; } )+ };
}

elements!(u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, f32: F32, u64: U64, i64: I64, f64: F64);

impl Tensor {
    /// A tensor of numbers.
    ///
    /// # Panics
    /// If they are not as many as the shape says.
    pub fn of<T: Element>(shape: &[u64], numbers: &[T]) -> Self {
        Tensor::new(T::DTYPE, shape, pod::bytes_of(numbers).to_vec())
    }

    /// A tensor of any dtype.
    ///
    /// # Panics
    /// If there are not as many bytes as the shape says.
    pub fn new(dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> Self {
        assert_eq!(dtype.tensor_bytes(shape), Some(bytes.len() as u64), "{dtype} {shape:?}");
        Tensor { dtype, shape: shape.to_vec(), bytes }
    }

    /// A tensor whose elements are all different as far as their size allows:
    /// element `i` holds `first + i`, little-endian.
    ///
    /// # Panics
    /// If the size is not a whole number of bytes.
    ///
    /// ```
    /// use weightmill_guest::abi::Dtype;
    /// use weightmill_guest::native::Tensor;
    ///
    /// assert_eq!(Tensor::counting(Dtype::U16, &[3], 5).numbers::<u16>(), [5, 6, 7]);
    /// ```
    pub fn counting(dtype: Dtype, shape: &[u64], first: u64) -> Self {
        let (size, count) = (dtype.bytes(), shape.iter().product::<u64>());
        let Some(size) = size else { panic!("{dtype} has no whole number of bytes") };
        let bytes = (first..first + count).flat_map(|n| n.to_le_bytes().into_iter().take(size as usize)).collect();
        Tensor::new(dtype, shape, bytes)
    }

    /// The elements as numbers.
    ///
    /// # Panics
    /// If they are of another size.
    pub fn numbers<T: Pod>(&self) -> Vec<T> {
        let mut window = Window::zeroed(self.bytes.len());
        window.bytes_mut().copy_from_slice(&self.bytes);
        window.numbers::<T>().to_vec()
    }
}

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

/// Appends the bytes of `parts` to `out`, by the letter of the ABI. `turns`
/// are those of the enclosing repeats, outermost first.
///
/// # Panics
/// If a copy is out of bounds: the author's mistake.
///
/// ```
/// use weightmill_guest::abi::Part;
/// use weightmill_guest::native::gather;
///
/// let twice = Part::Repeat { repeat: 2, parts: vec![Part::Copy { copy: 0, offset: 1, len: 1, strides: vec![2] }] };
/// let mut bytes = Vec::new();
/// gather(&[twice], &[Some(vec![5, 6, 7, 8])], &mut Vec::new(), &mut bytes);
/// assert_eq!(bytes, [6, 8]);
/// ```
pub fn gather(parts: &[Part], sources: &[Option<Vec<u8>>], turns: &mut Vec<u64>, out: &mut Vec<u8>) {
    for part in parts {
        match part {
            Part::Copy { copy, offset, len, strides } => {
                let moved: u64 = strides.iter().zip(turns.iter()).map(|(stride, turn)| stride * turn).sum();
                let (start, source) = ((offset + moved) as usize, sources[*copy as usize].as_ref());
                match source.and_then(|bytes| bytes.get(start..start + *len as usize)) {
                    Some(run) => out.extend_from_slice(run),
                    None => panic!("{}", format!("{part:?} goes out of bounds at turns {turns:?}")),
                }
            }
            Part::Fill { fill, len } => out.resize(out.len() + *len as usize, *fill),
            Part::Repeat { repeat, parts } => {
                for turn in 0..*repeat {
                    turns.push(turn);
                    gather(parts, sources, turns, out);
                    turns.pop();
                }
            }
        }
    }
}
