//! What an engine is given instead of a module's own code, where that is
//! faster or where the engine does not do it itself: canonical NaNs ([`nans`])
//! and counted fuel ([`fuel`]).
//!
//! Instructions are only ever put between those that are there, locals behind
//! a function's own, one global and one export behind the module's own. Nothing
//! of the module's is renumbered, and none of its instructions can name what
//! was added, since it was valid without. The engine validates what it is given
//! like any module.
//!
//! Only the engine sees the changed code; a module's identity and limits are
//! those of its own bytes.

mod fuel;
mod nans;
mod observed;

use std::borrow::Cow;
use std::ops::Range;

use wasmparser::{
    BinaryReaderError, FuncToValidate, FuncValidatorAllocations, FunctionBody, Parser, Payload, ValidPayload,
    Validator, ValidatorResources,
};

pub(crate) use nans::Nans;

use super::rules;

/// What to change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rewrite {
    /// Where to make NaNs canonical, if anywhere.
    pub(crate) nans: Option<Nans>,
    /// Whether to count fuel.
    pub(crate) fuel: bool,
}

/// The export that holds the fuel that is left, if fuel is counted: a mutable
/// i64. Code that finds none left traps as unreachable, and then this is
/// negative; it may be negative without, where nothing was asked since. No
/// module exports this name itself: it is one that the ABI reserves.
pub(super) const FUEL_EXPORT: &str = "wm_fuel";

const GLOBAL_SECTION: u8 = 6;
const EXPORT_SECTION: u8 = 7;
const CODE_SECTION: u8 = 10;

impl Rewrite {
    /// The module, which keeps the static rules, changed.
    pub(crate) fn apply(self, module: &[u8]) -> Result<Cow<'_, [u8]>, BinaryReaderError> {
        let mut out = Output { module, copied: 0, bytes: Vec::with_capacity(2 * module.len()) };
        let mut validator = Validator::new_with_features(rules::FEATURES);
        let mut allocations = FuncValidatorAllocations::default();
        // Where the code section's header begins, and its content.
        let (mut section_end, mut code) = (0, (0, 0..0));
        let mut bodies: Vec<Cow<'_, [u8]>> = Vec::new();
        let mut globals = 0;
        for payload in Parser::new(0).parse_all(module) {
            let payload = payload?;
            match &payload {
                Payload::Version { range, .. } => section_end = range.end,
                Payload::GlobalSection(section) if self.fuel => {
                    globals = section.count();
                    let own = &module[section.original_position()..section.range().end];
                    out.section(
                        GLOBAL_SECTION,
                        section_end..section.range().end,
                        globals as usize + 1,
                        &[own, fuel::GLOBAL],
                    );
                }
                Payload::ExportSection(section) if self.fuel => {
                    let own = &module[section.original_position()..section.range().end];
                    let export = fuel::export(globals);
                    out.section(
                        EXPORT_SECTION,
                        section_end..section.range().end,
                        section.count() as usize + 1,
                        &[own, &export],
                    );
                }
                Payload::CodeSectionStart { range, .. } => code = (section_end, range.clone()),
                _ => {}
            }
            if let ValidPayload::Func(function, body) = validator.payload(&payload)? {
                bodies.push(self.body(&body, function, &mut allocations, globals)?);
            }
            if let Some((_, range)) = payload.as_section() {
                section_end = range.end;
            }
        }
        if bodies.iter().any(|body| matches!(body, Cow::Owned(_))) {
            let mut items = Vec::with_capacity(2 * code.1.len());
            for body in &bodies {
                leb(&mut items, body.len() as u64);
                items.extend_from_slice(body);
            }
            out.section(CODE_SECTION, code.0..code.1.end, bodies.len(), &[&items]);
        }
        Ok(out.finish())
    }

    fn body<'m>(
        self,
        body: &FunctionBody<'m>,
        function: FuncToValidate<ValidatorResources>,
        allocations: &mut FuncValidatorAllocations,
        globals: u32,
    ) -> Result<Cow<'m, [u8]>, BinaryReaderError> {
        let mut validator = function.into_validator(std::mem::take(allocations));
        let mut edits =
            Edits { insertions: Vec::new(), locals: Vec::new(), first_local: locals(body, validator.len_locals())? };
        if let Some(nans) = self.nans {
            nans::canonical(nans, body, &mut validator, &mut edits)?;
        }
        if self.fuel {
            fuel::count(body, globals, &mut edits)?;
        }
        *allocations = validator.into_allocations();
        edits.apply(body)
    }
}

/// Parameters and locals of a function.
fn locals(body: &FunctionBody<'_>, parameters: u32) -> Result<u32, BinaryReaderError> {
    let mut count = parameters;
    for local in body.get_locals_reader()? {
        count += local?.0;
    }
    Ok(count)
}

/// The module as far as it is written.
struct Output<'m> {
    module: &'m [u8],
    copied: usize,
    bytes: Vec<u8>,
}

impl<'m> Output<'m> {
    /// Puts a section in the place of what lies in `old`, its header included.
    fn section(&mut self, id: u8, old: Range<usize>, count: usize, items: &[&[u8]]) {
        let mut content = Vec::new();
        leb(&mut content, count as u64);
        items.iter().for_each(|items| content.extend_from_slice(items));
        self.bytes.extend_from_slice(&self.module[self.copied..old.start]);
        self.bytes.push(id);
        leb(&mut self.bytes, content.len() as u64);
        self.bytes.extend_from_slice(&content);
        self.copied = old.end;
    }

    fn finish(mut self) -> Cow<'m, [u8]> {
        if self.copied == 0 {
            return Cow::Borrowed(self.module);
        }
        self.bytes.extend_from_slice(&self.module[self.copied..]);
        Cow::Owned(self.bytes)
    }
}

/// What to add to one function.
struct Edits {
    /// Offset in the module of the instruction that it goes in front of, and
    /// code. At one place the earlier comes first.
    insertions: Vec<(usize, Vec<u8>)>,
    /// Types of new locals.
    locals: Vec<u8>,
    /// The number of the first new local.
    first_local: u32,
}

const I32: u8 = 0x7F;
const I64: u8 = 0x7E;
const F32: u8 = 0x7D;
const F64: u8 = 0x7C;
const V128: u8 = 0x7B;

impl Edits {
    /// A new local of this type.
    fn local(&mut self, ty: u8) -> u32 {
        self.locals.push(ty);
        self.first_local + self.locals.len() as u32 - 1
    }

    fn insert(&mut self, at: usize, code: Vec<u8>) {
        self.insertions.push((at, code));
    }

    fn apply<'m>(mut self, body: &FunctionBody<'m>) -> Result<Cow<'m, [u8]>, BinaryReaderError> {
        let (whole, base) = (body.as_bytes(), body.range().start);
        if self.insertions.is_empty() {
            return Ok(Cow::Borrowed(whole));
        }
        // Stable, so that what was inserted first at a place stays first.
        self.insertions.sort_by_key(|(at, _)| *at);
        let locals = body.get_locals_reader()?;
        let (groups_start, groups) = (locals.original_position() - base, locals.get_count());
        let code_start = body.get_operators_reader()?.original_position() - base;
        let added: usize = self.insertions.iter().map(|(_, code)| code.len()).sum();
        let mut out = Vec::with_capacity(whole.len() + added + 16);
        leb(&mut out, u64::from(groups) + self.locals.len() as u64);
        out.extend_from_slice(&whole[groups_start..code_start]);
        self.locals.iter().for_each(|ty| out.extend_from_slice(&[1, *ty]));
        let mut copied = code_start;
        for (at, code) in &self.insertions {
            out.extend_from_slice(&whole[copied..at - base]);
            out.extend_from_slice(code);
            copied = at - base;
        }
        out.extend_from_slice(&whole[copied..]);
        Ok(Cow::Owned(out))
    }
}

/// Instructions, by their opcodes.
mod op {
    pub(super) const UNREACHABLE: u8 = 0x00;
    pub(super) const IF: u8 = 0x04;
    pub(super) const END: u8 = 0x0B;
    pub(super) const SELECT: u8 = 0x1B;
    pub(super) const LOCAL_GET: u8 = 0x20;
    pub(super) const LOCAL_SET: u8 = 0x21;
    pub(super) const LOCAL_TEE: u8 = 0x22;
    pub(super) const GLOBAL_GET: u8 = 0x23;
    pub(super) const GLOBAL_SET: u8 = 0x24;
    pub(super) const I64_CONST: u8 = 0x42;
    pub(super) const F32_CONST: u8 = 0x43;
    pub(super) const F64_CONST: u8 = 0x44;
    pub(super) const I64_LT_S: u8 = 0x53;
    pub(super) const F32_EQ: u8 = 0x5B;
    pub(super) const F64_EQ: u8 = 0x61;
    pub(super) const I64_SUB: u8 = 0x7D;
    pub(super) const I64_MUL: u8 = 0x7E;
    pub(super) const I64_EXTEND_I32_U: u8 = 0xAD;
    pub(super) const SIMD: u8 = 0xFD;
    pub(super) const V128_CONST: u8 = 0x0C;
    pub(super) const F32X4_EQ: u8 = 0x41;
    pub(super) const F64X2_EQ: u8 = 0x47;
    pub(super) const V128_BITSELECT: u8 = 0x52;
    pub(super) const NO_VALUE: u8 = 0x40;
}

/// Appends an unsigned LEB128.
fn leb(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Appends an instruction with an index.
fn indexed(out: &mut Vec<u8>, opcode: u8, index: u32) {
    out.push(opcode);
    leb(out, index.into());
}

/// Appends an `i64.const` of a number that is not negative.
fn i64_const(out: &mut Vec<u8>, mut n: u64) {
    out.push(op::I64_CONST);
    // Signed LEB128: the last byte's bit 6 is the sign.
    while n >= 0x40 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

#[cfg(test)]
mod tests;
