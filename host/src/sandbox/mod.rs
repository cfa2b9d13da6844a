//! Runs modules that nobody has to trust.
//!
//! ```text
//! bytes ──Module::parse──► Module ──Engine::compile──► Program ──plan, run──► replies
//!         rules.rs: every           wasmtime.rs,        calls.rs: the ABI's
//!         static rule, nothing      wasmi.rs            protocol, the same for
//!         compiled yet                                  every engine
//! ```
//!
//! A [`Module`] is proof that its bytes passed every static rule: full
//! validation with exactly the allowed features, no imports, the ABI's exports
//! with their exact types, bounded sizes. A [`Program`] is compiled code; it
//! is shared between threads and holds no state. Each call of [`Program::plan`]
//! and [`Program::run`] makes a fresh instance, calls `wm_alloc` once and the
//! entry point once, and throws the instance away, so that neither the order
//! of tiles nor the number of threads can change a byte.
//!
//! What a call can do is bounded by [`Limits`]: fuel (time), linear memory,
//! table elements and stack. Reaching a limit is always an error with a code
//! of its own and never a result. The engines count fuel and stack differently,
//! so a module that runs into a limit may do so at another point on another
//! engine; a module that stays clear of them computes the same bytes.
//!
//! Calls run on the caller's thread and take up to [`Limits::STACK_BYTES`] of
//! its stack for WebAssembly frames alone: use threads with at least 2 MiB.

mod calls;
mod ceiling;
mod exports;
mod floats;
mod guarded;
mod memory;
mod metadata;
pub(crate) mod rewrite;
mod rules;
mod wasmi;
mod wasmtime;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use guarded::Guarded;
use weightmill_guest::abi::{Metadata, RunError};

use crate::digest::ModuleDigest;
use crate::error::Result;

/// A module that passed every static rule. Nothing has been compiled yet.
#[derive(Clone)]
pub struct Module {
    bytes: Arc<[u8]>,
    digest: ModuleDigest,
    facts: Arc<Facts>,
}

/// What the static rules found out about a module.
#[derive(Clone, Debug)]
struct Facts {
    metadata: Metadata,
    exports: Vec<Export>,
    float_arithmetic: bool,
    memory_pages: u64,
    memory_pages_max: Option<u64>,
    functions: u32,
    code_bytes: u64,
    data_bytes: u64,
    compile_work: u64,
    panic_buffer: u32,
}

/// One export of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its name, as the module spells it: it may hold control characters.
    pub name: String,
    /// What it is, in the notation of the ABI: `function (i32, i32) -> i64`,
    /// `memory`, `global i32`, `table`.
    pub what: String,
}

impl Module {
    /// Checks `bytes` against every static rule.
    ///
    /// # Errors
    /// `module_has_imports`, `module_unsupported_feature`, `module_too_large`,
    /// or `module_bad_abi` for everything else, bytes that are no WebAssembly
    /// included.
    pub fn parse(bytes: impl Into<Arc<[u8]>>) -> Result<Module> {
        let bytes = bytes.into();
        let facts = Arc::new(rules::check(&bytes)?);
        let digest = ModuleDigest::of(&bytes);
        Ok(Module { bytes, digest, facts })
    }

    /// The file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// SHA-256 of the file: the module's identity.
    pub fn digest(&self) -> ModuleDigest {
        self.digest
    }

    /// What its custom section `weightmill` says.
    pub fn metadata(&self) -> &Metadata {
        &self.facts.metadata
    }

    /// Whether its code holds an instruction whose NaN result is not fixed by
    /// WebAssembly itself. Without any, canonicalising NaNs changes nothing
    /// and is left out.
    pub fn has_float_arithmetic(&self) -> bool {
        self.facts.float_arithmetic
    }

    /// Everything that it exports, in the order of its export section.
    pub fn exports(&self) -> &[Export] {
        &self.facts.exports
    }

    /// Size of its memory in a fresh instance, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.facts.memory_pages * PAGE_BYTES
    }

    /// The size that the module itself declares its memory never to outgrow,
    /// in bytes.
    pub fn memory_bytes_max(&self) -> Option<u64> {
        self.facts.memory_pages_max.map(|pages| pages * PAGE_BYTES)
    }

    /// How many functions it defines.
    pub fn functions(&self) -> u32 {
        self.facts.functions
    }

    /// Bytes of its code section.
    pub fn code_bytes(&self) -> u64 {
        self.facts.code_bytes
    }

    /// How much work its control flow is for a compiler, in the units of the
    /// static rules' limit.
    pub fn compile_work(&self) -> u64 {
        self.facts.compile_work
    }

    /// Bytes in its data segments.
    pub fn data_bytes(&self) -> u64 {
        self.facts.data_bytes
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Module").field("name", &self.metadata().name).field("digest", &self.digest).finish()
    }
}

/// Bytes of a WebAssembly page.
const PAGE_BYTES: u64 = 65_536;

/// What one call may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Linear memory of an instance, in bytes. Growth beyond it traps.
    pub memory_bytes: u64,
    /// Elements of a table. Growth beyond it traps.
    pub table_elements: u32,
    /// Fuel of `wm_alloc` and `wm_plan` together. With Cranelift the default
    /// is one to two seconds of arithmetic.
    pub plan_fuel: u64,
    /// Fuel of `wm_alloc` and `wm_run` together, before the module's
    /// `fuel_per_byte` is added for each byte into and out of the tile.
    pub run_fuel_base: u64,
}

impl Limits {
    /// Native stack that a call's WebAssembly frames may use. It is fixed:
    /// overflow is a failure, and where it happens should not be a setting.
    pub const STACK_BYTES: usize = 512 << 10;
    /// The most that a module's `fuel_per_byte` counts for.
    pub const FUEL_PER_BYTE: u64 = 65_536;
    /// The default of [`Limits::memory_bytes`], and the most that a module may
    /// ask for at the start.
    pub const MEMORY_BYTES: u64 = 256 << 20;

    /// The fuel of a tile with so many bytes in and out.
    fn run_fuel(&self, fuel_per_byte: u64, bytes: u64) -> u64 {
        let allowance = bytes.saturating_mul(fuel_per_byte.min(Limits::FUEL_PER_BYTE));
        self.run_fuel_base.saturating_add(allowance)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory_bytes: Limits::MEMORY_BYTES,
            table_elements: rules::TABLE_ELEMENTS,
            plan_fuel: 2_000_000_000,
            run_fuel_base: 10_000_000,
        }
    }
}

/// Something that compiles modules.
pub trait Engine: Send + Sync {
    /// Its name, as `--engine` takes it.
    fn name(&self) -> &'static str;

    /// The version of the library behind it, for provenance.
    fn version(&self) -> String;

    /// Compiles a module.
    ///
    /// # Errors
    /// `module_too_large` if its memory is over this engine's limit or the
    /// compiler gives up on its size, `module_unsupported_feature` if the
    /// compiler panics on it, `module_bad_abi` if the engine does not take it
    /// for another reason.
    fn compile(&self, module: &Module) -> Result<Arc<dyn Program>>;
}

/// A compiled module. Calls share nothing and may run on any thread.
pub trait Program: Send + Sync {
    /// Calls `wm_plan` in a fresh instance with the canonical bytes of a plan
    /// request. The answer's bytes are returned as they are: at least one and
    /// at most [`limits::ANSWER_BYTES`](weightmill_guest::abi::limits::ANSWER_BYTES).
    ///
    /// # Errors
    /// `module_out_of_fuel`, `module_out_of_memory`, `module_trapped`,
    /// `module_bad_abi` if `wm_alloc` answers a wild address,
    /// `module_bad_answer` if `wm_plan` does, `insufficient_memory` if the
    /// system has none.
    fn plan(&self, request: &[u8]) -> Result<PlanReply>;

    /// Calls `wm_run` in a fresh instance for one tile. `io` fills the input
    /// windows before the call and takes the output after it.
    ///
    /// # Errors
    /// As [`Program::plan`], and whatever `io` returns. That the module
    /// refuses its data is [`RunReply::Refused`], not an error.
    fn run(&self, tile: &TileRequest<'_>, io: &mut dyn TileIo) -> Result<RunReply>;
}

/// What `wm_plan` answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanReply {
    /// The document, not looked into yet.
    pub answer: Vec<u8>,
    /// Fuel used, in this engine's units.
    pub fuel: u64,
}

/// One tile, without its bytes. The fields are those of the ABI's run block.
#[derive(Clone, Copy, Debug)]
pub struct TileRequest<'a> {
    /// Which tensor: outputs in the answer's order, then scratch tensors.
    pub target: u32,
    /// Position of the tile's group.
    pub group: u32,
    /// Position of the tile in its group.
    pub turn: u32,
    /// Position of the tile in the target, counted over all groups.
    pub tile: u32,
    /// First byte of the tile in the target.
    pub offset: u64,
    /// Bytes of the output window.
    pub out_len: u32,
    /// Bytes of each input window.
    pub windows: &'a [u32],
    /// The group's `args`.
    pub args: &'a [i64],
    /// The parameters, canonical JSON as in the plan request.
    pub params: &'a [u8],
}

/// Where a tile's bytes come from and go to.
pub trait TileIo {
    /// Writes every byte of input window `window`, straight into the
    /// instance's memory.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being read; the call ends with it.
    fn fill(&mut self, window: usize, memory: &mut [u8]) -> Result<()>;

    /// Reads the finished output in place, while it is in the cache. Called
    /// once, and only if the module did not refuse.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being taken; the call ends with it.
    fn take(&mut self, output: &[u8]) -> Result<()>;

    /// Told how long the module's own code ran for the tile. For measuring
    /// only: no result may depend on it.
    fn ran(&mut self, inside: Duration) {
        let _ = inside;
    }
}

/// What `wm_run` answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunReply {
    /// The tile is computed, and [`TileIo::take`] had it.
    Done {
        /// Fuel used, in this engine's units.
        fuel: u64,
    },
    /// The module refuses the tile's data.
    Refused {
        /// Why. Control characters in its texts are escaped.
        error: RunError,
        /// Fuel used, in this engine's units.
        fuel: u64,
    },
}

/// The engines that this build has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EngineName {
    /// wasmtime with Cranelift: native code, the default.
    Wasmtime,
    /// wasmi: an interpreter that shares no execution code with wasmtime.
    Wasmi,
    /// wasmtime with Pulley: Cranelift's front end and optimiser, but bytecode
    /// for an interpreter instead of native code.
    Pulley,
}

impl EngineName {
    /// Every engine.
    pub const ALL: &[EngineName] = &[EngineName::Wasmtime, EngineName::Wasmi, EngineName::Pulley];

    /// The name that `--engine` takes.
    pub const fn as_str(self) -> &'static str {
        match self {
            EngineName::Wasmtime => "wasmtime",
            EngineName::Wasmi => "wasmi",
            EngineName::Pulley => "pulley",
        }
    }

    /// The engine that is called `name`.
    pub fn from_name(name: &str) -> Option<EngineName> {
        EngineName::ALL.iter().copied().find(|engine| engine.as_str() == name)
    }
}

/// An engine with the default limits.
///
/// # Errors
/// `io_error` if the engine does not work on this machine.
pub fn engine(name: EngineName) -> Result<Arc<dyn Engine>> {
    engine_with(name, Limits::default())
}

/// An engine whose programs run within `limits`.
///
/// # Errors
/// `io_error` if the engine does not work on this machine.
pub fn engine_with(name: EngineName, limits: Limits) -> Result<Arc<dyn Engine>> {
    Ok(match name {
        EngineName::Wasmtime => Arc::new(Guarded(wasmtime::Wasmtime::native(limits)?)),
        EngineName::Pulley => Arc::new(Guarded(wasmtime::Wasmtime::pulley(limits)?)),
        EngineName::Wasmi => Arc::new(Guarded(wasmi::Wasmi::new(limits))),
    })
}
