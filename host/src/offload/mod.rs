//! The offload core: streams the blocks of an entry into device memory at the
//! speed of the link.
//!
//! ```text
//!  files ── FileMap ── Registrar ──┐ registered (rungs A, B): one copy a chunk
//!    │                             ▼
//!    └─ pread ─► Staging threads ─► copy stream ──► slot ──► verify stream
//!  Pack ───────► (rungs C, D)          ▲             │          │ hashes match
//!                                      │ release     ▼ ready    ▼
//!                                      └───────── compute stream (consumer)
//! ```
//!
//! [`Streamer`] is the consumer's side: it begins passes and hands out
//! [`DeviceBlock`]s. A feeder thread runs ahead of it and fills free slots; it
//! never waits for the device, only for slots. All ordering between the copy,
//! verify and compute streams is by events on the device.
//!
//! Ownership: a [`DeviceBlock`] keeps its slot; the streamer keeps the slots,
//! the streams and the registrations; a registration keeps its mapping. On the
//! way out, whether by [`Streamer::close`], a drop or a panic: the feeder
//! stops, the device is waited for, ranges are unregistered last first, and
//! only then unmapped.
//!
//! | file | what |
//! | --- | --- |
//! | `block` | what is streamed |
//! | `device`, `host`, `cuda`, `faulty` | the device trait and the devices |
//! | `ranges`, `budget`, `probe`, `registrar`, `node_lock`, `table`, `shared_copy`, `sources` | registration |
//! | `staging` | pinned and pageable buffers |
//! | `shared`, `feeder`, `streamer`, `handle` | streaming |
//! | `options`, `trace`, `bench` | options and reports, time line, measurements |

pub mod bench;
mod block;
mod budget;
mod cuda;
mod device;
mod faulty;
mod feeder;
mod handle;
mod host;
mod node_lock;
mod options;
mod probe;
mod ranges;
mod registrar;
mod shared;
mod shared_copy;
mod sources;
mod staging;
mod streamer;
mod table;
mod trace;

pub use block::{BlockSpec, Content, LeafHashes, Pack, PlacedTensor, SEGMENT_ALIGN, Segment};
pub use budget::{CgroupRoom, PinBudget};
pub use cuda::{CudaDevice, CudaEvent, CudaMemory, CudaPinned, CudaStream, exit_without_cleanup};
pub use device::{Access, Device, DeviceInfo, Leaf, Memory, Pinned};
pub use faulty::{Called, Faults, FaultyDevice};
pub use handle::{DeviceBlock, TensorView};
pub use host::{HostDevice, HostMemory};
pub use node_lock::NodeLock;
pub use options::{Fatal, PassReport, RegisterWhen, Registration, Rung, StreamOptions, StreamReport, VerifyReport};
pub use probe::{PROBE_SUBCOMMAND, Probe, ProbeFolder, ProbeOutcome, ProbeRecords, probe_child_main};
pub use ranges::{PAGE_BYTES, PageRange};
pub use shared_copy::{Swept, sweep_shared_copies};
pub use streamer::{Pass, Streamer};
pub use trace::{Trace, Track};

#[cfg(test)]
mod tests;
