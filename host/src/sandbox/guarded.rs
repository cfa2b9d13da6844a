//! A compiler's own bugs are no reason to go down.
//!
//! Modules are hostile, and compilers are large: one that panics on a module
//! must not take the host with it, or whoever serves many models could be
//! stopped by one of them. A panic while compiling is the error
//! `module_unsupported_feature`: the module uses something that this engine
//! cannot compile. Nothing of the compilation is used afterwards.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{Engine, Module, Program};
use crate::error::{Code, Error, Result};
use crate::plan::printable;

/// An engine whose panics while compiling are errors.
pub(super) struct Guarded<E>(pub(super) E);

impl<E: Engine> Engine for Guarded<E> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn version(&self) -> String {
        self.0.version()
    }

    fn compile(&self, module: &Module) -> Result<Arc<dyn Program>> {
        // What a panic leaves half-made belongs to the compilation, which is
        // dropped; the engines share only caches behind locks of their own.
        catch_unwind(AssertUnwindSafe(|| self.0.compile(module))).unwrap_or_else(|panic| {
            let message = format!(
                "{} {} cannot compile the module {} (sha256:{}): it panicked: {}",
                self.name(),
                self.version(),
                module.metadata().name,
                module.digest(),
                printable(text_of(panic.as_ref()))
            );
            Err(Error::new(Code::ModuleUnsupportedFeature, message)
                .hint("this is a bug of the engine: report it with the module; another --engine may run it"))
        })
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::modules::SHIPPED;
    use crate::sandbox::{EngineName, engine};

    /// Panics on its first module, and compiles the others.
    struct Faulty {
        engine: Arc<dyn Engine>,
        panic: fn(&str),
        first: AtomicBool,
    }

    impl Engine for Faulty {
        fn name(&self) -> &'static str {
            "faulty"
        }

        fn version(&self) -> String {
            "1.2.3".into()
        }

        fn compile(&self, module: &Module) -> Result<Arc<dyn Program>> {
            if self.first.swap(false, Ordering::Relaxed) {
                (self.panic)(&module.metadata().name);
            }
            self.engine.compile(module)
        }
    }

    fn compile_twice(panic: fn(&str)) -> Error {
        let engine = engine(EngineName::Wasmi).unwrap();
        let guarded = Guarded(Faulty { engine, panic, first: true.into() });
        let module = Module::parse(SHIPPED[0].bytes).unwrap();
        let Err(error) = guarded.compile(&module) else { panic!("it panics on the first") };
        assert_eq!(error.code(), Code::ModuleUnsupportedFeature);
        assert!(guarded.compile(&module).is_ok(), "and works on");
        error
    }

    #[test]
    fn a_panic_is_an_error_that_says_who_and_why() {
        let error = compile_twice(|name| panic!("no register left for {name}\n"));
        let name = SHIPPED[0].name;
        let begin = format!("faulty 1.2.3 cannot compile the module {name} (sha256:");
        assert!(error.message().starts_with(&begin), "{error}");
        let end = format!("it panicked: no register left for {name}\u{fffd}");
        assert!(error.message().ends_with(&end), "{error}");
        let error = compile_twice(|_| panic!("plain"));
        assert!(error.message().ends_with("it panicked: plain"), "{error}");
        let error = compile_twice(|_| std::panic::panic_any(7));
        assert!(error.message().ends_with("it panicked: no message"), "{error}");
    }
}
