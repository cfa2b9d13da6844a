//! Canonical NaNs by rewriting a module's code, for an engine that does not
//! make them itself.
//!
//! Behind every instruction whose NaN WebAssembly leaves open ([`floats`]) goes
//! what Cranelift compiles there: a result that is not equal to itself is
//! replaced by the canonical NaN, lane by lane for vectors. A function gets a
//! local of its own for it.
//!
//! Only the engine sees the changed code; a module's identity and limits are
//! those of its own bytes.

use std::borrow::Cow;

use wasmparser::{BinaryReaderError, FunctionBody, Parser, Payload};

use super::floats::{self, Float};

const CODE_SECTION: u8 = 10;
const LOCAL_GET: u8 = 0x20;
const LOCAL_TEE: u8 = 0x22;

/// The module, which is valid and imports nothing, with canonical NaNs.
pub(crate) fn rewritten(module: &[u8]) -> Result<Cow<'_, [u8]>, BinaryReaderError> {
    let mut parameters: Vec<u32> = Vec::new();
    let mut functions: Vec<u32> = Vec::new();
    let mut section_end = 0;
    // The code section: where its header begins, and its content.
    let mut code = None;
    let mut bodies: Vec<Cow<'_, [u8]>> = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        let payload = payload?;
        match &payload {
            Payload::Version { range, .. } => section_end = range.end,
            Payload::TypeSection(types) => {
                for ty in types.clone().into_iter_err_on_gc_types() {
                    parameters.push(ty?.params().len() as u32);
                }
            }
            Payload::FunctionSection(section) => {
                functions = section.clone().into_iter().collect::<Result<_, _>>()?;
            }
            Payload::CodeSectionStart { range, .. } => code = Some((section_end, range.clone())),
            Payload::CodeSectionEntry(body) => {
                let ty = functions.get(bodies.len()).copied().unwrap_or_default();
                let parameters = parameters.get(ty as usize).copied().unwrap_or_default();
                bodies.push(rewritten_body(body, parameters)?);
            }
            _ => {}
        }
        if let Some((_, range)) = payload.as_section() {
            section_end = range.end;
        }
    }
    let Some((header, content)) = code.filter(|_| bodies.iter().any(|body| matches!(body, Cow::Owned(_)))) else {
        return Ok(Cow::Borrowed(module));
    };
    let mut section = Vec::with_capacity(2 * content.len());
    leb(&mut section, bodies.len());
    for body in &bodies {
        leb(&mut section, body.len());
        section.extend_from_slice(body);
    }
    let mut out = module[..header].to_vec();
    out.push(CODE_SECTION);
    leb(&mut out, section.len());
    out.extend_from_slice(&section);
    out.extend_from_slice(&module[content.end..]);
    Ok(Cow::Owned(out))
}

fn rewritten_body<'m>(body: &FunctionBody<'m>, parameters: u32) -> Result<Cow<'m, [u8]>, BinaryReaderError> {
    let (whole, base) = (body.as_bytes(), body.range().start);
    // Where to put what: behind the instruction, so in front of the next one.
    let mut places: Vec<(usize, Float)> = Vec::new();
    let mut open = None;
    let operators = body.get_operators_reader()?;
    let code_start = operators.original_position() - base;
    for operator in operators.into_iter_with_offsets() {
        let (operator, offset) = operator?;
        places.extend(open.take().map(|float| (offset - base, float)));
        open = floats::made_by(&operator);
    }
    if places.is_empty() {
        return Ok(Cow::Borrowed(whole));
    }
    let mut locals = body.get_locals_reader()?;
    let groups_start = locals.original_position() - base;
    let groups = locals.get_count();
    let mut fresh = parameters;
    for _ in 0..groups {
        fresh += locals.read()?.0;
    }
    let kinds: Vec<u8> =
        [0x7D, 0x7C, 0x7B].into_iter().filter(|kind| places.iter().any(|p| p.1.local() == *kind)).collect();
    let mut out = Vec::with_capacity(whole.len() + 24 * places.len());
    leb(&mut out, groups as usize + kinds.len());
    out.extend_from_slice(&whole[groups_start..code_start]);
    kinds.iter().for_each(|kind| out.extend_from_slice(&[1, *kind]));
    let mut copied = code_start;
    for (place, float) in places {
        out.extend_from_slice(&whole[copied..place]);
        let position = kinds.iter().position(|kind| *kind == float.local()).unwrap_or_default();
        float.canonicalise(&mut out, fresh as usize + position);
        copied = place;
    }
    out.extend_from_slice(&whole[copied..]);
    Ok(Cow::Owned(out))
}

impl Float {
    /// The type of a local that holds one, as the binary format has it.
    fn local(self) -> u8 {
        match self {
            Float::F32 => 0x7D,
            Float::F64 => 0x7C,
            Float::F32x4 | Float::F64x2 => 0x7B,
        }
    }

    /// Appends code that makes the value on the stack canonical.
    fn canonicalise(self, out: &mut Vec<u8>, local: usize) {
        let (nan, equal, choose): (Vec<u8>, &[u8], &[u8]) = match self {
            Float::F32 => ([&[0x43][..], &0x7FC0_0000_u32.to_le_bytes()].concat(), &[0x5B], &[0x1B]),
            Float::F64 => ([&[0x44][..], &0x7FF8_0000_0000_0000_u64.to_le_bytes()].concat(), &[0x61], &[0x1B]),
            Float::F32x4 => {
                ([&[0xFD, 0x0C][..], &0x7FC0_0000_u32.to_le_bytes().repeat(4)].concat(), &[0xFD, 0x41], &[0xFD, 0x52])
            }
            Float::F64x2 => {
                let nan = 0x7FF8_0000_0000_0000_u64.to_le_bytes().repeat(2);
                ([&[0xFD, 0x0C][..], &nan].concat(), &[0xFD, 0x47], &[0xFD, 0x52])
            }
        };
        let mut get = vec![LOCAL_GET];
        leb(&mut get, local);
        // x, NaN, x = x: select and bitselect take the first where the third holds.
        out.push(LOCAL_TEE);
        leb(out, local);
        for code in [&nan[..], &get, &get, equal, choose] {
            out.extend_from_slice(code);
        }
    }
}

/// Appends an unsigned LEB128.
fn leb(out: &mut Vec<u8>, mut n: usize) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_make_a_nan_changes() {
        let plain = "(module (memory 1) (func (param f32) (result f32) local.get 0 f32.neg) (data \"x\"))";
        assert!(matches!(rewritten(&wat::parse_str(plain).unwrap()).unwrap(), Cow::Borrowed(_)));
        let wat = |locals: &str, f32: &str, f64x2: &str| {
            format!(
                "(module (memory 1)
                   (func (param f32 i32) (result f32) (local f64 f64) {locals}
                     local.get 0 local.get 0 f32.add {f32} local.get 0 f32.div {f32}
                     v128.const i64x2 1 2 v128.const i64x2 3 4 f64x2.mul {f64x2} drop)
                   (func) (data (i32.const 3) \"x\"))"
            )
        };
        let by_hand = wat::parse_str(wat(
            "(local f32) (local v128)",
            "local.tee 4 f32.const nan local.get 4 local.get 4 f32.eq select",
            "local.tee 5 v128.const i64x2 0x7FF8000000000000 0x7FF8000000000000 local.get 5 local.get 5 f64x2.eq v128.bitselect",
        ));
        let module = wat::parse_str(wat("", "", "")).unwrap();
        assert_eq!(rewritten(&module).unwrap(), by_hand.unwrap());
    }

    #[test]
    fn every_shipped_module_stays_valid() {
        for shipped in crate::modules::SHIPPED {
            wasmparser::validate(&rewritten(shipped.bytes).unwrap()).unwrap();
        }
    }
}
