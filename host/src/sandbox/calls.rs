//! The ABI's calls, the same for every engine.
//!
//! An engine brings a [`Backend`] that makes instances and an [`Instance`]
//! with the three entry points and the memory. Everything that the ABI says
//! about a call is here, once: where windows lie, what is zeroed, which
//! addresses are believed, what a trap becomes. Nothing that a module answers
//! is used before it was checked against the memory's size at that moment.

use std::ops::Range;
use std::time::Instant;

use weightmill_guest::abi::{ALIGN, PANIC_MAX, RunBlock, RunError, limits, unpack};

use super::ceiling::Refusal;
use super::metadata::shown;
use super::rules::bad_abi;
use super::{Facts, Limits, PlanReply, Program, RunReply, TileIo, TileRequest};
use crate::error::{Code, Error, Result};

/// Makes instances of one compiled module.
pub(super) trait Backend: Send + Sync {
    type Instance: Instance;

    /// A fresh instance with so much fuel.
    fn instantiate(&self, fuel: u64) -> Result<Self::Instance, Stop>;
}

/// One instance. It is dropped after one call, or one trap.
pub(super) trait Instance {
    fn alloc(&mut self, len: u32) -> Result<u32, Stop>;
    fn plan(&mut self, ptr: u32, len: u32) -> Result<i64, Stop>;
    fn run(&mut self, block: u32) -> Result<i64, Stop>;
    fn memory(&mut self) -> &mut [u8];
    fn fuel_left(&mut self) -> u64;
}

/// Why a call ended early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The code trapped.
    Trap(Trap),
    /// All fuel is used.
    OutOfFuel,
    /// The call stack is used up.
    StackOverflow,
    /// Memory or a table could not grow.
    Growth(Refusal),
    /// Not the module's fault.
    Host(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Host(error)
    }
}

/// The traps of WebAssembly, in our own words, so that every engine says the
/// same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trap {
    Unreachable,
    MemoryOutOfBounds,
    TableOutOfBounds,
    NullElement,
    WrongSignature,
    IntegerOverflow,
    DivisionByZero,
    BadConversion,
    /// One that this list does not have.
    Other(String),
}

impl std::fmt::Display for Trap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Trap::Unreachable => "it ran into an unreachable instruction",
            Trap::MemoryOutOfBounds => "it accessed memory out of bounds",
            Trap::TableOutOfBounds => "it accessed a table out of bounds",
            Trap::NullElement => "it called a function through an empty table element",
            Trap::WrongSignature => "it called a function through a table with the wrong signature",
            Trap::IntegerOverflow => "an integer overflowed",
            Trap::DivisionByZero => "it divided an integer by zero",
            Trap::BadConversion => "it converted a float to an integer that cannot hold it",
            Trap::Other(what) => what,
        })
    }
}

/// A compiled module behind the ABI.
pub(super) struct Calls<B> {
    backend: B,
    limits: Limits,
    fuel_per_byte: u64,
    panic_buffer: u32,
}

impl<B: Backend> Calls<B> {
    pub(super) fn new(backend: B, facts: &Facts, limits: Limits) -> Self {
        Calls { backend, limits, fuel_per_byte: facts.metadata.fuel_per_byte, panic_buffer: facts.panic_buffer }
    }

    /// Makes an instance, lets `call` use it, and explains what stopped it.
    /// The instance is gone when this returns.
    fn in_fresh_instance<T>(
        &self,
        fuel: u64,
        call: impl FnOnce(&mut B::Instance) -> Result<T, Stop>,
    ) -> Result<(T, u64)> {
        // Engines count fuel in a signed 64-bit integer.
        let fuel = fuel.min(i64::MAX as u64);
        let mut instance = self.backend.instantiate(fuel).map_err(|stop| explain(stop, fuel, None))?;
        match call(&mut instance) {
            Ok(reply) => Ok((reply, fuel - instance.fuel_left().min(fuel))),
            Err(stop) => {
                let last_words =
                    matches!(stop, Stop::Trap(_)).then(|| panic_text(instance.memory(), self.panic_buffer));
                Err(explain(stop, fuel, last_words.flatten()))
            }
        }
    }
}

impl<B: Backend> Program for Calls<B> {
    fn plan(&self, request: &[u8]) -> Result<PlanReply> {
        let len = u32::try_from(request.len())
            .ok()
            .filter(|len| *len > 0)
            .ok_or_else(|| Error::new(Code::BadParams, format!("a plan request of {} bytes", request.len())))?;
        let (answer, fuel) = self.in_fresh_instance(self.limits.plan_fuel, |instance| {
            let ptr = allocate(instance, len)?;
            window(instance.memory(), ptr, len).copy_from_slice(request);
            let packed = instance.plan(ptr, len)?;
            Ok(document(instance.memory(), packed, limits::ANSWER_BYTES, "wm_plan")?.to_vec())
        })?;
        Ok(PlanReply { answer, fuel })
    }

    fn run(&self, tile: &TileRequest<'_>, io: &mut dyn TileIo) -> Result<RunReply> {
        let layout = Layout::of(tile)?;
        let fuel = self.limits.run_fuel(self.fuel_per_byte, layout.window_bytes);
        let (refusal, fuel) = self.in_fresh_instance(fuel, |instance| {
            let base = allocate(instance, layout.len)?;
            let memory = instance.memory();
            layout.write_block(tile, base, window(memory, base, layout.len));
            for (index, at) in layout.windows.iter().enumerate() {
                io.fill(index, window(memory, base + at.start, at.end - at.start))?;
            }
            let start = Instant::now();
            let packed = instance.run(base)?;
            io.ran(start.elapsed());
            let memory = instance.memory();
            if packed == 0 {
                io.take(window(memory, base + layout.out, tile.out_len))?;
                return Ok(None);
            }
            Ok(Some(refusal(document(memory, packed, limits::ERROR_BYTES, "wm_run")?)?))
        })?;
        Ok(match refusal {
            None => RunReply::Done { fuel },
            Some(error) => RunReply::Refused { error, fuel },
        })
    }
}

/// Calls `wm_alloc` and believes the answer only if it is aligned and `len`
/// bytes from there are inside the memory as it is now.
fn allocate(instance: &mut impl Instance, len: u32) -> Result<u32, Stop> {
    let ptr = instance.alloc(len)?;
    let size = instance.memory().len() as u64;
    if ptr == 0 {
        return Err(Error::new(Code::ModuleOutOfMemory, format!("wm_alloc could not give {len} bytes"))
            .hint("its allocator returned 0; smaller tiles need less memory")
            .into());
    }
    if !(ptr as usize).is_multiple_of(ALIGN) {
        return Err(bad_abi(format!("wm_alloc returned {ptr:#x}, which is not a multiple of {ALIGN}")).into());
    }
    if u64::from(ptr) + u64::from(len) > size {
        return Err(bad_abi(format!(
            "wm_alloc returned {ptr:#x} for {len} bytes, which is beyond the memory of {size} bytes"
        ))
        .into());
    }
    Ok(ptr)
}

/// Bytes that [`allocate`] found to be inside the memory, which never shrinks.
fn window(memory: &mut [u8], ptr: u32, len: u32) -> &mut [u8] {
    &mut memory[ptr as usize..][..len as usize]
}

/// The document that a call returned.
fn document<'m>(memory: &'m [u8], packed: i64, bytes_max: usize, call: &str) -> Result<&'m [u8]> {
    let (ptr, len) = unpack(packed);
    let bad = |what: String| Error::new(Code::ModuleBadAnswer, format!("{call} returned {what}"));
    if len == 0 {
        return Err(bad("a document of 0 bytes".into()));
    }
    if len as usize > bytes_max {
        return Err(bad(format!("a document of {len} bytes, at most {bytes_max} are allowed")));
    }
    let at = ptr as usize..ptr as usize + len as usize;
    memory.get(at).ok_or_else(|| {
        bad(format!("a document of {len} bytes at {ptr:#x}, beyond the memory of {} bytes", memory.len()))
    })
}

/// Why the module refuses a tile. Its texts are made safe to print.
fn refusal(document: &[u8]) -> Result<RunError> {
    let bad = |what: String| Error::new(Code::ModuleBadAnswer, format!("wm_run returned an error document {what}"));
    let mut error: RunError =
        serde_json::from_slice(document).map_err(|e| bad(format!("that is not what the ABI asks for: {e}")))?;
    if error.kind != "data" {
        return Err(bad(format!("of kind '{}', expected 'data'", shown(&error.kind))));
    }
    error.message = printable(&error.message);
    error.hint = error.hint.as_deref().map(printable);
    error.role = error.role.as_deref().map(printable);
    Ok(error)
}

/// The text with its control characters escaped, and with nothing that turns
/// the direction of writing.
fn printable(text: &str) -> String {
    let hostile = |c: char| c.is_control() || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if hostile(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// What the module's panic handler left, if it left anything sensible.
fn panic_text(memory: &[u8], at: u32) -> Option<String> {
    let text = memory.get(at as usize..)?;
    let (len, text) = text.split_first_chunk::<4>()?;
    let len = u32::from_le_bytes(*len) as usize;
    if len == 0 || len > PANIC_MAX {
        return None;
    }
    Some(printable(&String::from_utf8_lossy(text.get(..len)?)))
}

fn explain(stop: Stop, fuel: u64, last_words: Option<String>) -> Error {
    match stop {
        Stop::Host(error) => error,
        Stop::Trap(trap) => match last_words {
            Some(text) => Error::new(Code::ModuleTrapped, format!("the module panicked: {text}")),
            None => Error::new(Code::ModuleTrapped, format!("the module trapped: {trap}")),
        },
        Stop::StackOverflow => Error::new(
            Code::ModuleTrapped,
            format!("the module trapped: its calls nest deeper than a stack of {} bytes", Limits::STACK_BYTES),
        ),
        Stop::OutOfFuel => {
            Error::new(Code::ModuleOutOfFuel, format!("the module used all of its {fuel} units of fuel"))
                .hint("it may be in an endless loop; a tile's fuel grows with 'fuel_per_byte' in the module's metadata")
        }
        Stop::Growth(Refusal::Memory { desired_bytes, limit_bytes }) => Error::new(
            Code::ModuleOutOfMemory,
            format!("the module asked for {desired_bytes} bytes of memory, the limit is {limit_bytes}"),
        ),
        Stop::Growth(Refusal::Table { desired, limit }) => Error::new(
            Code::ModuleOutOfMemory,
            format!("the module asked for a table of {desired} elements, the limit is {limit}"),
        ),
        Stop::Growth(Refusal::System) => {
            Error::new(Code::InsufficientMemory, "the system has no memory left for a module's instance")
        }
    }
}

/// Where everything of one tile lies, relative to what `wm_alloc` returns.
#[derive(Debug)]
struct Layout {
    inputs: u32,
    args: u32,
    params: u32,
    out: u32,
    windows: Vec<Range<u32>>,
    /// Bytes of everything.
    len: u32,
    /// Bytes of the output and all inputs.
    window_bytes: u64,
}

impl Layout {
    fn of(tile: &TileRequest<'_>) -> Result<Layout> {
        let mut end = 0_u64;
        let mut place = |bytes: u64| {
            let start = end.next_multiple_of(ALIGN as u64);
            end = start + bytes;
            start
        };
        place(RunBlock::BYTES as u64);
        let inputs = place(8 * tile.windows.len() as u64);
        let args = place(8 * tile.args.len() as u64);
        let params = place(tile.params.len() as u64);
        let out = place(u64::from(tile.out_len));
        let starts: Vec<u64> = tile.windows.iter().map(|len| place(u64::from(*len))).collect();
        let too_large = || {
            Error::new(
                Code::ModuleBadPlan,
                format!("a tile with its parameters takes {end} bytes, too many to address"),
            )
        };
        let small = |at: u64| u32::try_from(at).map_err(|_| too_large());
        let windows =
            starts.iter().zip(tile.windows).map(|(start, len)| Ok(small(*start)?..small(start + u64::from(*len))?));
        Ok(Layout {
            inputs: small(inputs)?,
            args: small(args)?,
            params: small(params)?,
            out: small(out)?,
            windows: windows.collect::<Result<_>>()?,
            len: small(end)?,
            window_bytes: tile.windows.iter().map(|len| u64::from(*len)).sum::<u64>() + u64::from(tile.out_len),
        })
    }

    /// Writes everything but the input windows. `memory` begins at `base`.
    fn write_block(&self, tile: &TileRequest<'_>, base: u32, memory: &mut [u8]) {
        let block = RunBlock {
            target: tile.target,
            group: tile.group,
            turn: tile.turn,
            offset: tile.offset,
            out_ptr: base + self.out,
            out_len: tile.out_len,
            inputs_ptr: base + self.inputs,
            inputs_len: self.windows.len() as u32,
            args_ptr: base + self.args,
            args_len: tile.args.len() as u32,
            params_ptr: base + self.params,
            params_len: tile.params.len() as u32,
            tile: tile.tile,
        };
        let mut put = |at: u32, bytes: &[u8]| window(memory, at, bytes.len() as u32).copy_from_slice(bytes);
        put(0, &block.encode());
        for (entry, at) in (self.inputs..).step_by(8).zip(&self.windows) {
            put(entry, &(base + at.start).to_le_bytes());
            put(entry + 4, &(at.end - at.start).to_le_bytes());
        }
        for (entry, arg) in (self.args..).step_by(8).zip(tile.args) {
            put(entry, &arg.to_le_bytes());
        }
        put(self.params, tile.params);
        // The allocator may have left anything here.
        window(memory, self.out, tile.out_len).fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile<'a>(windows: &'a [u32], params: &'a [u8]) -> TileRequest<'a> {
        TileRequest { target: 1, group: 2, turn: 3, tile: 4, offset: 5, out_len: 100, windows, args: &[-1, 7], params }
    }

    #[test]
    fn windows_are_aligned_and_apart() {
        let layout = Layout::of(&tile(&[1, 0, 65, 64], b"{}")).unwrap();
        let mut all = vec![0..64, layout.inputs..layout.inputs + 32, layout.args..layout.args + 16];
        all.extend([layout.params..layout.params + 2, layout.out..layout.out + 100]);
        all.extend(layout.windows.clone());
        assert!(all.iter().all(|at| at.start % 64 == 0));
        assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert_eq!(all.last().unwrap().end, layout.len);
        assert_eq!(layout.window_bytes, 230);
    }

    #[test]
    fn a_tile_that_cannot_be_addressed_is_refused() {
        let error = Layout::of(&tile(&[u32::MAX, u32::MAX], b"{}")).unwrap_err();
        assert_eq!(error.code(), Code::ModuleBadPlan);
    }

    #[test]
    fn the_block_says_where_things_are() {
        let request = tile(&[3, 9], b"{\"a\":1}");
        let layout = Layout::of(&request).unwrap();
        let base = 4096;
        let mut memory = vec![0xEE; layout.len as usize];
        layout.write_block(&request, base, &mut memory);
        let block = RunBlock::decode(memory[..64].try_into().unwrap()).unwrap();
        assert_eq!((block.target, block.group, block.turn, block.offset, block.tile), (1, 2, 3, 5, 4));
        let at = |ptr: u32, len: u32| &memory[(ptr - base) as usize..][..len as usize];
        assert_eq!(at(block.params_ptr, block.params_len), b"{\"a\":1}");
        assert_eq!(at(block.args_ptr, 16), [(-1_i64).to_le_bytes(), 7_i64.to_le_bytes()].concat());
        assert_eq!(at(block.out_ptr, block.out_len), [0; 100]);
        let entry = at(block.inputs_ptr + 8, 8);
        assert_eq!(entry[..4], (base + layout.windows[1].start).to_le_bytes());
        assert_eq!(entry[4..], 9_u32.to_le_bytes());
    }

    #[test]
    fn panic_texts_are_believed_only_if_sensible() {
        let mut memory = vec![0; 8192];
        assert_eq!(panic_text(&memory, 16), None);
        memory[16..20].copy_from_slice(&5_u32.to_le_bytes());
        memory[20..25].copy_from_slice(b"a\n\xFFb\x1B");
        assert_eq!(panic_text(&memory, 16).unwrap(), "a\\n\u{FFFD}b\\u{1b}");
        memory[16..20].copy_from_slice(&4093_u32.to_le_bytes());
        assert_eq!(panic_text(&memory, 16), None);
        for at in [8190, 8192, u32::MAX] {
            assert_eq!(panic_text(&memory, at), None);
        }
        memory[8180..8184].copy_from_slice(&9_u32.to_le_bytes());
        assert_eq!(panic_text(&memory, 8180), None);
    }

    #[test]
    fn documents_have_to_be_inside_the_memory() {
        use weightmill_guest::abi::pack;
        let memory = [7; 100];
        assert_eq!(document(&memory, pack(90, 10), 50, "wm_plan").unwrap(), [7; 10]);
        for (ptr, len) in [(90, 11), (u32::MAX, u32::MAX), (0, 51), (5, 0), (101, 1)] {
            let error = document(&memory, pack(ptr, len), 50, "wm_plan").unwrap_err();
            assert_eq!(error.code(), Code::ModuleBadAnswer, "{ptr} {len}");
        }
    }

    #[test]
    fn refusals_are_strict_and_printable() {
        let error = refusal(br#"{"kind":"data","role":"w","index":9,"message":"a\nb\u202ec"}"#).unwrap();
        assert_eq!(error.message, "a\\nb\\u{202e}c");
        for text in ["", "{}", "[1]", r#"{"kind":"params","message":"x"}"#, r#"{"kind":"data","message":"x","more":1}"#]
        {
            assert_eq!(refusal(text.as_bytes()).unwrap_err().code(), Code::ModuleBadAnswer, "{text}");
        }
        assert!(refusal(b"{\"kind\":\"data\",\"message\":\"\xFF\"}").is_err());
    }
}
