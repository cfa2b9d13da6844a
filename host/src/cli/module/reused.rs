//! What a host would get that ran all tiles in one instance.
//!
//! No host does: the ABI promises a fresh instance for every tile. A module
//! that keeps something from one tile for the next shows in the comparison
//! of the two, and its author can be told that nothing is gained. It is no
//! error: whatever such a module computes, it computes from a fresh state.

use wasmi::{Config, Memory, Store, StoreLimits, StoreLimitsBuilder, TypedFunc};
use weightmill_guest::abi::{ALIGN, RunBlock};

use crate::sandbox::rewrite::{Nans, Rewrite};
use crate::sandbox::{Limits, Module, TileRequest};

/// One instance, kept for many tiles.
pub(super) struct Reused {
    store: Store<StoreLimits>,
    memory: Memory,
    alloc: TypedFunc<u32, u32>,
    run: TypedFunc<u32, i64>,
    fuel_per_byte: u64,
}

/// What a tile in the used instance came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Bytes(Vec<u8>),
    /// It refused the data.
    Refused,
    /// It trapped, or reached a limit.
    Trapped(String),
    /// Its allocator has no more room, which says nothing.
    NoRoom,
}

impl Reused {
    /// `None` if the instance cannot be made.
    pub(super) fn new(module: &Module) -> Option<Self> {
        let mut config = Config::default();
        config.consume_fuel(true);
        let engine = wasmi::Engine::new(&config);
        let rewrite = Rewrite { nans: Some(Nans::Everywhere), fuel: false };
        let compiled = wasmi::Module::new(&engine, &rewrite.apply(module.bytes()).ok()?).ok()?;
        let limits = StoreLimitsBuilder::new().memory_size(Limits::MEMORY_BYTES as usize).build();
        let mut store = Store::new(&engine, limits);
        store.limiter(|limits| limits);
        store.set_fuel(u64::from(u32::MAX)).ok()?;
        let instance = wasmi::Instance::new(&mut store, &compiled, &[]).ok()?;
        Some(Reused {
            memory: instance.get_memory(&store, "memory")?,
            alloc: instance.get_typed_func(&store, "wm_alloc").ok()?,
            run: instance.get_typed_func(&store, "wm_run").ok()?,
            store,
            fuel_per_byte: module.metadata().fuel_per_byte.min(Limits::FUEL_PER_BYTE),
        })
    }

    pub(super) fn run(&mut self, request: &TileRequest<'_>, windows: &[Vec<u8>]) -> Outcome {
        let layout = Layout::of(request, windows);
        let fuel = Limits::default().run_fuel_base.saturating_add(self.fuel_per_byte.saturating_mul(layout.len));
        if self.store.set_fuel(fuel.min(i64::MAX as u64)).is_err() {
            return Outcome::NoRoom;
        }
        let base = match u32::try_from(layout.len).ok().map(|len| self.alloc.call(&mut self.store, len)) {
            Some(Ok(base)) if base != 0 => base,
            Some(Err(trap)) => return Outcome::Trapped(trap.to_string()),
            _ => return Outcome::NoRoom,
        };
        let Some(room) = self.memory.data_mut(&mut self.store).get_mut(base as usize..) else { return Outcome::NoRoom };
        if (room.len() as u64) < layout.len {
            return Outcome::NoRoom;
        }
        layout.write(request, windows, base, room);
        match self.run.call(&mut self.store, base) {
            Err(trap) => Outcome::Trapped(trap.to_string()),
            Ok(0) => {
                let start = base as usize + layout.out;
                let output = self.memory.data(&self.store).get(start..start + request.out_len as usize);
                output.map_or(Outcome::NoRoom, |output| Outcome::Bytes(output.to_vec()))
            }
            Ok(_) => Outcome::Refused,
        }
    }
}

/// Where everything lies, from the address that `wm_alloc` gives.
struct Layout {
    windows: Vec<usize>,
    out: usize,
    table: usize,
    args: usize,
    params: usize,
    len: u64,
}

impl Layout {
    fn of(request: &TileRequest<'_>, windows: &[Vec<u8>]) -> Self {
        let mut at = RunBlock::BYTES;
        let mut place = |bytes: usize| {
            let here = at.next_multiple_of(ALIGN);
            at = here + bytes;
            here
        };
        let windows: Vec<usize> = windows.iter().map(|w| place(w.len())).collect();
        let out = place(request.out_len as usize);
        let table = place(windows.len() * 8);
        let args = place(request.args.len() * 8);
        let params = place(request.params.len());
        Layout { windows, out, table, args, params, len: at as u64 }
    }

    /// `room` begins at `base` and holds `len` bytes at least.
    fn write(&self, request: &TileRequest<'_>, windows: &[Vec<u8>], base: u32, room: &mut [u8]) {
        let address = |offset: usize| base + offset as u32;
        let block = RunBlock {
            target: request.target,
            group: request.group,
            turn: request.turn,
            offset: request.offset,
            out_ptr: address(self.out),
            out_len: request.out_len,
            inputs_ptr: address(self.table),
            inputs_len: windows.len() as u32,
            args_ptr: address(self.args),
            args_len: request.args.len() as u32,
            params_ptr: address(self.params),
            params_len: request.params.len() as u32,
            tile: request.tile,
        };
        let mut put = |at: usize, bytes: &[u8]| room[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &block.encode());
        for (i, (window, &at)) in windows.iter().zip(&self.windows).enumerate() {
            put(at, window);
            put(self.table + i * 8, &address(at).to_le_bytes());
            put(self.table + i * 8 + 4, &(window.len() as u32).to_le_bytes());
        }
        for (i, arg) in request.args.iter().enumerate() {
            put(self.args + i * 8, &arg.to_le_bytes());
        }
        put(self.params, request.params);
        room[self.out..self.out + request.out_len as usize].fill(0);
    }
}
