//! # weightmill ABI, version 1
//!
//! This page is the specification. Everything a module author needs in any
//! language, a C author included, is here; the Rust types below are only one
//! spelling of it, shared by the SDK and the host.
//!
//! ## The module
//!
//! A module is one core WebAssembly file. Its identity is the SHA-256 of its
//! bytes. It has **no imports at all**, one 32-bit unshared memory, no start
//! function, and uses only the 1.0 instruction set plus mutable globals, sign
//! extension, non-trapping float-to-int, multi-value, bulk memory, reference
//! types (tables of `funcref`) and 128-bit SIMD. Relaxed SIMD, threads, 64-bit
//! memory, several memories, exceptions, tail calls, GC and extended constant
//! expressions are refused. It exports:
//!
//! | export | type | meaning |
//! | --- | --- | --- |
//! | `memory` | memory | the only memory |
//! | `wm_abi_v1` | function `() -> ()` | the marker of this version; never called |
//! | `wm_alloc` | function `(len: i32) -> i32` | see *Calls* |
//! | `wm_plan` | function `(ptr: i32, len: i32) -> i64` | see *Plan* |
//! | `wm_run` | function `(ptr: i32) -> i64` | see *Run*; a module without tiles exports one that traps |
//! | `wm_panic` | immutable global `i32` | address of the panic buffer, see *Panics* |
//!
//! Other exports are tolerated and ignored unless their name begins with
//! `wm_`, which is reserved (a marker `wm_abi_v<N>` of another version beside
//! this one is fine).
//!
//! ## Metadata
//!
//! A custom section named `weightmill` holds one JSON object (UTF-8, at most
//! 64 KiB), [`Metadata`]. The host reads it without running the module:
//!
//! ```json
//! {"abi":1,"name":"qkv-regroup","version":"1.0.0","summary":"one line",
//!  "uses_tp":true,"fuel_per_byte":64,"source":"https://…","licence":"Apache-2.0"}
//! ```
//!
//! `abi`, `name` and `version` are required. `uses_tp` (default false) says
//! that the plan depends on the tensor parallel size and rank; a module that
//! does not declare it is always given `{"rank":0,"size":1}`. `fuel_per_byte`
//! (default 64, at most 65536) is the module's fuel allowance for each byte
//! that goes into or out of `wm_run`.
//!
//! ## Calls
//!
//! The host makes a **fresh instance** for every call of `wm_plan` and for
//! every tile: memory, globals and tables are as after instantiation. Nothing
//! a module stores survives a call. In each instance the host calls
//! `wm_alloc` exactly once, then `wm_plan` or `wm_run` exactly once, then
//! throws the instance away. A bump allocator that never frees is enough.
//!
//! `wm_alloc(len)` returns the address of `len` bytes, aligned to
//! [`ALIGN`] (64), that the module does not touch until it is called again, or
//! 0 if it cannot. The host writes its request there. `len` is unsigned and
//! not 0. All integers in memory are little-endian; all addresses and lengths
//! are unsigned 32-bit byte counts.
//!
//! A returned document (a plan's answer, a run's error) is packed into an
//! `i64`: `address << 32 | length`. It may lie anywhere in the memory; the
//! host copies it out before it does anything else.
//!
//! ## Plan
//!
//! `wm_plan(ptr, len)` gets one JSON document, [`PlanRequest`], in canonical
//! form (RFC 8785: sorted keys, no spaces):
//!
//! ```json
//! {"abi":1,
//!  "inputs":[{"dtype":"BF16","index":0,"role":"qkv","shape":[96,24]}],
//!  "outputs":["qkv"],
//!  "params":{"groups":4,"head_dim":8,"q_per_group":1},
//!  "tile_bytes":2097152,
//!  "tp":{"rank":1,"size":2}}
//! ```
//!
//! - `inputs` are sorted by role (bytes), then `index`. A plain role has one
//!   entry with index 0; a **list role** has entries 0, 1, 2 …; an optional
//!   role that is not given has none. Tensors are row-major and dense. The
//!   position in this list is the input's **source number**.
//! - `outputs` are the roles that the recipe asks for, sorted. A module answers
//!   every one of them, and may answer further ones, which are then not made.
//! - `params` is whatever the author of the recipe wrote. A whole number may
//!   stand where a float is meant. Defaults are the module's business.
//! - `tile_bytes` is the size of a tile that the host would like. It may change
//!   how outputs are cut into tiles, and scratch tensors, and nothing else.
//!
//! The answer is JSON too, [`PlanAnswer`]: either an error, or
//!
//! ```json
//! {"outputs":[{"role":"qkv","dtype":"BF16","shape":[48,24],"view":[…parts…]},
//!             {"role":"scale","dtype":"F32","shape":[1],"tiles":[…tiles…]}],
//!  "scratch":[{"dtype":"F32","shape":[17],"tiles":[…]}]}
//! ```
//!
//! Each output has either `view` (bytes moved; the host does it) or `tiles`
//! (bytes computed; the module's `wm_run` does it). `scratch` (optional) are
//! tensors that stay inside the plan.
//!
//! **Source numbers.** With `I` inputs and `O` answered outputs: `0 … I−1` are
//! the request's inputs, `I … I+O−1` the outputs in the answer's order, and
//! from `I+O` on the scratch tensors. A view may read inputs only; tiles may
//! read anything as long as no tensor depends on itself.
//!
//! ### Parts
//!
//! A list of parts describes a run of bytes, one part after the other:
//!
//! | part | bytes |
//! | --- | --- |
//! | `{"copy":S,"offset":B,"len":L,"strides":[…]}` | `L` bytes of source `S` from byte `B` on |
//! | `{"fill":V,"len":L}` | `L` bytes of value `V` (0 to 255) |
//! | `{"repeat":N,"parts":[…]}` | the inner parts, `N` times |
//!
//! A copy's offset grows by `strides[k]` (bytes, not negative) at each turn of
//! its `k`-th enclosing repeat, outermost first; missing strides are 0. `L`
//! and `N` are at least 1. `offset` and `strides` are left out when empty or 0.
//! The bytes of all parts together are exactly the output's bytes, and every
//! copy stays inside its source: the host checks both before anything runs.
//!
//! Q of a grouped QKV with `G` groups of `m` query heads of `d` rows of `b`
//! bytes is one repeat:
//! `{"repeat":G,"parts":[{"copy":0,"len":m·d·b,"strides":[(m+2)·d·b]}]}`.
//!
//! ### Tiles
//!
//! A list of tile groups describes an output in order:
//!
//! ```json
//! {"count":8,"len":1048576,"inputs":[[{"copy":0,"len":2097152,"strides":[2097152]}]],"args":[16]}
//! ```
//!
//! `count` (default 1) tiles of `len` bytes each; `inputs` (default none) has,
//! for each window that the tile reads, a list of parts, for which the group is the
//! outermost enclosing repeat (so `strides[0]` is per tile); `args` (default
//! none) are signed 64-bit integers (within ±(2⁵³−1)) for the module's own use.
//! The lengths of all tiles together are the output's bytes. A tensor without
//! bytes has an empty list.
//!
//! ### Plan errors
//!
//! ```json
//! {"error":{"kind":"input","role":"qkv","message":"…","hint":"…"}}
//! ```
//!
//! `kind` is `"params"` (with `param`), `"input"` (with `role`) or `"tp"`.
//! `message` says what was expected and what was found, in lower case and
//! without a full stop; `hint` (optional) says what to do.
//!
//! ## Run
//!
//! For every tile the host gathers the tile's inputs into windows of the
//! fresh instance's memory, and calls `wm_run(ptr)` with the address of a
//! **run block** of 64 bytes:
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | `abi`: 1 |
//! | 4 | u32 | `target`: which tensor: `0 … O−1` the outputs in the answer's order, then the scratch tensors |
//! | 8 | u32 | `group`: position of the tile's group in `tiles` |
//! | 12 | u32 | `turn`: the tile's position in the group |
//! | 16 | u64 | `offset`: the tile's first byte in the target tensor |
//! | 24 | u32 | `out_ptr`: the output window, zeroed |
//! | 28 | u32 | `out_len`: its length in bytes |
//! | 32 | u32 | `inputs_ptr`: array of `{u32 ptr, u32 len}`, one an input window |
//! | 36 | u32 | `inputs_len`: how many |
//! | 40 | u32 | `args_ptr`: array of i64 |
//! | 44 | u32 | `args_len`: how many |
//! | 48 | u32 | `params_ptr`: the parameters, the canonical JSON bytes of the plan's request |
//! | 52 | u32 | `params_len`: their length in bytes |
//! | 56 | u32 | `tile`: the tile's position in the target, counted over all groups |
//! | 60 | u32 | 0 |
//!
//! The block lies where `wm_alloc` said; the arrays, the parameters and the
//! windows lie behind it in the same allocation, each aligned to 64 bytes,
//! without overlap. What is between them is not defined, and the address of
//! something empty is not to be followed. The module fills the output window
//! and returns 0. Bytes that it does not write stay zero. Or it
//! returns a packed JSON document, [`RunError`]:
//!
//! ```json
//! {"kind":"data","role":"w","index":9,"message":"NaN at flat index 9 of w cannot be quantised","hint":"…"}
//! ```
//!
//! which fails the build (`bad_data`); of several the host reports the one of
//! the first tile, so that the text does not depend on threads.
//!
//! ## Panics
//!
//! The global `wm_panic` holds the address of a buffer: a u32 length (0 at
//! first), then that many bytes of UTF-8, at most [`PANIC_MAX`]. After a trap
//! the host reads it and shows the text with the tensor's name.
//!
//! ## Determinism
//!
//! NaN results of arithmetic are canonical (`0x7FC00000`); SIMD is on; memory
//! growth past the limit traps; fuel is counted. A trap, a limit or a wrong
//! answer is a failure and is never cached.
//!
//! ## Limits
//!
//! See [`limits`]. Every length, offset and product is at most 2⁵³−1.

mod answer;
mod dtype;
mod messages;
mod part;
mod run;

pub use answer::PlanAnswer;
pub use dtype::{Dtype, UnknownDtype};
pub use messages::{
    Metadata, PlanErrorBody, PlanErrorKind, PlanInput, PlanOutput, PlanRequest, RunError, Scratch, TileGroup, Tp,
};
pub use part::Part;
pub use run::{RunBlock, pack, unpack};

/// The version that this page describes.
pub const ABI_VERSION: u32 = 1;
/// Alignment of `wm_alloc`'s answer and of every window, in bytes.
pub const ALIGN: usize = 64;
/// The most bytes of text that the panic buffer holds.
pub const PANIC_MAX: usize = 4092;
/// The name of the custom section with the metadata.
pub const METADATA_SECTION: &str = "weightmill";

/// What the host refuses to go beyond.
pub mod limits {
    /// Bytes of a module file.
    pub const MODULE_BYTES: usize = 16 << 20;
    /// Bytes of the metadata section.
    pub const METADATA_BYTES: usize = 64 << 10;
    /// Bytes of a plan's answer.
    pub const ANSWER_BYTES: usize = 16 << 20;
    /// Bytes of a run's error document.
    pub const ERROR_BYTES: usize = 64 << 10;
    /// Inputs of one application.
    pub const INPUTS: usize = 65_536;
    /// Answered outputs, and as many scratch tensors.
    pub const OUTPUTS: usize = 256;
    /// Dimensions of an output.
    pub const DIMS: usize = 32;
    /// Parts (of every kind) in one answer.
    pub const PARTS: usize = 1 << 20;
    /// Repeats that enclose a part; a tile group counts as one.
    pub const DEPTH: usize = 24;
    /// Input windows of a tile.
    pub const WINDOWS: usize = 1024;
    /// Integers in a tile group's `args`.
    pub const ARGS: usize = 256;
    /// Tiles of one tensor.
    pub const TILES: u64 = 1 << 24;
    /// Bytes of all windows of one tile.
    pub const TILE_BYTES: u64 = 64 << 20;
    /// Any length, offset, stride or product of extents.
    pub const SIZE: u64 = (1 << 53) - 1;
}
