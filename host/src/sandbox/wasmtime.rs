//! wasmtime: Cranelift to native code, and the same front end to Pulley
//! bytecode.
//!
//! The configuration names everything that can change what a module computes
//! or may do, even where it is wasmtime's default.

use std::sync::Arc;

use wasmtime::{Config, Global, Inlining, Instance as WasmInstance, Memory, OptLevel, Store, Strategy, TypedFunc, Val};

use super::calls::{Backend, Calls, Instance, Stop, Trap};
use super::ceiling::{Ceiling, Refusal};
use super::memory::{Pool, Recycler};
use super::rewrite::{FUEL_EXPORT, Nans, Rewrite};
use super::{Engine, Limits, Module, Program, rules};
use crate::error::{Code, Error, Result};

/// The release that the lock file pins.
pub(super) const VERSION: &str = "48.0.8";

/// Address space of a memory. With all that 32 bits can address reserved, and
/// a guard for the constant offset of an access behind it, compiled code needs
/// no bounds checks.
const RESERVATION_BYTES: u64 = 4 << 30;
const GUARD_BYTES: u64 = 32 << 20;

/// wasmtime as an [`Engine`].
pub(super) struct Wasmtime {
    name: &'static str,
    limits: Limits,
    engine: wasmtime::Engine,
    canonical_by: By,
}

/// Who makes NaNs canonical.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The module's code, rewritten for it: the faster way.
    Code,
    /// The compiler.
    Compiler,
}

impl Wasmtime {
    /// Compiles to the machine's own code.
    pub(super) fn native(limits: Limits) -> Result<Self> {
        Wasmtime::new("wasmtime", limits, None, By::Code)
    }

    /// Compiles to bytecode for wasmtime's own interpreter.
    pub(super) fn pulley(limits: Limits) -> Result<Self> {
        Wasmtime::new("pulley", limits, Some("pulley64"), By::Compiler)
    }

    fn new(name: &'static str, limits: Limits, target: Option<&str>, canonical_by: By) -> Result<Self> {
        let pool = Pool::new(usize::try_from(limits.memory_bytes.min(RESERVATION_BYTES)).unwrap_or(usize::MAX));
        let mut config = config(&pool, canonical_by);
        let engine = target.map_or(Ok(()), |target| config.target(target).map(|_| ()));
        let engine = engine.and_then(|()| wasmtime::Engine::new(&config));
        let failed = |e| Error::io(format!("the engine '{name}' does not work here"), format!("{e:#}"));
        Ok(Wasmtime { name, limits, engine: engine.map_err(failed)?, canonical_by })
    }
}

fn config(pool: &Arc<Pool>, canonical_by: By) -> Config {
    let mut config = Config::new();

    // What a module may use: the same set that the static rules check.
    config.wasm_features(wasmtime::WasmFeatures::all(), false).wasm_features(rules::FEATURES, true);

    // What a module computes. Hints would be at offsets that rewriting moves.
    config
        .wasm_branch_hinting(false)
        .strategy(Strategy::Cranelift)
        .cranelift_nan_canonicalization(canonical_by == By::Compiler);

    // What a module may use up; its code counts its fuel.
    config.consume_fuel(false).max_wasm_stack(Limits::STACK_BYTES);

    // Where its memory comes from. Images mapped copy-on-write need mappings
    // that are wasmtime's own, so data segments are copied instead.
    config
        .with_host_memory(Arc::new(Recycler(Arc::clone(pool))))
        .memory_init_cow(false)
        .memory_may_move(false)
        .memory_reservation(RESERVATION_BYTES)
        .memory_guard_size(GUARD_BYTES)
        .guard_before_linear_memory(false);

    // Speed, and nothing that only debuggers and backtraces need. Compiling
    // stays on the caller's thread, which belongs to a pool already.
    config
        .cranelift_opt_level(OptLevel::Speed)
        .compiler_inlining(Inlining::No)
        .wasm_backtrace_max_frames(None)
        .native_unwind_info(false)
        .generate_address_map(false)
        .debug_info(false);
    config
}

impl Engine for Wasmtime {
    fn name(&self) -> &'static str {
        self.name
    }

    fn version(&self) -> String {
        VERSION.to_string()
    }

    fn compile(&self, module: &Module) -> Result<Arc<dyn Program>> {
        rules::memory_fits(module, &self.limits)?;
        let gives_up =
            |e: String| Error::new(Code::ModuleTooLarge, format!("the compiler gives up on the module: {e}"));
        let nans = (self.canonical_by == By::Code && module.has_float_arithmetic()).then_some(Nans::WhereSeen);
        let bytes = Rewrite { nans, fuel: true }.apply(module.bytes()).map_err(|e| gives_up(e.to_string()))?;
        let compiled = wasmtime::Module::from_binary(&self.engine, &bytes).map_err(|e| gives_up(format!("{e:#}")))?;
        let backend = Compiled { module: compiled, limits: self.limits };
        Ok(Arc::new(Calls::new(backend, &module.facts, self.limits)))
    }
}

struct Compiled {
    module: wasmtime::Module,
    limits: Limits,
}

impl Backend for Compiled {
    type Instance = Running;

    fn instantiate(&self, fuel: u64) -> Result<Running, Stop> {
        let mut store = Store::new(self.module.engine(), Ceiling::new(&self.limits));
        store.limiter(|ceiling| ceiling);
        match Running::start(&mut store, &self.module, fuel) {
            Ok(entry) => Ok(Running { store, entry }),
            // The static rules leave nothing in a module that could fail here.
            Err(error) if error.is::<wasmtime::Trap>() || store.data().refused().is_some() => Err(stop(&store, &error)),
            Err(error) => Err(Stop::Host(Error::new(
                Code::InsufficientMemory,
                format!("the system cannot hold another instance of the module: {error:#}"),
            ))),
        }
    }
}

/// An instance and its store, which it does not outlive.
struct Running {
    store: Store<Ceiling>,
    entry: Entry,
}

struct Entry {
    memory: Memory,
    alloc: TypedFunc<u32, u32>,
    plan: TypedFunc<(u32, u32), i64>,
    run: TypedFunc<u32, i64>,
    /// Where the code counts fuel.
    fuel: Global,
}

impl Running {
    fn start(store: &mut Store<Ceiling>, module: &wasmtime::Module, fuel: u64) -> wasmtime::Result<Entry> {
        // Runs nothing: modules have no start function.
        let instance = WasmInstance::new(&mut *store, module, &[])?;
        let counter = instance.get_global(&mut *store, FUEL_EXPORT).ok_or_else(|| wasmtime::Error::msg("no fuel"))?;
        counter.set(&mut *store, Val::I64(i64::try_from(fuel).unwrap_or(i64::MAX)))?;
        Ok(Entry {
            memory: instance.get_memory(&mut *store, "memory").ok_or_else(|| wasmtime::Error::msg("no memory"))?,
            alloc: instance.get_typed_func(&mut *store, "wm_alloc")?,
            plan: instance.get_typed_func(&mut *store, "wm_plan")?,
            run: instance.get_typed_func(&mut *store, "wm_run")?,
            fuel: counter,
        })
    }

    /// What a call came to. Code that finds no fuel traps as unreachable; code
    /// that returned before it looked has used too much all the same.
    fn outcome<T>(&mut self, answer: wasmtime::Result<T>) -> Result<T, Stop> {
        let overdrawn = left(self.entry.fuel, &mut self.store) < 0;
        match answer.map_err(|error| stop(&self.store, &error)) {
            Ok(_) | Err(Stop::Trap(Trap::Unreachable)) if overdrawn => Err(Stop::OutOfFuel),
            outcome => outcome,
        }
    }
}

fn left(fuel: Global, store: &mut Store<Ceiling>) -> i64 {
    fuel.get(store).i64().unwrap_or_default()
}

impl Instance for Running {
    fn alloc(&mut self, len: u32) -> Result<u32, Stop> {
        let answer = self.entry.alloc.call(&mut self.store, len);
        self.outcome(answer)
    }

    fn plan(&mut self, ptr: u32, len: u32) -> Result<i64, Stop> {
        let answer = self.entry.plan.call(&mut self.store, (ptr, len));
        self.outcome(answer)
    }

    fn run(&mut self, block: u32) -> Result<i64, Stop> {
        let answer = self.entry.run.call(&mut self.store, block);
        self.outcome(answer)
    }

    fn memory(&mut self) -> &mut [u8] {
        self.entry.memory.data_mut(&mut self.store)
    }

    fn fuel_left(&mut self) -> u64 {
        u64::try_from(left(self.entry.fuel, &mut self.store)).unwrap_or(0)
    }
}

fn stop(store: &Store<Ceiling>, error: &wasmtime::Error) -> Stop {
    use wasmtime::Trap as Theirs;
    if let Some(refusal) = store.data().refused() {
        return Stop::Growth(refusal);
    }
    let Some(trap) = error.downcast_ref::<Theirs>() else {
        return Stop::Trap(Trap::Other(error.to_string()));
    };
    Stop::Trap(match trap {
        Theirs::StackOverflow => return Stop::StackOverflow,
        Theirs::AllocationTooLarge => return Stop::Growth(Refusal::System),
        Theirs::UnreachableCodeReached => Trap::Unreachable,
        Theirs::MemoryOutOfBounds => Trap::MemoryOutOfBounds,
        Theirs::TableOutOfBounds => Trap::TableOutOfBounds,
        Theirs::IndirectCallToNull => Trap::NullElement,
        Theirs::BadSignature => Trap::WrongSignature,
        Theirs::IntegerOverflow => Trap::IntegerOverflow,
        Theirs::IntegerDivisionByZero => Trap::DivisionByZero,
        Theirs::BadConversionToInteger => Trap::BadConversion,
        other => Trap::Other(other.to_string()),
    })
}
