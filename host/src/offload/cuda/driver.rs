//! The driver's calls. All `unsafe` of the offload core is here.
//!
//! Invariants that the SAFETY comments refer to:
//! - **C1** A [`Context`] exists only if the driver was loaded and initialised;
//!   its primary context is retained until the last `Arc<Context>` is gone.
//!   Every handle below keeps such an `Arc`.
//! - **C2** A handle holds what the driver gave it, and gives it back once, in
//!   `drop`, after the context's work is done, unless the device was abandoned.
//! - **C3** Before every call the context is made current on the calling thread.

#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use memmap2::{Advice, MmapMut};

use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::super::device::{Access, DeviceInfo};
use super::super::ranges::{PAGE_BYTES, PageRange};
use super::CudaLeafTable;

/// `CU_MEMHOSTREGISTER_READ_ONLY`.
const REGISTER_READ_ONLY: c_uint = 0x08;

unsafe extern "C" {
    safe fn _exit(status: c_int) -> !;
}

/// Ends the process at once: no destructors, no exit handlers. For the way out
/// after `registration_hung`, where the driver's own exit handlers could wait
/// for the call that hangs. Flush what must be written before.
pub fn exit_without_cleanup(status: u8) -> ! {
    _exit(c_int::from(status))
}

fn failed(doing: &str) -> impl FnOnce(DriverError) -> Error + '_ {
    move |error| {
        let code = match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Code::InsufficientMemory,
            _ => Code::IoError,
        };
        Error::new(code, format!("{doing}: {}", text(error)))
    }
}

/// `CUDA_ERROR_… (what it means)`.
fn text(error: DriverError) -> String {
    let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |n| n.to_string_lossy().into_owned());
    match error.error_string() {
        Ok(meaning) => format!("{name} ({})", meaning.to_string_lossy()),
        Err(_) => name,
    }
}

/// A device's primary context.
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// A call hung: nothing is given back any more.
    pub(super) abandoned: AtomicBool,
}

// SAFETY: a context handle may be used from any thread on which it is current
// (C3), and the driver's calls are thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(ordinal: usize) -> Result<(Self, DeviceInfo)> {
        // SAFETY: only looks for the library and loads it.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::new(Code::NoDevice, "there is no CUDA driver on this machine: libcuda was not found")
                .hint("install the NVIDIA driver, or use --device host"));
        }
        let no_device = |e| Error::new(Code::NoDevice, format!("CUDA device {ordinal} cannot be used: {}", text(e)));
        result::init().map_err(no_device)?;
        let count = result::device::get_count().map_err(no_device)?;
        if ordinal >= count as usize {
            return Err(Error::new(
                Code::NoDevice,
                format!("there is no CUDA device {ordinal}: this machine has {count}"),
            )
            .hint("devices count from 0; CUDA_VISIBLE_DEVICES hides some"));
        }
        let device = result::device::get(ordinal as c_int).map_err(no_device)?;
        // SAFETY: `device` comes from the driver.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) }.map_err(no_device);
        let info = DeviceInfo {
            kind: "cuda",
            ordinal,
            name: result::device::get_name(device).map_err(no_device)?,
            driver: driver_version(),
            registers_read_only: attribute(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)? == 1,
            registers_writable: attribute(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)? == 1,
            probe_registration: true,
            unified_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? == 1,
            // SAFETY: `device` comes from the driver.
            memory_bytes: unsafe { result::device::total_mem(device) }.map_err(no_device)? as u64,
        };
        // SAFETY: `device` comes from the driver; released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(no_device)?;
        Ok((Context { device, context, abandoned: AtomicBool::new(false) }, info))
    }

    fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained (C1).
        unsafe { result::ctx::set_current(self.context) }
    }

    /// Whether handles may still be given back; then the context is current
    /// and its work is done.
    fn quiesce(&self) -> bool {
        // After a failure on the device waiting fails as well, and freeing is
        // all that is left to do.
        !self.abandoned.load(Ordering::Relaxed) && self.bind().is_ok() && {
            result::ctx::synchronize().ok();
            true
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.abandoned.load(Ordering::Relaxed) {
            // SAFETY: retained in `open`; no handle is left, since each keeps
            // an Arc of this (C1).
            unsafe { result::primary_ctx::release(self.device) }.ok();
        }
    }
}

fn driver_version() -> String {
    let mut version = 0;
    // SAFETY: writes one integer.
    let cuda = match unsafe { sys::cuDriverGetVersion(&mut version) }.result() {
        Ok(()) => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        Err(_) => "CUDA of unknown version".into(),
    };
    match std::fs::read_to_string("/sys/module/nvidia/version") {
        Ok(module) => format!("{}, {cuda}", module.trim()),
        Err(_) => cuda,
    }
}

/// Device memory.
pub(super) struct Allocation {
    address: sys::CUdeviceptr,
    context: Arc<Context>,
}

impl Allocation {
    pub(super) fn new(context: &Arc<Context>, len_bytes: u64) -> Result<Self> {
        let doing = format!("allocating {len_bytes} bytes of device memory");
        context.bind().map_err(failed(&doing))?;
        // SAFETY: C3; the memory is only ever written by copies and kernels.
        let address = unsafe { result::malloc_sync(len_bytes as usize) }.map_err(failed(&doing))?;
        Ok(Allocation { address, context: context.clone() })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.quiesce() {
            // SAFETY: C2, C3.
            unsafe { result::free_sync(self.address) }.ok();
        }
    }
}

/// Page-locked host memory: an anonymous mapping, registered. The driver's own
/// allocator takes 0.6 ms a MiB, all in one thread; here the pages are touched
/// by the thread that wants them, huge ones where the system has them, and
/// registering touched pages is quick.
pub(super) struct HostAllocation {
    /// `Some` until `drop`.
    map: Option<MmapMut>,
    context: Arc<Context>,
}

impl HostAllocation {
    pub(super) fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        let doing = format!("allocating {len} bytes of pinned memory");
        let out_of_memory = |e| Error::new(Code::InsufficientMemory, format!("{doing}: {e}"));
        let mut map = MmapMut::map_anon(len.max(1)).map_err(out_of_memory)?;
        // Only a hint.
        map.advise(Advice::HugePage).ok();
        map.iter_mut().step_by(PAGE_BYTES as usize).for_each(|byte| *byte = 0);
        context.bind().map_err(failed(&doing))?;
        // SAFETY: the range is a whole mapping, unregistered in `drop` before
        // it is unmapped.
        unsafe { sys::cuMemHostRegister_v2(map.as_mut_ptr().cast(), map.len(), 0) }.result().map_err(|e| {
            // Whatever the driver says, there is no pinned memory.
            Error::new(Code::InsufficientMemory, format!("{doing}: {}", text(e)))
        })?;
        Ok(HostAllocation { map: Some(map), context: context.clone() })
    }

    /// The bytes. A copy by the device into them is ordered by an event before
    /// anyone looks (the device trait's rule).
    pub(super) fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// The bytes. A device that still reads them, against the rule, reads
    /// bytes of either kind.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        let Some(mut map) = self.map.take() else { return };
        let unregistered = self.context.quiesce()
            // SAFETY: registered in `new` (C2, C3).
            && unsafe { sys::cuMemHostUnregister(map.as_mut_ptr().cast()) }.result().is_ok();
        if !unregistered {
            // What is still registered must not be unmapped.
            std::mem::forget(map);
        }
    }
}

/// A non-blocking stream.
pub struct CudaStream {
    stream: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: stream handles may be used from any thread (C3).
unsafe impl Send for CudaStream {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind().map_err(failed("creating a stream"))?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(CudaStream { stream: stream.map_err(failed("creating a stream"))?, context: context.clone() })
    }

    /// The `CUstream`, valid while this lives, for libraries that queue work.
    pub fn as_raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    pub(super) fn wait(&self, event: &CudaEvent) -> Result<()> {
        self.context.bind().map_err(failed("waiting for an event"))?;
        // SAFETY: both handles are alive (C2).
        unsafe { result::stream::wait_event(self.stream, event.event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(failed("waiting for an event"))
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        self.context.bind().map_err(failed("waiting for a stream"))?;
        // SAFETY: the handle is alive (C2).
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("waiting for a stream"))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.context.quiesce() {
            // SAFETY: C2, C3.
            unsafe { result::stream::destroy(self.stream) }.ok();
        }
    }
}

/// An event.
pub struct CudaEvent {
    event: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: event handles may be used from any thread (C3).
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    pub(super) fn new(context: &Arc<Context>, timed: bool) -> Result<Self> {
        context.bind().map_err(failed("creating an event"))?;
        let flags = match timed {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let event = result::event::create(flags).map_err(failed("creating an event"))?;
        Ok(CudaEvent { event, context: context.clone() })
    }

    pub(super) fn record(&self, stream: &CudaStream) -> Result<()> {
        self.context.bind().map_err(failed("recording an event"))?;
        // SAFETY: both handles are alive (C2).
        unsafe { result::event::record(self.event, stream.stream) }.map_err(failed("recording an event"))
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        self.context.bind().map_err(failed("waiting for an event"))?;
        // SAFETY: the handle is alive (C2).
        unsafe { result::event::synchronize(self.event) }.map_err(failed("waiting for an event"))
    }

    pub(super) fn elapsed_ms(&self, to: &CudaEvent) -> Result<f64> {
        self.context.bind().map_err(failed("timing two events"))?;
        // SAFETY: both handles are alive (C2).
        unsafe { result::event::elapsed(self.event, to.event) }.map(f64::from).map_err(failed("timing two events"))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if !self.context.abandoned.load(Ordering::Relaxed) && self.context.bind().is_ok() {
            // SAFETY: C2, C3; destroying an event that is in use is allowed,
            // the driver does it when it is done.
            unsafe { result::event::destroy(self.event) }.ok();
        }
    }
}

/// Registers a range of a mapping. The error is the driver's text.
pub(super) fn register(context: &Context, map: &FileMap, range: PageRange, access: Access) -> Result<(), String> {
    let flags = match access {
        Access::ReadOnly => REGISTER_READ_ONLY,
        Access::ReadWrite => 0,
    };
    context.bind().map_err(text)?;
    let start = map.as_ptr().wrapping_add(range.start() as usize).cast_mut().cast();
    // SAFETY: the caller has checked that the range lies in the mapping, and
    // unregisters it before the mapping goes. No reference to these bytes
    // exists, and the device only reads them.
    unsafe { sys::cuMemHostRegister_v2(start, range.len() as usize, flags) }.result().map_err(text)
}

/// Unregisters a range. The error is the driver's text.
pub(super) fn unregister(context: &Context, map: &FileMap, range: PageRange) -> Result<(), String> {
    context.bind().map_err(text)?;
    let start = map.as_ptr().wrapping_add(range.start() as usize).cast_mut().cast();
    // SAFETY: the caller has checked that exactly this range is registered.
    unsafe { sys::cuMemHostUnregister(start) }.result().map_err(text)
}

/// Copies from a registered range to a device address.
pub(super) fn copy_mapped(stream: &CudaStream, map: &FileMap, from: Range<u64>, to: u64) -> Result<()> {
    stream.context.bind().map_err(failed("copying to the device"))?;
    let source = map.as_ptr().wrapping_add(from.start as usize).cast();
    let len = (from.end - from.start) as usize;
    // SAFETY: the caller has checked that the bytes are registered and that
    // they fit behind `to`. Registered pages are pinned, so even a file that
    // was truncated meanwhile is read without a fault.
    unsafe { sys::cuMemcpyHtoDAsync_v2(to, source, len, stream.stream) }
        .result()
        .map_err(failed("copying to the device"))
}

/// Copies host memory to a device address. If it is pinned, the copy is in
/// flight at return.
pub(super) fn copy_to_device(stream: &CudaStream, from: &[u8], to: u64) -> Result<()> {
    stream.context.bind().map_err(failed("copying to the device"))?;
    // SAFETY: the caller has checked that the bytes fit behind `to`. Pinned
    // memory stays allocated while copies are in flight (C2); pageable memory
    // has been read when this returns.
    unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream.stream) }
        .result()
        .map_err(failed("copying to the device"))
}

/// Copies device memory to the host, and waits for it.
pub(super) fn copy_to_host(stream: &CudaStream, from: u64, out: &mut [u8]) -> Result<()> {
    stream.context.bind().map_err(failed("copying to the host"))?;
    // SAFETY: the caller has checked that the bytes lie behind `from`; `out`
    // is borrowed until the copy is done.
    unsafe { sys::cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from, out.len(), stream.stream) }
        .result()
        .map_err(failed("copying to the host"))?;
    stream.synchronize()
}

/// Copies `len` bytes of device memory into pinned memory, asynchronously.
pub(super) fn copy_to_pinned(
    stream: &CudaStream,
    from: u64,
    to: &HostAllocation,
    offset: usize,
    len: usize,
) -> Result<()> {
    let Some(target) = to.bytes().get(offset..).filter(|rest| len <= rest.len()) else {
        let why = format!("{len} bytes at {offset} do not fit a pinned buffer of {}", to.bytes().len());
        return Err(Error::io("copying to the host", why));
    };
    stream.context.bind().map_err(failed("copying to the host"))?;
    // SAFETY: the bytes fit, as checked; the buffer stays allocated while
    // copies are in flight (C2), and nobody looks at these bytes before the
    // event behind this copy.
    unsafe { sys::cuMemcpyDtoHAsync_v2(target.as_ptr().cast_mut().cast(), from, len, stream.stream) }
        .result()
        .map_err(failed("copying to the host"))
}

/// A kernel, and the module that it is in.
pub(super) struct Kernel {
    module: sys::CUmodule,
    function: sys::CUfunction,
    context: Arc<Context>,
}

// SAFETY: module and function handles may be used from any thread (C3).
unsafe impl Send for Kernel {}
// SAFETY: as above; launching does not change them.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub(super) fn load(context: &Arc<Context>, ptx: &str, name: &str) -> Result<Self> {
        let doing = format!("loading the kernel {name}");
        let c_text = |t: &str| CString::new(t).map_err(|e| Error::io(&doing, e));
        let (image, symbol) = (c_text(ptx)?, c_text(name)?);
        context.bind().map_err(failed(&doing))?;
        // SAFETY: the image is a PTX text that ends with a zero byte.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(failed(&doing))?;
        // SAFETY: the module was just loaded.
        match unsafe { result::module::get_function(module, symbol) } {
            Ok(function) => Ok(Kernel { module, function, context: context.clone() }),
            Err(error) => {
                // SAFETY: the module was just loaded and is not used.
                unsafe { result::module::unload(module) }.ok();
                Err(failed(&doing)(error))
            }
        }
    }

    /// Launches `leaf_sha256(block, leaves, count, hashes)`.
    pub(super) fn launch(
        &self,
        stream: &CudaStream,
        (blocks, threads): (u32, u32),
        mut block: u64,
        table: &CudaLeafTable,
    ) -> Result<()> {
        let CudaLeafTable { leaves_at: mut leaves, hashes_at: mut hashes, mut count, .. } = *table;
        self.context.bind().map_err(failed("hashing on the device"))?;
        let mut parameters: [*mut c_void; 4] =
            [(&raw mut block).cast(), (&raw mut leaves).cast(), (&raw mut count).cast(), (&raw mut hashes).cast()];
        let (grid, block_size) = ((blocks, 1, 1), (threads, 1, 1));
        // SAFETY: the parameters are of the kernel's types and are copied by
        // the launch. The addresses are of live allocations: the table holds
        // `count` leaves and has room for their hashes, and the leaves' bounds
        // were checked against the block they were made for.
        unsafe { result::launch_kernel(self.function, grid, block_size, 0, stream.stream, &mut parameters) }
            .map_err(failed("hashing on the device"))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if self.context.quiesce() {
            // SAFETY: C2, C3.
            unsafe { result::module::unload(self.module) }.ok();
        }
    }
}
