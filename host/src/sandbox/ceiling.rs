//! Caps what an instance's memory and tables grow to, for every engine alike.
//!
//! WebAssembly lets growth fail softly (`memory.grow` returns −1). A module
//! that is told of a host's limit in that way could compute something else
//! under another limit, so growth beyond the limit traps. Growth beyond what
//! the module's own type declares still fails softly: that answer is a
//! property of the module.

/// Why growth was not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// More linear memory than the limit.
    Memory { desired_bytes: u64, limit_bytes: u64 },
    /// More table elements than the limit.
    Table { desired: u64, limit: u64 },
    /// The system has no more memory.
    System,
}

/// The limits of one instance, and what ran into them.
#[derive(Debug)]
pub(super) struct Ceiling {
    memory_bytes: u64,
    table_elements: u64,
    /// Set once, by whatever made the instance trap.
    refused: Option<Refusal>,
    /// Whether growth was allowed here and is now in the engine's hands.
    allowed: bool,
}

/// What the engine should do about growth that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Grow,
    FailSoftly,
    Trap,
}

impl Ceiling {
    pub(super) fn new(limits: &super::Limits) -> Self {
        Ceiling {
            memory_bytes: limits.memory_bytes,
            table_elements: u64::from(limits.table_elements),
            refused: None,
            allowed: false,
        }
    }

    /// What made the instance trap, if it was growth.
    pub(super) fn refused(&self) -> Option<Refusal> {
        self.refused
    }

    fn judge(&mut self, desired: u64, maximum: Option<u64>, limit: u64, refusal: Refusal) -> Verdict {
        self.allowed = false;
        if maximum.is_some_and(|maximum| desired > maximum) {
            return Verdict::FailSoftly;
        }
        if desired > limit {
            self.refused = Some(refusal);
            return Verdict::Trap;
        }
        self.allowed = true;
        Verdict::Grow
    }

    fn memory(&mut self, desired: usize, maximum: Option<usize>) -> Verdict {
        let (desired, limit) = (desired as u64, self.memory_bytes);
        let refusal = Refusal::Memory { desired_bytes: desired, limit_bytes: limit };
        self.judge(desired, maximum.map(|m| m as u64), limit, refusal)
    }

    fn table(&mut self, desired: usize, maximum: Option<usize>) -> Verdict {
        let (desired, limit) = (desired as u64, self.table_elements);
        self.judge(desired, maximum.map(|m| m as u64), limit, Refusal::Table { desired, limit })
    }

    /// The engine could not grow something. That is the system's fault if the
    /// growth was allowed here, else the module asked for more than its own
    /// type or the address space has.
    fn failed(&mut self) -> Verdict {
        if self.allowed {
            self.refused = Some(Refusal::System);
            Verdict::Trap
        } else {
            Verdict::FailSoftly
        }
    }
}

/// What a trap for growth says inside wasmtime; the message that people see is
/// made from the [`Refusal`].
#[derive(Debug)]
struct GrowthRefused;

impl std::fmt::Display for GrowthRefused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("growth refused")
    }
}

impl std::error::Error for GrowthRefused {}

impl Verdict {
    fn for_wasmtime(self) -> Result<bool, wasmtime::Error> {
        match self {
            Verdict::Grow => Ok(true),
            Verdict::FailSoftly => Ok(false),
            Verdict::Trap => Err(wasmtime::Error::new(GrowthRefused)),
        }
    }

    fn for_wasmi(self) -> Result<bool, wasmi_core::LimiterError> {
        match self {
            Verdict::Grow => Ok(true),
            Verdict::FailSoftly => Ok(false),
            Verdict::Trap => Err(wasmi_core::LimiterError::ResourceLimiterDeniedAllocation),
        }
    }
}

impl wasmtime::ResourceLimiter for Ceiling {
    fn memory_growing(&mut self, _: usize, desired: usize, maximum: Option<usize>) -> Result<bool, wasmtime::Error> {
        self.memory(desired, maximum).for_wasmtime()
    }

    fn memory_grow_failed(&mut self, _: wasmtime::Error) -> Result<(), wasmtime::Error> {
        self.failed().for_wasmtime().map(drop)
    }

    fn table_growing(&mut self, _: usize, desired: usize, maximum: Option<usize>) -> Result<bool, wasmtime::Error> {
        self.table(desired, maximum).for_wasmtime()
    }

    fn table_grow_failed(&mut self, _: wasmtime::Error) -> Result<(), wasmtime::Error> {
        self.failed().for_wasmtime().map(drop)
    }
}

impl Ceiling {
    /// wasmi tells the module all the same, so the refusal is looked for after
    /// the call. It charges for growth after asking, which is no failure here.
    fn failed_in_wasmi(&mut self, error: &wasmi_core::LimiterError) {
        if !matches!(error, wasmi_core::LimiterError::OutOfFuel { .. }) {
            self.failed();
        }
    }
}

impl wasmi::ResourceLimiter for Ceiling {
    fn memory_growing(
        &mut self,
        _: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> Result<bool, wasmi_core::LimiterError> {
        self.memory(desired, maximum).for_wasmi()
    }

    fn memory_grow_failed(&mut self, error: &wasmi_core::LimiterError) {
        self.failed_in_wasmi(error);
    }

    fn table_growing(
        &mut self,
        _: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> Result<bool, wasmi_core::LimiterError> {
        self.table(desired, maximum).for_wasmi()
    }

    fn table_grow_failed(&mut self, error: &wasmi_core::LimiterError) {
        self.failed_in_wasmi(error);
    }

    fn instances(&self) -> usize {
        1
    }

    fn tables(&self) -> usize {
        super::rules::TABLES as usize
    }

    fn memories(&self) -> usize {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_traps_and_the_type_fails_softly() {
        let mut ceiling = Ceiling::new(&super::super::Limits::default());
        let limit = super::super::Limits::MEMORY_BYTES as usize;
        assert_eq!(ceiling.memory(limit, None), Verdict::Grow);
        assert_eq!(ceiling.memory(limit + 65_536, Some(limit)), Verdict::FailSoftly);
        assert_eq!(ceiling.refused(), None);
        assert_eq!(ceiling.memory(limit + 65_536, None), Verdict::Trap);
        assert!(matches!(ceiling.refused(), Some(Refusal::Memory { .. })));
        assert_eq!(ceiling.table(65_537, None), Verdict::Trap);
        assert!(matches!(ceiling.refused(), Some(Refusal::Table { desired: 65_537, .. })));
    }

    #[test]
    fn a_failure_after_an_allowed_request_is_the_systems() {
        let mut ceiling = Ceiling::new(&super::super::Limits::default());
        assert_eq!(ceiling.failed(), Verdict::FailSoftly);
        assert_eq!(ceiling.memory(65_536, None), Verdict::Grow);
        assert_eq!(ceiling.failed(), Verdict::Trap);
        assert_eq!(ceiling.refused(), Some(Refusal::System));
    }
}
