//! A block in the consumer's hands.

use std::time::Instant;

use crate::error::{Code, Error, Result};
use crate::tensor::{TensorName, TensorType};

use super::block::PlacedTensor;
use super::device::{Device, Memory};
use super::streamer::Streamer;
use super::trace::Track;

/// A block in a device slot. While this is held the slot is not written to;
/// dropping it gives the slot back after the work that is queued on the
/// compute stream by then.
pub struct DeviceBlock<'s, D: Device> {
    streamer: &'s Streamer<D>,
    block: usize,
    slot: usize,
    resident: bool,
    since: Instant,
}

/// A tensor of a block that is held.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'b> {
    /// Its name.
    pub name: &'b TensorName,
    /// Element type and extents; the elements are dense and row-major.
    pub ty: &'b TensorType,
    /// Its first byte, in the device's address space.
    pub address: u64,
}

impl<'s, D: Device> DeviceBlock<'s, D> {
    pub(super) fn new(streamer: &'s Streamer<D>, block: usize, slot: usize, resident: bool) -> Self {
        DeviceBlock { streamer, block, slot, resident, since: Instant::now() }
    }

    /// The block's name.
    pub fn name(&self) -> &'s str {
        &self.streamer.shared.blocks[self.block].spec.name
    }

    /// Its position in the pass.
    pub fn index(&self) -> usize {
        self.block
    }

    /// Its size.
    pub fn len_bytes(&self) -> u64 {
        self.streamer.shared.blocks[self.block].len_bytes
    }

    /// Whether it stays on the device.
    pub fn is_resident(&self) -> bool {
        self.resident
    }

    /// The buffer that holds it, which may be larger.
    pub fn memory(&self) -> &D::Memory {
        &self.streamer.shared.slots[self.slot].memory
    }

    /// Its first byte, in the device's address space.
    pub fn address(&self) -> u64 {
        self.memory().address()
    }

    /// Its tensors, as they were given.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.placed().iter().map(|t| self.view(t))
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.placed().iter().find(|t| t.name.as_str() == name).map(|t| self.view(t))
    }

    fn placed(&self) -> &'s [PlacedTensor] {
        &self.streamer.shared.blocks[self.block].spec.tensors
    }

    fn view(&self, tensor: &'s PlacedTensor) -> TensorView<'_> {
        TensorView { name: &tensor.name, ty: &tensor.ty, address: self.address() + tensor.offset }
    }

    /// Blocks until the block is in the device's memory. Work on the compute
    /// stream does not need this.
    ///
    /// # Errors
    /// A failure of the copy.
    pub fn wait(&self) -> Result<()> {
        let shared = &self.streamer.shared;
        shared.device.synchronize_event(&shared.slots[self.slot].ready)
    }

    /// Copies a part of the block to the host.
    ///
    /// # Errors
    /// `bad_params` if it is not in the block; a failure of a copy.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.len_bytes()) {
            return Err(Error::new(
                Code::BadParams,
                format!("{} bytes at {offset} are not in block '{}' of {}", out.len(), self.name(), self.len_bytes()),
            ));
        }
        self.wait()?;
        let shared = &self.streamer.shared;
        shared.device.read_back(&shared.compute, self.memory(), offset, out)
    }
}

impl<D: Device> Drop for DeviceBlock<'_, D> {
    fn drop(&mut self) {
        if let Some(trace) = &self.streamer.shared.options.trace {
            trace.host(Track::Consumer, self.name(), self.since, self.len_bytes());
        }
        if !self.resident {
            self.streamer.give_back(self.slot);
            self.streamer.drop_held();
        }
    }
}
