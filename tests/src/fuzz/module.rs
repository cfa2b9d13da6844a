//! Bytes that claim to be a module: the static rules, and what they promise of
//! what passes them.

use std::sync::{Arc, OnceLock};

use weightmill::error::Fault;
use weightmill::sandbox::{Engine, EngineName, Limits, Module, engine_with};

use super::check_error;

/// The input is the file.
pub(super) fn run(input: &[u8]) {
    let module = match Module::parse(input) {
        Ok(module) => module,
        Err(error) => return check_error(&error, Fault::Module),
    };
    assert!(module.exports().iter().any(|export| export.name == "wm_run"));
    // What passed the rules is compiled, or refused as the module's fault.
    match interpreter().compile(&module) {
        Ok(program) => {
            if let Err(error) = program.plan(b"{}") {
                check_error(&error, Fault::Module);
            }
        }
        Err(error) => check_error(&error, Fault::Module),
    }
}

fn interpreter() -> &'static dyn Engine {
    static ENGINE: OnceLock<Arc<dyn Engine>> = OnceLock::new();
    let make = || {
        let mut limits = Limits::default();
        limits.memory_bytes = 16 << 20;
        limits.plan_fuel = 100_000;
        engine_with(EngineName::Wasmi, limits).expect("wasmi works everywhere")
    };
    &**ENGINE.get_or_init(make)
}
