//! Linear memories that are used again.
//!
//! A fresh instance needs zeroed memory. Fresh pages from the system cost more
//! than the work that a small tile does on them: each first touch is a fault,
//! and the kernel clears a page that leaves the cache again before it is used.
//! So the memory of a finished instance is zeroed by the thread that used it,
//! while it is hot, and handed to the next instance.
//!
//! ```text
//!  base                current           accessible            reservation        + guard
//!   │  readable, writable  │   dirty? never   │      PROT_NONE        │    PROT_NONE   │
//!   └──────────────────────┴──────────────────┴───────────────────────┴────────────────┘
//!            Slot::accessible == current while an instance has the slot
//! ```
//!
//! # Ownership
//!
//! A [`Slot`] owns one reservation of address space and unmaps it when it is
//! dropped. It is in exactly one place: in the [`Pool`]'s list, or inside the
//! [`Recycled`] memory of one instance. [`Recycled`] gives it back when the
//! instance's store is dropped, which is after the last WebAssembly frame.
//!
//! # Invariants
//!
//! 1. While an instance has a slot, exactly the bytes below the memory's
//!    current size are accessible. Compiled code leaves out bounds checks and
//!    relies on a fault instead, so one accessible page too many would turn a
//!    trap into a silent read.
//! 2. In the pool, every accessible byte of a slot is zero.
//! 3. A page that becomes accessible is zero: it is fresh from the system, or
//!    it was accessible, zeroed by rule 2, made inaccessible with its contents
//!    kept, and is made accessible again.
//! 4. Nothing at or above the pool's limit ever becomes accessible.
//!
//! Shrinking and growing back costs two system calls a tile when a module's
//! initial memory is smaller than what a tile needs, and none when it is not.

// Memory that compiled code addresses directly cannot be had otherwise.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

/// Bytes of a slot that stay resident in the pool: a 4 MiB tile with its
/// output, and the module's own stack and data. What an instance touched above
/// is given back to the system.
const RESIDENT_BYTES: usize = 16 << 20;
/// How much is zeroed at once: small enough to stay in the first-level cache
/// between looking and clearing.
const ZERO_CHUNK_BYTES: usize = 4096;

/// The memories that no instance has at the moment.
///
/// At most one for each thread that can run at a time is kept, so what lies
/// here unused is bounded by cores × 16 MiB.
#[derive(Debug)]
pub(super) struct Pool {
    free: Mutex<Vec<Slot>>,
    slots_max: usize,
    limit_bytes: usize,
}

impl Pool {
    /// A pool for memories of at most `limit_bytes`.
    pub(super) fn new(limit_bytes: usize) -> Arc<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Pool::with_slots(limit_bytes, threads)
    }

    fn with_slots(limit_bytes: usize, slots_max: usize) -> Arc<Self> {
        // Whole WebAssembly pages, so that every size is one of the system's.
        let limit_bytes = limit_bytes - limit_bytes % super::PAGE_BYTES as usize;
        Arc::new(Pool { free: Mutex::new(Vec::new()), slots_max, limit_bytes })
    }

    /// A slot that can hold `reserved` bytes with `guard` after them. One that
    /// this thread used last is preferred: its pages are in this core's cache.
    fn take(&self, reserved: usize, guard: usize) -> Result<Slot, String> {
        let this_thread = std::thread::current().id();
        {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |slot: &Slot| slot.reserved == reserved && slot.guard == guard;
            let found = free
                .iter()
                .rposition(|slot| fits(slot) && slot.last_thread == this_thread)
                .or_else(|| free.iter().rposition(fits));
            if let Some(at) = found {
                return Ok(free.swap_remove(at));
            }
        }
        Slot::reserve(reserved, guard)
    }

    /// Takes back a slot whose instance is gone.
    fn put(&self, mut slot: Slot) {
        if slot.clean().is_err() {
            return;
        }
        slot.last_thread = std::thread::current().id();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.slots_max {
            free.push(slot);
        }
    }
}

/// What wasmtime asks for memories.
#[derive(Debug)]
pub(super) struct Recycler(pub(super) Arc<Pool>);

// SAFETY: the trait asks for zeroed memory at a stable address with `reserved`
// bytes of address space and `guard` inaccessible bytes after it, inaccessible
// beyond its current size. `Slot::reserve` maps reserved + guard bytes in one
// piece without access and nothing ever moves it; invariants 1 to 3 in the
// module's documentation are kept by `Slot::resize` and `Slot::clean`.
unsafe impl MemoryCreator for Recycler {
    fn new_memory(
        &self,
        _: MemoryType,
        minimum: usize,
        _: Option<usize>,
        reserved: Option<usize>,
        guard: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        let pool = &self.0;
        if minimum > pool.limit_bytes {
            return Err(format!("{minimum} bytes of memory are over the limit of {}", pool.limit_bytes));
        }
        // A memory may never move, so the reservation has to hold all of it.
        let reserved = reserved.unwrap_or(0).max(pool.limit_bytes);
        let mut slot = pool.take(reserved, guard)?;
        slot.resize(minimum).map_err(|e| format!("memory protection: {e}"))?;
        Ok(Box::new(Recycled { slot: Some(slot), pool: Arc::clone(pool) }))
    }
}

/// The linear memory of one instance.
#[derive(Debug)]
struct Recycled {
    /// Taken out only by `drop`.
    slot: Option<Slot>,
    pool: Arc<Pool>,
}

impl Recycled {
    fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("the slot is there until the memory is dropped")
    }
}

// SAFETY: `as_ptr` is the base of a mapping that lives and stays where it is as
// long as `self`; `byte_size` is what is accessible from there (invariant 1);
// `byte_capacity` bytes from there are reserved, and growth up to them happens
// in place.
unsafe impl LinearMemory for Recycled {
    fn byte_size(&self) -> usize {
        self.slot().accessible
    }

    fn byte_capacity(&self) -> usize {
        self.slot().reserved
    }

    fn grow_to(&mut self, new_size: usize) -> wasmtime::Result<()> {
        let limit = self.pool.limit_bytes;
        let slot = self.slot.as_mut().expect("the slot is there until the memory is dropped");
        if new_size > limit || new_size < slot.accessible {
            return Err(wasmtime::Error::msg(format!("memory cannot become {new_size} bytes, the limit is {limit}")));
        }
        slot.resize(new_size).map_err(wasmtime::Error::new)
    }

    fn as_ptr(&self) -> *mut u8 {
        self.slot().base.as_ptr()
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.pool.put(slot);
        }
    }
}

/// One reservation of address space.
#[derive(Debug)]
struct Slot {
    base: NonNull<u8>,
    /// Bytes that a memory may grow to.
    reserved: usize,
    /// Bytes after them that are never accessible.
    guard: usize,
    /// Bytes from the base on that are readable and writable.
    accessible: usize,
    last_thread: ThreadId,
}

// SAFETY: a slot is the only owner of its mapping, which is not bound to a
// thread; it hands out no reference without borrowing itself.
unsafe impl Send for Slot {}
// SAFETY: nothing reads or writes through a shared slot: `clean`, the one
// access from Rust, takes it by mutable reference. (Compiled code goes through
// the pointer that wasmtime took, under the store's exclusive borrow.)
unsafe impl Sync for Slot {}

impl Slot {
    fn reserve(reserved: usize, guard: usize) -> Result<Slot, String> {
        let len = reserved.checked_add(guard).ok_or("the reservation overflows the address space")?;
        // SAFETY: a new anonymous mapping at an address that the system picks
        // overlaps nothing.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), reservation_flags()) }
                .map_err(|e| format!("{len} bytes of address space: {e}"))?;
        let base = NonNull::new(base.cast()).ok_or("the system mapped address 0")?;
        Ok(Slot { base, reserved, guard, accessible: 0, last_thread: std::thread::current().id() })
    }

    /// Makes exactly the first `size` bytes accessible. Contents are kept.
    ///
    /// A multiple of the WebAssembly page is one of the system's page, which
    /// is at most as large on every supported target.
    fn resize(&mut self, size: usize) -> rustix::io::Result<()> {
        assert!(size <= self.reserved, "{size} bytes do not fit a reservation of {}", self.reserved);
        let (from, to, access) = if size > self.accessible {
            (self.accessible, size, MprotectFlags::READ | MprotectFlags::WRITE)
        } else {
            (size, self.accessible, MprotectFlags::empty())
        };
        if from < to {
            // SAFETY: `from..to` lies inside this slot's own mapping (both are
            // at most `reserved`), and no Rust reference into it exists.
            unsafe { rustix::mm::mprotect(self.base.as_ptr().add(from).cast(), to - from, access)? };
            self.accessible = size;
        }
        Ok(())
    }

    /// Makes every accessible byte zero and gives pages beyond what the pool
    /// keeps back to the system.
    fn clean(&mut self) -> rustix::io::Result<()> {
        if self.accessible > RESIDENT_BYTES {
            let excess = self.accessible - RESIDENT_BYTES;
            // SAFETY: the range lies inside this slot's own mapping, no Rust
            // reference into it exists, and its instance is gone. Mapping
            // anew in place drops the old pages and leaves none accessible.
            unsafe {
                rustix::mm::mmap_anonymous(
                    self.base.as_ptr().add(RESIDENT_BYTES).cast(),
                    excess,
                    ProtFlags::empty(),
                    reservation_flags() | MapFlags::FIXED,
                )?;
            }
            self.accessible = RESIDENT_BYTES;
        }
        // SAFETY: the first `accessible` bytes are mapped, readable, writable
        // and initialised (anonymous pages); the instance is gone, so this is
        // the only reference; it ends with this function.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.accessible) };
        zero(bytes);
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapping that `reserve` made, and nothing
        // points into it any more. Failure would only leak address space.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.reserved + self.guard) };
    }
}

fn reservation_flags() -> MapFlags {
    #[cfg(target_os = "linux")]
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    #[cfg(not(target_os = "linux"))]
    let flags = MapFlags::PRIVATE;
    flags
}

/// Zeroes `bytes`, writing only where something is not zero: pages that were
/// never written stay the system's one shared zero page, which is always in
/// the cache, and clean lines are not made dirty.
fn zero(bytes: &mut [u8]) {
    for chunk in bytes.chunks_mut(ZERO_CHUNK_BYTES) {
        // Without an early exit, so that it is compiled to vector code.
        if chunk.iter().fold(0, |all, byte| all | byte) != 0 {
            chunk.fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 65_536;
    const RESERVED: usize = 4 << 30;
    const GUARD: usize = 32 << 20;

    fn memory(pool: &Arc<Pool>, minimum: usize) -> Box<dyn LinearMemory> {
        let ty = MemoryType::new(1, None);
        Recycler(Arc::clone(pool)).new_memory(ty, minimum, None, Some(RESERVED), GUARD).unwrap()
    }

    fn bytes(memory: &mut dyn LinearMemory) -> &mut [u8] {
        // SAFETY: the memory is borrowed mutably and its first `byte_size`
        // bytes are accessible.
        unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), memory.byte_size()) }
    }

    /// What the system says about the page at `at`, from its own list.
    #[cfg(target_os = "linux")]
    fn accessible(at: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let parse = |hex| usize::from_str_radix(hex, 16).unwrap();
            (parse(from)..parse(to)).contains(&at)
        });
        let line = line.expect("the address is mapped");
        line.split(' ').nth(1).unwrap().starts_with("rw")
    }

    #[test]
    fn the_next_instance_sees_zeros_and_the_same_place() {
        let pool = Pool::with_slots(64 * PAGE, 2);
        let mut first = memory(&pool, PAGE);
        let base = first.as_ptr() as usize;
        first.grow_to(5 * PAGE).unwrap();
        bytes(&mut *first).fill(0xAB);
        drop(first);
        for minimum in [3 * PAGE, PAGE, 5 * PAGE] {
            let mut next = memory(&pool, minimum);
            assert_eq!(next.as_ptr() as usize, base, "recycled");
            assert_eq!(next.byte_size(), minimum);
            assert!(bytes(&mut *next).iter().all(|byte| *byte == 0));
            next.grow_to(6 * PAGE).unwrap();
            assert!(bytes(&mut *next).iter().all(|byte| *byte == 0), "zeros after growth from {minimum}");
            bytes(&mut *next).fill(0xCD);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn nothing_above_the_current_size_is_accessible() {
        let pool = Pool::with_slots(64 * PAGE, 2);
        let mut first = memory(&pool, PAGE);
        first.grow_to(9 * PAGE).unwrap();
        let base = first.as_ptr() as usize;
        assert!(accessible(base + 9 * PAGE - 1));
        assert!(!accessible(base + 9 * PAGE));
        drop(first);
        let mut next = memory(&pool, 2 * PAGE);
        assert!(accessible(base + 2 * PAGE - 1));
        for at in [2 * PAGE, 5 * PAGE, 9 * PAGE, RESERVED - 1, RESERVED + GUARD - 1] {
            assert!(!accessible(base + at), "offset {at:#x}");
        }
        next.grow_to(4 * PAGE).unwrap();
        assert!(accessible(base + 4 * PAGE - 1));
        assert!(!accessible(base + 4 * PAGE));
    }

    #[test]
    fn the_limit_holds_and_memories_never_shrink() {
        let pool = Pool::with_slots(4 * PAGE, 2);
        let mut memory = memory(&pool, 2 * PAGE);
        assert!(memory.grow_to(5 * PAGE).is_err());
        assert!(memory.grow_to(PAGE).is_err());
        assert_eq!(memory.byte_size(), 2 * PAGE);
        memory.grow_to(4 * PAGE).unwrap();
        let ty = MemoryType::new(1, None);
        let more = Recycler(Arc::clone(&pool)).new_memory(ty, 5 * PAGE, None, Some(RESERVED), GUARD);
        assert!(more.is_err());
    }

    #[test]
    fn the_pool_is_bounded_in_number_and_in_bytes() {
        let pool = Pool::with_slots(2 * RESIDENT_BYTES, 2);
        let mut all: Vec<_> = (0..4).map(|_| memory(&pool, PAGE)).collect();
        for one in &mut all {
            one.grow_to(2 * RESIDENT_BYTES).unwrap();
            bytes(&mut **one).fill(1);
        }
        drop(all);
        {
            let free = pool.free.lock().unwrap();
            assert_eq!(free.len(), 2);
            assert!(free.iter().all(|slot| slot.accessible == RESIDENT_BYTES));
        }
        let mut next = memory(&pool, PAGE);
        next.grow_to(2 * RESIDENT_BYTES).unwrap();
        assert!(bytes(&mut *next).iter().all(|byte| *byte == 0), "zeros where pages were given back");
    }

    #[test]
    fn a_thread_gets_its_own_slot_back() {
        let pool = Pool::with_slots(4 * PAGE, 4);
        let here = memory(&pool, PAGE);
        let mine = here.as_ptr() as usize;
        let there = {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || memory(&pool, PAGE).as_ptr() as usize).join().unwrap()
        };
        drop(here);
        assert_ne!(mine, there);
        assert_eq!(pool.free.lock().unwrap().len(), 2);
        for _ in 0..3 {
            assert_eq!(memory(&pool, PAGE).as_ptr() as usize, mine);
        }
    }

    #[test]
    fn zeroing_finds_every_byte() {
        for at in [0, 1, 4095, 4096, 8191, 9000, 9998] {
            let mut some = vec![0_u8; 9999];
            some[at] = 1;
            zero(&mut some);
            assert!(some.iter().all(|byte| *byte == 0), "byte {at}");
            zero(&mut some[3..77]);
        }
    }
}
