//! Running a transform without a sandbox: for its tests, and for measuring
//! what the sandbox costs.
//!
//! [`Case`] is a whole small host: it plans, gathers windows, runs tiles in
//! the order of what they read, and gives the outputs' bytes. It is written
//! for clarity, not for speed; hosts have an executor of their own.

mod case;
mod tensor;

use alloc::format;
use alloc::vec::Vec;

use serde_json::Value;

use crate::abi::{Part, PlanAnswer, PlanRequest, RunError};
use crate::json;
use crate::module::{self, Transform};
use crate::tile::Tile;
use crate::wire;

pub use case::{Case, Refused};
pub use tensor::{Element, Tensor, Window};

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
