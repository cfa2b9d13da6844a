//! The ABI's calls on WebAssembly: addresses to slices and back, the
//! allocator, the panic buffer.
//!
//! Everything here relies on what the ABI promises: a module runs on one
//! thread; every call sees a fresh instance; the host writes only to memory
//! that `wm_alloc` gave it; windows do not overlap. Nothing is ever freed but
//! the newest allocation, because the instance is thrown away after one call.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::fmt::Write;

use crate::abi::{ALIGN, PANIC_MAX, RunBlock, pack};
use crate::json::Value;
use crate::module::{self, Transform};
use crate::tile::Tile;
use crate::wire;

const PAGE_BYTES: usize = 65_536;

unsafe extern "C" {
    /// Where the linker puts the end of the module's own data.
    static __heap_base: u8;
}

/// Hands out memory in ascending order.
struct Bump {
    /// The first free byte; 0 before the first call.
    top: UnsafeCell<usize>,
}

// SAFETY: a module has one thread.
unsafe impl Sync for Bump {}

#[global_allocator]
static ALLOCATOR: Bump = Bump { top: UnsafeCell::new(0) };

impl Bump {
    fn top(&self) -> usize {
        // SAFETY: one thread, and no reference to `top` outlives an expression.
        let top = unsafe { *self.top.get() };
        if top == 0 { &raw const __heap_base as usize } else { top }
    }

    fn set_top(&self, top: usize) {
        // SAFETY: as in `top`.
        unsafe { *self.top.get() = top }
    }

    /// Makes memory reach `end`: by a quarter at least, so that a plan of
    /// thousands of parts grows it a few times and not for every page, but
    /// never by more than 4 MiB that nobody asked for.
    fn reach(end: usize) -> bool {
        let have = core::arch::wasm32::memory_size(0);
        let need = end.div_ceil(PAGE_BYTES).saturating_sub(have);
        if need == 0 {
            return true;
        }
        let step = need.max((have / 4).min(64));
        core::arch::wasm32::memory_grow(0, step) != usize::MAX || core::arch::wasm32::memory_grow(0, need) != usize::MAX
    }
}

// SAFETY: blocks begin at or after the top and end at the new top, so they
// never overlap; memory below `reach` exists.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let start = self.top().next_multiple_of(layout.align());
        match start.checked_add(layout.size()) {
            Some(end) if Self::reach(end) => {
                self.set_top(end);
                start as *mut u8
            }
            _ => core::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if block as usize + layout.size() == self.top() {
            self.set_top(block as usize);
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let start = block as usize;
        if start + layout.size() == self.top() {
            let Some(end) = start.checked_add(new_size).filter(|&end| Self::reach(end)) else {
                return core::ptr::null_mut();
            };
            self.set_top(end);
            return block;
        }
        if new_size <= layout.size() {
            return block;
        }
        // SAFETY: the caller's layout was valid, and `new_size` is not 0 and
        // below 2³¹ as `realloc` demands.
        let moved = unsafe { self.alloc(Layout::from_size_align_unchecked(new_size, layout.align())) };
        if !moved.is_null() {
            // SAFETY: the old block has `layout.size()` bytes, the new one
            // more, and they do not overlap.
            unsafe { core::ptr::copy_nonoverlapping(block, moved, layout.size()) };
        }
        moved
    }
}

/// The ABI's panic buffer: a u32 length, then text.
#[repr(C)]
pub struct PanicBuffer {
    len: UnsafeCell<u32>,
    text: UnsafeCell<[u8; PANIC_MAX]>,
}

// SAFETY: a module has one thread.
unsafe impl Sync for PanicBuffer {}

/// Exported as a global that holds its address.
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
pub static wm_panic: PanicBuffer = PanicBuffer { len: UnsafeCell::new(0), text: UnsafeCell::new([0; PANIC_MAX]) };

/// Writes into the panic buffer until it is full.
struct PanicText;

impl Write for PanicText {
    fn write_str(&mut self, s: &str) -> core::fmt::Result {
        // SAFETY: one thread, and these references end with this function.
        let (len, text) = unsafe { (&mut *wm_panic.len.get(), &mut *wm_panic.text.get()) };
        let free = &mut text[*len as usize..];
        let mut take = s.len().min(free.len());
        while !s.is_char_boundary(take) {
            take -= 1;
        }
        free[..take].copy_from_slice(&s.as_bytes()[..take]);
        *len += take as u32;
        if take < s.len() { Err(core::fmt::Error) } else { Ok(()) }
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // A text that does not fit is cut.
    let _ = write!(PanicText, "{}", info.message());
    if let Some(at) = info.location() {
        let _ = write!(PanicText, " at {}:{}", at.file(), at.line());
    }
    core::arch::wasm32::unreachable()
}

/// `wm_alloc`.
#[unsafe(no_mangle)]
pub extern "C" fn wm_alloc(len: usize) -> usize {
    match Layout::from_size_align(len, ALIGN) {
        // SAFETY: the ABI says that `len` is not 0, and a bump allocator
        // would not mind.
        Ok(layout) => unsafe { ALLOCATOR.alloc(layout) as usize },
        Err(_) => 0,
    }
}

/// `wm_abi_v1`: the marker, which is never called.
#[unsafe(no_mangle)]
pub extern "C" fn wm_abi_v1() {}

/// `wm_plan` of `T`.
pub fn plan<T: Transform>(request: u32, len: u32) -> i64 {
    // SAFETY: the host wrote `len` bytes there, into a block from `wm_alloc`.
    let document = unsafe { slice::<u8>(request, len) };
    match wire::read_request(document) {
        Ok(request) => answer(wire::write_answer(&module::plan::<T>(&request))),
        Err(why) => panic!("{why}"),
    }
}

/// `wm_run` of `T`.
pub fn run<T: Transform>(block: u32) -> i64 {
    // SAFETY: the host wrote a run block there.
    let wire = unsafe { &*(block as *const [u8; RunBlock::BYTES]) };
    let Some(block) = RunBlock::decode(wire) else { panic!("the run block is of another ABI version") };
    // SAFETY: the host wrote these arrays and windows into the block that
    // `wm_alloc` gave it, aligned, and apart from each other; nothing else
    // refers to the output window.
    let (windows, args, params, output) = unsafe {
        (
            slice::<[u32; 2]>(block.inputs_ptr, block.inputs_len),
            slice::<i64>(block.args_ptr, block.args_len),
            slice::<u8>(block.params_ptr, block.params_len),
            slice_mut(block.out_ptr, block.out_len),
        )
    };
    // SAFETY: as above.
    let inputs: Vec<&[u8]> = windows.iter().map(|&[ptr, len]| unsafe { slice::<u8>(ptr, len) }).collect();
    let params = match Value::parse(params) {
        Ok(params) => params,
        Err(error) => panic!("the parameters are no JSON: {error}"),
    };
    match module::run::<T>(&params, &mut Tile::new(block, inputs, args, output)) {
        Ok(()) => 0,
        Err(error) => answer(wire::write_run_error(&error)),
    }
}

/// A document that stays in memory, packed.
fn answer(document: Vec<u8>) -> i64 {
    let document = document.leak();
    pack(document.as_ptr() as u32, document.len() as u32)
}

/// # Safety
/// `len` initialised values of `T` are at `address`, aligned, and are not
/// written while the slice is there.
unsafe fn slice<'a, T>(address: u32, len: u32) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts(address as *const T, len as usize) }
}

/// # Safety
/// `len` initialised bytes are at `address`, and nothing else refers to them
/// while the slice is there.
unsafe fn slice_mut<'a>(address: u32, len: u32) -> &'a mut [u8] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts_mut(address as *mut u8, len as usize) }
}
