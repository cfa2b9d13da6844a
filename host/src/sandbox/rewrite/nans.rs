//! Canonical NaNs by code.
//!
//! Behind an instruction whose NaN WebAssembly leaves open ([`floats`]) goes
//! what Cranelift compiles there when told to: a result that is not equal to
//! itself is replaced by the canonical NaN, lane by lane for vectors.
//!
//! [`Nans::Everywhere`] does that behind every such instruction, which is all
//! there is to say about it. [`Nans::WhereSeen`] leaves out what nobody can
//! tell apart ([`observed`]): then a chain of products and sums costs what it
//! would without. Of the three engines one is given this form, one the other,
//! and one does all the work itself, so that each checks the other two.

use wasmparser::{BinaryReaderError, FuncValidator, FunctionBody, WasmModuleResources};

use super::super::floats::{self, Float};
use super::{Edits, F32, F64, V128, indexed, observed, op};

/// Where NaNs are made canonical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nans {
    /// Wherever arithmetic may make one.
    Everywhere,
    /// Where its bits can be seen.
    WhereSeen,
}

/// Where a value on the stack is to be made canonical: what it is, and the
/// first byte of the instruction after the one that puts it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: usize,
    pub(super) kind: Float,
}

/// Adds what makes NaNs canonical to a function.
pub(super) fn canonical<R: WasmModuleResources>(
    nans: Nans,
    body: &FunctionBody<'_>,
    validator: &mut FuncValidator<R>,
    edits: &mut Edits,
) -> Result<(), BinaryReaderError> {
    let mut places = everywhere(body)?;
    if nans == Nans::WhereSeen
        && !places.is_empty()
        && let Some(seen) = observed::places(body, validator)?
    {
        places = seen;
    }
    // One local for each type that occurs.
    let mut locals = [F32, F64, V128].map(|ty| (ty, None));
    for place in places {
        let ty = place.kind.local();
        let Some((_, local)) = locals.iter_mut().find(|(of, _)| *of == ty) else { continue };
        let local = *local.get_or_insert_with(|| edits.local(ty));
        edits.insert(place.at, place.kind.canonicalise(local));
    }
    Ok(())
}

/// Behind every instruction that can make an open NaN.
fn everywhere(body: &FunctionBody<'_>) -> Result<Vec<Place>, BinaryReaderError> {
    let mut places = Vec::new();
    let mut operators = body.get_operators_reader()?;
    while !operators.eof() {
        let kind = floats::made_by(&operators.read()?);
        places.extend(kind.map(|kind| Place { at: operators.original_position(), kind }));
    }
    Ok(places)
}

impl Float {
    /// The type of a local that holds one.
    fn local(self) -> u8 {
        match self {
            Float::F32 => F32,
            Float::F64 => F64,
            Float::F32x4 | Float::F64x2 => V128,
        }
    }

    /// Code that makes the value on the stack canonical.
    fn canonicalise(self, local: u32) -> Vec<u8> {
        let (nan, equal, choose): (Vec<u8>, &[u8], &[u8]) = match self {
            Float::F32 => {
                ([&[op::F32_CONST][..], &0x7FC0_0000_u32.to_le_bytes()].concat(), &[op::F32_EQ], &[op::SELECT])
            }
            Float::F64 => (
                [&[op::F64_CONST][..], &0x7FF8_0000_0000_0000_u64.to_le_bytes()].concat(),
                &[op::F64_EQ],
                &[op::SELECT],
            ),
            Float::F32x4 => (
                [&[op::SIMD, op::V128_CONST][..], &0x7FC0_0000_u32.to_le_bytes().repeat(4)].concat(),
                &[op::SIMD, op::F32X4_EQ],
                &[op::SIMD, op::V128_BITSELECT],
            ),
            Float::F64x2 => (
                [&[op::SIMD, op::V128_CONST][..], &0x7FF8_0000_0000_0000_u64.to_le_bytes().repeat(2)].concat(),
                &[op::SIMD, op::F64X2_EQ],
                &[op::SIMD, op::V128_BITSELECT],
            ),
        };
        // x, NaN, x = x: select and bitselect take the first where the third holds.
        let mut code = Vec::new();
        indexed(&mut code, op::LOCAL_TEE, local);
        code.extend_from_slice(&nan);
        indexed(&mut code, op::LOCAL_GET, local);
        indexed(&mut code, op::LOCAL_GET, local);
        code.extend_from_slice(equal);
        code.extend_from_slice(choose);
        code
    }
}
