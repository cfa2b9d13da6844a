//! wasmi: an interpreter with a code base of its own, to check the compiler
//! against. It is slow and holds no performance claim.
//!
//! It does not make NaNs canonical, so it is given code that does ([`rewrite`](super::rewrite)).
//! It has the same limits as the default engine, in its own measures: fuel
//! counts its own instructions, and the call stack is a heap allocation,
//! bounded in frames and bytes.
//!
//! The 1.1 line on purpose: our fuzzing found that release 2.0.0 computes some
//! `select`s wrongly (`local.get 0, i32.eqz, select`), and that valid modules
//! can make it jump to a null address.

use std::sync::Arc;

use wasmi::{CompilationMode, Config, Instance as WasmInstance, Memory, Store, TrapCode, TypedFunc};

use super::calls::{Backend, Calls, Instance, Stop, Trap};
use super::ceiling::Ceiling;
use super::rewrite::{Nans, Rewrite};
use super::{Engine, Limits, Module, Program, rules};
use crate::error::{Code, Error, Result};

/// The release that the lock file pins.
pub(super) const VERSION: &str = "1.1.0";

/// Frames of a call stack: about as many small ones as the native stack holds.
const FRAMES: usize = 16_384;

/// wasmi as an [`Engine`].
pub(super) struct Wasmi {
    engine: wasmi::Engine,
    limits: Limits,
}

impl Wasmi {
    pub(super) fn new(limits: Limits) -> Self {
        let mut config = Config::default();
        // The static rules have checked the features already; what they refuse
        // is refused here again where this engine knows it.
        config
            .wasm_mutable_global(true)
            .wasm_sign_extension(true)
            .wasm_saturating_float_to_int(true)
            .wasm_multi_value(true)
            .wasm_bulk_memory(true)
            .wasm_reference_types(true)
            .wasm_simd(true)
            .floats(true)
            .wasm_relaxed_simd(false)
            .wasm_multi_memory(false)
            .wasm_tail_call(false)
            .wasm_extended_const(false)
            .wasm_custom_page_sizes(false)
            .wasm_wide_arithmetic(false)
            .ignore_custom_sections(true)
            .consume_fuel(true)
            .compilation_mode(CompilationMode::Eager)
            .set_max_recursion_depth(FRAMES)
            .set_max_stack_height(4 * Limits::STACK_BYTES);
        Wasmi { engine: wasmi::Engine::new(&config), limits }
    }
}

impl Engine for Wasmi {
    fn name(&self) -> &'static str {
        "wasmi"
    }

    fn version(&self) -> String {
        VERSION.to_string()
    }

    fn compile(&self, module: &Module) -> Result<Arc<dyn Program>> {
        rules::memory_fits(module, &self.limits)?;
        let gives_up = |e: &dyn std::fmt::Display| {
            Error::new(Code::ModuleTooLarge, format!("the engine gives up on the module: {e}"))
        };
        let rewrite = Rewrite { nans: Some(Nans::Everywhere), fuel: false };
        let bytes = rewrite.apply(module.bytes()).map_err(|e| gives_up(&e))?;
        let compiled = wasmi::Module::new(&self.engine, &bytes).map_err(|e| gives_up(&e))?;
        let backend = Compiled { module: compiled, limits: self.limits };
        Ok(Arc::new(Calls::new(backend, &module.facts, self.limits)))
    }
}

struct Compiled {
    module: wasmi::Module,
    limits: Limits,
}

impl Backend for Compiled {
    type Instance = Running;

    fn instantiate(&self, fuel: u64) -> Result<Running, Stop> {
        let mut store = Store::new(self.module.engine(), Ceiling::new(&self.limits));
        store.limiter(|ceiling| ceiling);
        match Running::start(&mut store, &self.module, fuel) {
            Ok(entry) => Ok(Running { store, entry }),
            Err(error) if error.as_trap_code().is_some() || store.data().refused().is_some() => {
                Err(stop(&store, &error))
            }
            // The static rules leave nothing in a module that could fail here.
            Err(error) => Err(Stop::Host(Error::new(
                Code::InsufficientMemory,
                format!("the system cannot hold another instance of the module: {error}"),
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
}

impl Running {
    fn start(store: &mut Store<Ceiling>, module: &wasmi::Module, fuel: u64) -> Result<Entry, wasmi::Error> {
        store.set_fuel(fuel)?;
        let instance = WasmInstance::new(&mut *store, module, &[])?;
        Ok(Entry {
            memory: instance.get_memory(&*store, "memory").ok_or_else(|| wasmi::Error::new("no memory"))?,
            alloc: instance.get_typed_func(&*store, "wm_alloc")?,
            plan: instance.get_typed_func(&*store, "wm_plan")?,
            run: instance.get_typed_func(&*store, "wm_run")?,
        })
    }
}

impl Running {
    /// A call that the system could not give memory to has failed, even if the
    /// module went on.
    fn unless_refused<T>(&self, answer: Result<T, wasmi::Error>) -> Result<T, Stop> {
        match (answer, self.store.data().refused()) {
            (Ok(_), Some(refusal)) => Err(Stop::Growth(refusal)),
            (Ok(answer), None) => Ok(answer),
            (Err(error), _) => Err(stop(&self.store, &error)),
        }
    }
}

impl Instance for Running {
    fn alloc(&mut self, len: u32) -> Result<u32, Stop> {
        let answer = self.entry.alloc.call(&mut self.store, len);
        self.unless_refused(answer)
    }

    fn plan(&mut self, ptr: u32, len: u32) -> Result<i64, Stop> {
        let answer = self.entry.plan.call(&mut self.store, (ptr, len));
        self.unless_refused(answer)
    }

    fn run(&mut self, block: u32) -> Result<i64, Stop> {
        let answer = self.entry.run.call(&mut self.store, block);
        self.unless_refused(answer)
    }

    fn memory(&mut self) -> &mut [u8] {
        self.entry.memory.data_mut(&mut self.store)
    }

    fn fuel_left(&mut self) -> u64 {
        self.store.get_fuel().unwrap_or(0)
    }
}

fn stop(store: &Store<Ceiling>, error: &wasmi::Error) -> Stop {
    if let Some(refusal) = store.data().refused() {
        return Stop::Growth(refusal);
    }
    Stop::Trap(match error.as_trap_code() {
        Some(TrapCode::OutOfFuel) => return Stop::OutOfFuel,
        Some(TrapCode::StackOverflow) => return Stop::StackOverflow,
        Some(TrapCode::UnreachableCodeReached) => Trap::Unreachable,
        Some(TrapCode::MemoryOutOfBounds) => Trap::MemoryOutOfBounds,
        Some(TrapCode::TableOutOfBounds) => Trap::TableOutOfBounds,
        Some(TrapCode::IndirectCallToNull) => Trap::NullElement,
        Some(TrapCode::BadSignature) => Trap::WrongSignature,
        Some(TrapCode::IntegerOverflow) => Trap::IntegerOverflow,
        Some(TrapCode::IntegerDivisionByZero) => Trap::DivisionByZero,
        Some(TrapCode::BadConversionToInteger) => Trap::BadConversion,
        _ => Trap::Other(error.to_string()),
    })
}
