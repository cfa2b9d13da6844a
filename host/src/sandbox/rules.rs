//! Every rule that a module's bytes can be checked against before anything is
//! compiled.
//!
//! One pass over the sections: each section is held against the limits first,
//! then against WebAssembly's own validation with exactly the features that
//! the ABI allows. What an engine gets to see is therefore valid, imports
//! nothing, is of bounded size, and cannot fail or trap when it is
//! instantiated: segments are known to fit, since without imports and extended
//! constant expressions their offsets are plain constants.

use wasmparser::{
    DataKind, ElementItems, ElementKind, Encoding, FuncType, FuncValidatorAllocations, FunctionBody, MemoryType,
    Operator, Parser, Payload, TypeRef, ValidPayload, Validator, WasmFeatures,
};
use weightmill_guest::abi::{METADATA_SECTION, Metadata, limits};

use super::exports::Exports;
use super::metadata::{self, shown};
use super::{Facts, Limits, PAGE_BYTES, floats};
use crate::error::{Code, Error, Result};

/// Everything that a module may use: WebAssembly 2.0, without references to
/// host objects.
pub(super) const FEATURES: WasmFeatures = WasmFeatures::WASM2.difference(WasmFeatures::GC_TYPES);

/// Elements of all tables together, at the start and grown.
pub(super) const TABLE_ELEMENTS: u32 = 65_536;
/// Tables.
pub(super) const TABLES: u32 = 8;
const TYPES: u32 = 4_096;
const FUNCTION_PARAMETERS: usize = 256;
const FUNCTION_RESULTS: usize = 16;
const FUNCTIONS: u32 = 32_768;
const CODE_BYTES: u32 = 2 << 20;
const FUNCTION_BYTES: usize = 256 << 10;
const FUNCTION_LOCALS: u32 = 4_096;
const FUNCTION_NESTING: u32 = 4_096;
const LOOP_NESTING: u32 = 64;
const BRANCH_TARGETS: u32 = 4_096;
/// [`ControlFlow::work`] of all functions together.
const COMPILE_WORK: u64 = 120_000_000;
const GLOBALS: u32 = 4_096;
const EXPORTS: u32 = 1_024;
const ELEMENT_SEGMENTS: u32 = 1_024;
const DATA_SEGMENTS: u32 = 16_384;

/// Checks a module against every static rule.
pub(super) fn check(bytes: &[u8]) -> Result<Facts> {
    at_most(bytes.len() as u64, limits::MODULE_BYTES as u64, "bytes")?;
    if !bytes.starts_with(b"\0asm") {
        return Err(Error::new(Code::ModuleBadAbi, "not a WebAssembly module: it does not begin with '\\0asm'")
            .hint("a module is a .wasm file; text (.wat) has to be assembled first"));
    }
    let mut checker = Checker::default();
    checker.sections(bytes).map_err(|stop| match stop {
        Stop::Rule(error) => error,
        Stop::Invalid(error) => invalid(bytes, &error),
    })?;
    checker.facts()
}

/// Why the pass over the sections ended early.
enum Stop {
    Rule(Error),
    Invalid(wasmparser::Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Rule(error)
    }
}

impl From<wasmparser::Error> for Stop {
    fn from(error: wasmparser::Error) -> Self {
        Stop::Invalid(error)
    }
}

/// What the sections say, as far as they have been read.
#[derive(Default)]
struct Checker {
    memory: Option<MemoryType>,
    tables: Vec<u64>,
    /// The initial value of each global that is a constant i32.
    globals: Vec<Option<u32>>,
    exports: Exports,
    metadata: Option<Metadata>,
    functions: u32,
    code_bytes: u64,
    data_bytes: u64,
    element_items: u64,
    compile_work: u64,
    float_arithmetic: bool,
}

impl Checker {
    fn sections(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let mut validator = Validator::new_with_features(FEATURES);
        let mut parser = Parser::new(0);
        parser.set_features(FEATURES);
        let mut allocations = FuncValidatorAllocations::default();
        for payload in parser.parse_all(bytes) {
            let payload = payload?;
            self.before_validation(&payload)?;
            match validator.payload(&payload)? {
                ValidPayload::Func(function, body) => {
                    self.function_sizes(&body)?;
                    let mut function = function.into_validator(allocations);
                    function.validate(&body)?;
                    allocations = function.into_allocations();
                    self.function_instructions(&body)?;
                }
                ValidPayload::End(types) => self.exports.resolve(types.as_ref(), &self.globals),
                _ => {}
            }
            self.after_validation(payload)?;
        }
        Ok(())
    }

    /// Counts, and what has to be refused under a name of its own: done first,
    /// so that nothing large is worked through.
    fn before_validation(&mut self, payload: &Payload<'_>) -> Result<(), Stop> {
        match payload {
            Payload::Version { encoding: Encoding::Component, .. } => {
                return Err(Error::new(
                    Code::ModuleUnsupportedFeature,
                    "the file is a WebAssembly component, only core modules run here",
                )
                .hint("build for wasm32-unknown-unknown, without a componentising step")
                .into());
            }
            Payload::ImportSection(section) => {
                if let Some(import) = section.clone().into_imports().next() {
                    return Err(has_import(&import?).into());
                }
            }
            Payload::StartSection { func, .. } => {
                return Err(bad_abi(format!("it has a start function (function {func}), which is not allowed"))
                    .hint("initialise in wm_plan and wm_run; each call has an instance of its own")
                    .into());
            }
            Payload::TypeSection(section) => at_most(section.count(), TYPES, "types")?,
            Payload::FunctionSection(section) => at_most(section.count(), FUNCTIONS, "functions")?,
            Payload::TableSection(section) => at_most(section.count(), TABLES, "tables")?,
            Payload::GlobalSection(section) => at_most(section.count(), GLOBALS, "globals")?,
            Payload::ExportSection(section) => at_most(section.count(), EXPORTS, "exports")?,
            Payload::ElementSection(section) => at_most(section.count(), ELEMENT_SEGMENTS, "element segments")?,
            Payload::DataSection(section) => at_most(section.count(), DATA_SEGMENTS, "data segments")?,
            Payload::DataCountSection { count, .. } => at_most(*count, DATA_SEGMENTS, "data segments")?,
            Payload::CodeSectionStart { count, size, .. } => {
                at_most(*size, CODE_BYTES, "bytes of code")?;
                self.functions = *count;
                self.code_bytes = u64::from(*size);
            }
            _ => {}
        }
        Ok(())
    }

    /// What valid sections say.
    fn after_validation(&mut self, payload: Payload<'_>) -> Result<(), Stop> {
        match payload {
            Payload::TypeSection(section) => {
                for ty in section.into_iter_err_on_gc_types() {
                    function_type(&ty?)?;
                }
            }
            Payload::TableSection(section) => {
                for table in section {
                    self.tables.push(table?.ty.initial);
                }
                let elements = self.tables.iter().fold(0, |sum: u64, table| sum.saturating_add(*table));
                at_most(elements, u64::from(TABLE_ELEMENTS), "initial table elements")?;
            }
            Payload::MemorySection(section) => {
                for memory in section {
                    let memory = memory?;
                    let bytes = memory.initial.saturating_mul(PAGE_BYTES);
                    at_most(bytes, Limits::MEMORY_BYTES, "bytes of initial memory")?;
                    self.memory = Some(memory);
                }
            }
            Payload::GlobalSection(section) => {
                for global in section {
                    self.globals.push(constant(&global?.init_expr)?);
                }
            }
            Payload::ExportSection(section) => {
                for export in section {
                    self.exports.push(export?);
                }
            }
            Payload::ElementSection(section) => {
                for element in section {
                    self.element(element?)?;
                }
            }
            Payload::DataSection(section) => {
                for (index, data) in section.into_iter().enumerate() {
                    self.data(index, data?)?;
                }
            }
            Payload::CustomSection(section) if section.name() == METADATA_SECTION => {
                if self.metadata.is_some() {
                    return Err(bad_abi(format!("it has two custom sections '{METADATA_SECTION}'")).into());
                }
                self.metadata = Some(metadata::parse(section.data())?);
            }
            _ => {}
        }
        Ok(())
    }

    fn element(&mut self, element: wasmparser::Element<'_>) -> Result<(), Stop> {
        let items = match &element.items {
            ElementItems::Functions(items) => items.count(),
            ElementItems::Expressions(_, items) => items.count(),
        };
        self.element_items += u64::from(items);
        at_most(self.element_items, u64::from(TABLE_ELEMENTS), "elements in element segments")?;
        if let ElementKind::Active { table_index, offset_expr } = &element.kind {
            let size = self.tables.get(table_index.unwrap_or(0) as usize).copied().unwrap_or(0);
            let offset = constant(offset_expr)?.unwrap_or(u32::MAX);
            if u64::from(offset) + u64::from(items) > size {
                return Err(bad_abi(format!(
                    "an element segment has {items} elements at {offset}, the table has {size}"
                ))
                .into());
            }
        }
        Ok(())
    }

    fn data(&mut self, index: usize, data: wasmparser::Data<'_>) -> Result<(), Stop> {
        self.data_bytes += data.data.len() as u64;
        if let DataKind::Active { offset_expr, .. } = &data.kind {
            let size = self.memory.map_or(0, |memory| memory.initial * PAGE_BYTES);
            let offset = constant(offset_expr)?.unwrap_or(u32::MAX);
            if u64::from(offset) + data.data.len() as u64 > size {
                return Err(bad_abi(format!(
                    "data segment {index} has {} bytes at {offset}, the initial memory has {size}",
                    data.data.len()
                ))
                .into());
            }
        }
        Ok(())
    }

    fn function_sizes(&self, body: &FunctionBody<'_>) -> Result<(), Stop> {
        at_most(body.range().len() as u64, FUNCTION_BYTES as u64, "bytes in one function")?;
        at_most(locals(body)?, u64::from(FUNCTION_LOCALS), "locals in one function")?;
        Ok(())
    }

    /// A second look at a function that is known to be valid.
    fn function_instructions(&mut self, body: &FunctionBody<'_>) -> Result<(), Stop> {
        let mut flow = ControlFlow { locals: locals(body)?, ..ControlFlow::default() };
        for operator in body.get_operators_reader()? {
            let operator = operator?;
            flow.count(&operator)?;
            self.float_arithmetic |= floats::made_by(&operator).is_some();
        }
        self.compile_work = self.compile_work.saturating_add(flow.work());
        at_most(self.compile_work, COMPILE_WORK, "units of control flow to compile")?;
        Ok(())
    }

    /// What has to be there once all sections are read.
    fn facts(self) -> Result<Facts> {
        let Some(memory) = self.memory else {
            return Err(bad_abi("it has no memory"));
        };
        let panic_buffer = self.exports.check()?;
        let Some(metadata) = self.metadata else {
            return Err(bad_abi(format!("it has no custom section '{METADATA_SECTION}'"))
                .hint("the SDK writes it; for other languages, weightmill module pack --meta adds it"));
        };
        Ok(Facts {
            metadata,
            exports: self.exports.into_list(),
            float_arithmetic: self.float_arithmetic,
            memory_pages: memory.initial,
            memory_pages_max: memory.maximum,
            functions: self.functions,
            code_bytes: self.code_bytes,
            data_bytes: self.data_bytes,
            compile_work: self.compile_work,
            panic_buffer,
        })
    }
}

/// Locals that a function declares, its parameters aside.
fn locals(body: &FunctionBody<'_>) -> Result<u64, Stop> {
    let mut count = 0;
    for local in body.get_locals_reader()? {
        count += u64::from(local?.0);
    }
    Ok(count)
}

/// The shape of one function, as far as it decides how long compiling takes.
///
/// Optimising compilers are quadratic in places: every branch to a join or to
/// the head of a loop carries a value for each local that is live there, and
/// passes over the joins look at what dominates them. A function of 200 KiB
/// can be made to take minutes, so size alone is not a bound. At the limit
/// compiling takes some ten seconds; the modules that are shipped with this
/// host, JSON parser included, are at a tenth of it.
#[derive(Default)]
struct ControlFlow {
    locals: u64,
    branches: u64,
    blocks: u64,
    loops: u64,
    /// For each block that is open, whether it is a loop.
    open: Vec<bool>,
    open_loops: u32,
}

impl ControlFlow {
    fn count(&mut self, operator: &Operator<'_>) -> Result<()> {
        match operator {
            Operator::Block { .. } => self.enter(false)?,
            Operator::If { .. } => {
                self.branches += 1;
                self.enter(false)?;
            }
            Operator::Loop { .. } => {
                self.loops += 1;
                self.enter(true)?;
            }
            // The last one ends the function itself and finds nothing open.
            Operator::End => self.open_loops -= u32::from(self.open.pop() == Some(true)),
            Operator::Br { .. } | Operator::BrIf { .. } | Operator::Return => self.branches += 1,
            // Each gets a branch of its own, to where fuel is out.
            Operator::MemoryGrow { .. }
            | Operator::MemoryCopy { .. }
            | Operator::MemoryFill { .. }
            | Operator::MemoryInit { .. }
            | Operator::TableGrow { .. }
            | Operator::TableFill { .. }
            | Operator::TableCopy { .. }
            | Operator::TableInit { .. } => self.branches += 1,
            Operator::BrTable { targets } => {
                at_most(targets.len(), BRANCH_TARGETS, "targets in one br_table")?;
                self.branches += u64::from(targets.len()) + 1;
            }
            _ => {}
        }
        Ok(())
    }

    fn enter(&mut self, is_loop: bool) -> Result<()> {
        self.blocks += 1;
        self.open.push(is_loop);
        self.open_loops += u32::from(is_loop);
        at_most(self.open.len() as u64, u64::from(FUNCTION_NESTING), "nested blocks in one function")?;
        at_most(self.open_loops, LOOP_NESTING, "nested loops in one function")
    }

    /// In units that only [`COMPILE_WORK`] knows; the weights are measured.
    fn work(&self) -> u64 {
        let joins = self.branches + self.blocks;
        (joins + 16 * self.loops).saturating_mul(joins + 64 * self.locals)
    }
}

/// Whether an instance can start within an engine's limits.
pub(super) fn memory_fits(module: &super::Module, limits: &Limits) -> Result<()> {
    at_most(module.memory_bytes(), limits.memory_bytes, "bytes of initial memory")
}

fn function_type(ty: &FuncType) -> Result<()> {
    at_most(ty.params().len() as u64, FUNCTION_PARAMETERS as u64, "parameters of one function type")?;
    at_most(ty.results().len() as u64, FUNCTION_RESULTS as u64, "results of one function type")
}

/// The value of a constant expression that is one `i32.const`.
fn constant(expression: &wasmparser::ConstExpr<'_>) -> Result<Option<u32>, Stop> {
    Ok(match expression.get_operators_reader().read()? {
        Operator::I32Const { value } => Some(value.cast_unsigned()),
        _ => None,
    })
}

fn at_most<N: Into<u64>>(found: N, limit: N, what: &str) -> Result<()> {
    let (found, limit) = (found.into(), limit.into());
    if found <= limit {
        return Ok(());
    }
    Err(Error::new(Code::ModuleTooLarge, format!("the module has {found} {what}, at most {limit} are allowed")))
}

pub(super) fn bad_abi(what: impl std::fmt::Display) -> Error {
    Error::new(Code::ModuleBadAbi, format!("the module does not follow the ABI: {what}"))
}

fn has_import(import: &wasmparser::Import<'_>) -> Error {
    let kind = match import.ty {
        TypeRef::Func(_) | TypeRef::FuncExact(_) => "function",
        TypeRef::Table(_) => "table",
        TypeRef::Memory(_) => "memory",
        TypeRef::Global(_) => "global",
        TypeRef::Tag(_) => "tag",
    };
    Error::new(
        Code::ModuleHasImports,
        format!(
            "the module imports {kind} '{}' from '{}', it may import nothing",
            shown(import.name),
            shown(import.module)
        ),
    )
    .hint("build for wasm32-unknown-unknown and link nothing that needs a system")
}

/// The proposals that are off, by the flags that turn each on.
const PROPOSALS: &[(WasmFeatures, &str)] = &[
    (WasmFeatures::RELAXED_SIMD, "relaxed SIMD"),
    (WasmFeatures::THREADS, "threads"),
    (WasmFeatures::MEMORY64, "64-bit memory"),
    (WasmFeatures::MULTI_MEMORY, "several memories"),
    (WasmFeatures::TAIL_CALL, "tail calls"),
    (WasmFeatures::EXTENDED_CONST, "extended constant expressions"),
    (WasmFeatures::CUSTOM_PAGE_SIZES, "custom page sizes"),
    (WasmFeatures::WIDE_ARITHMETIC, "wide arithmetic"),
    (WasmFeatures::MEMORY_CONTROL, "memory control"),
    (WasmFeatures::GC_TYPES, "references to host objects"),
    (WasmFeatures::EXCEPTIONS, "exceptions"),
    (WasmFeatures::LEGACY_EXCEPTIONS, "legacy exceptions"),
    (WasmFeatures::FUNCTION_REFERENCES, "typed function references"),
    (WasmFeatures::GC, "garbage collection"),
    (WasmFeatures::STACK_SWITCHING, "stack switching"),
    (WasmFeatures::SHARED_EVERYTHING_THREADS, "shared-everything threads"),
    (WasmFeatures::CUSTOM_DESCRIPTORS, "custom descriptors"),
    (WasmFeatures::COMPACT_IMPORTS, "compact imports"),
];

/// What to say about a module that does not validate.
fn invalid(bytes: &[u8], error: &wasmparser::Error) -> Error {
    let at = error.offset();
    match error.missing_wasm_feature().and_then(proposal).or_else(|| proposal_that_helps(bytes)) {
        Some(name) => Error::new(
            Code::ModuleUnsupportedFeature,
            format!("the module uses {name} at offset {at:#x}, which is off: {}", error.message()),
        )
        .hint("turn the feature off in the compiler that builds the module"),
        None => Error::new(
            Code::ModuleBadAbi,
            format!("not a valid WebAssembly module: {} at offset {at:#x}", error.message()),
        ),
    }
}

fn proposal(missing: WasmFeatures) -> Option<&'static str> {
    PROPOSALS.iter().find(|(flag, _)| missing.intersects(*flag)).map(|(_, name)| *name)
}

/// The validator does not name the feature in every message. Then the first
/// proposal that makes the module valid is the one it uses.
fn proposal_that_helps(bytes: &[u8]) -> Option<&'static str> {
    let valid = |features| Validator::new_with_features(features).validate_all(bytes).is_ok();
    let references = WasmFeatures::GC_TYPES | WasmFeatures::FUNCTION_REFERENCES;
    let everything = PROPOSALS.iter().fold(FEATURES, |all, (flag, _)| all | *flag);
    if !valid(everything) {
        return None;
    }
    PROPOSALS
        .iter()
        .find(|(flag, _)| valid(FEATURES | *flag))
        .or_else(|| PROPOSALS.iter().find(|(flag, _)| valid(FEATURES | references | WasmFeatures::EXCEPTIONS | *flag)))
        .map(|(_, name)| *name)
        .or(Some("several proposals"))
}
