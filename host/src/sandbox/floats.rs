//! Which instructions can make a NaN whose bits WebAssembly leaves open.
//!
//! The specification fixes the bits of every result but one kind: a NaN that
//! arithmetic makes may have any sign and, if an operand was a non-canonical
//! NaN, any payload. Engines differ there. The list below is the one of the
//! specification's non-deterministic numeric instructions (those that use
//! `nans_N`), scalar and SIMD:
//!
//! - `add`, `sub`, `mul`, `div`, `sqrt`, `min`, `max`
//! - `ceil`, `floor`, `trunc`, `nearest`
//! - `f32.demote_f64`, `f64.promote_f32`, and their SIMD forms
//!
//! Not on it, because their results are exact bits: loads, stores, constants,
//! `abs`, `neg`, `copysign`, `reinterpret`, comparisons, conversions between
//! integers and floats (an integer is never a NaN, and the other direction
//! makes an integer), and the SIMD `pmin` and `pmax` (they pick an operand).

use wasmparser::Operator;

/// What an instruction makes that may be such a NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float {
    F32,
    F64,
    F32x4,
    F64x2,
}

/// What this instruction makes, if the bits of its result can depend on the
/// engine unless NaNs are canonicalised.
pub(super) fn made_by(operator: &Operator<'_>) -> Option<Float> {
    use Operator::*;
    match operator {
        F32Add | F32Sub | F32Mul | F32Div | F32Sqrt | F32Min | F32Max | F32Ceil | F32Floor | F32Trunc | F32Nearest
        | F32DemoteF64 => Some(Float::F32),
        F64Add | F64Sub | F64Mul | F64Div | F64Sqrt | F64Min | F64Max | F64Ceil | F64Floor | F64Trunc | F64Nearest
        | F64PromoteF32 => Some(Float::F64),
        F32x4Add | F32x4Sub | F32x4Mul | F32x4Div | F32x4Sqrt | F32x4Min | F32x4Max | F32x4Ceil | F32x4Floor
        | F32x4Trunc | F32x4Nearest | F32x4DemoteF64x2Zero => Some(Float::F32x4),
        F64x2Add | F64x2Sub | F64x2Mul | F64x2Div | F64x2Sqrt | F64x2Min | F64x2Max | F64x2Ceil | F64x2Floor
        | F64x2Trunc | F64x2Nearest | F64x2PromoteLowF32x4 => Some(Float::F64x2),
        _ => None,
    }
}

/// What this instruction reads its operands as, if it does not matter to it
/// which NaN it is given: its result is the same, or a NaN that is open anyway.
pub(super) fn read_by(operator: &Operator<'_>) -> Option<Float> {
    use Operator::*;
    match operator {
        F32DemoteF64 | F64Eq | F64Ne | F64Lt | F64Gt | F64Le | F64Ge | I32TruncF64S | I32TruncF64U | I64TruncF64S
        | I64TruncF64U | I32TruncSatF64S | I32TruncSatF64U | I64TruncSatF64S | I64TruncSatF64U => Some(Float::F64),
        F64PromoteF32 | F32Eq | F32Ne | F32Lt | F32Gt | F32Le | F32Ge | I32TruncF32S | I32TruncF32U | I64TruncF32S
        | I64TruncF32U | I32TruncSatF32S | I32TruncSatF32U | I64TruncSatF32S | I64TruncSatF32U => Some(Float::F32),
        F32x4DemoteF64x2Zero
        | F64x2Eq
        | F64x2Ne
        | F64x2Lt
        | F64x2Gt
        | F64x2Le
        | F64x2Ge
        | I32x4TruncSatF64x2SZero
        | I32x4TruncSatF64x2UZero => Some(Float::F64x2),
        F64x2PromoteLowF32x4 | F32x4Eq | F32x4Ne | F32x4Lt | F32x4Gt | F32x4Le | F32x4Ge | I32x4TruncSatF32x4S
        | I32x4TruncSatF32x4U => Some(Float::F32x4),
        // Arithmetic within one kind.
        other => made_by(other),
    }
}
