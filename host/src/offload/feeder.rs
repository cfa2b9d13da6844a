//! The thread that fills slots, in order, ahead of the consumer.
//!
//! It never waits for the device: it queues copies behind the release events
//! of slots that the consumer has given back, and blocks only when all slots
//! are out. While it registers a range, the copies queued before go on.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Code, Error, Result};

use super::device::Device;
use super::options::{Registration, Rung};
use super::registrar::Registrar;
use super::shared::{Delivery, Shared};
use super::sources::{Piece, Sources, staged_pieces};
use super::staging::Staging;

/// What the consumer's side tells the feeder.
pub(super) enum Command {
    /// Begin a pass of this epoch, unless it was begun ahead.
    Pass(u64),
    /// A rotating slot is free again: its release event is recorded.
    Free(usize),
}

/// What is known of the sources, also after the feeder has ended.
pub(super) struct SourceState<D: Device> {
    pub(super) rung: Rung,
    pub(super) passed_over: Vec<String>,
    pub(super) registrar: Option<Registrar<D>>,
}

pub(super) struct Feeder<D: Device> {
    shared: Arc<Shared<D>>,
    state: Arc<Mutex<SourceState<D>>>,
    pieces: Vec<Vec<Piece>>,
    staging_budget: u64,
    staging: Option<Staging<D>>,
    resident: usize,
    /// For each resident block, whether it was fed; that happens once.
    fed: Vec<bool>,
    free: VecDeque<usize>,
    epoch: u64,
    sequence: u64,
    /// The next block of the pass.
    position: Option<usize>,
}

impl<D: Device> Feeder<D> {
    pub(super) fn new(
        shared: Arc<Shared<D>>,
        sources: Sources<D>,
        resident: usize,
    ) -> (Self, Arc<Mutex<SourceState<D>>>) {
        let state = Arc::new(Mutex::new(SourceState {
            rung: sources.rung,
            passed_over: sources.passed_over,
            registrar: sources.registrar,
        }));
        let feeder = Feeder {
            free: (0..shared.slots.len() - resident).collect(),
            shared,
            state: state.clone(),
            pieces: sources.pieces,
            staging_budget: sources.staging_budget,
            staging: None,
            resident,
            fed: vec![false; resident],
            epoch: 0,
            sequence: 0,
            position: None,
        };
        (feeder, state)
    }

    /// Works until the commands end.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        loop {
            let stale = self.epoch != self.shared.epoch.load(Ordering::Acquire);
            let next = self.position.filter(|_| !stale && !self.shared.is_stopping());
            if let Some(block) = next
                && let Some(slot) = self.slot_for(block)
            {
                if let Err(error) = self.feed(block, slot) {
                    if error.code() == Code::RegistrationHung {
                        // Its threads may wait for the driver for ever.
                        std::mem::forget(self.staging.take());
                    }
                    self.shared.fail(error);
                }
                self.position = self.following(block);
                continue;
            }
            match commands.recv() {
                Ok(Command::Free(slot)) => self.free.push_back(slot),
                Ok(Command::Pass(epoch)) if epoch == self.epoch && self.position.is_some() => {}
                Ok(Command::Pass(epoch)) => {
                    self.epoch = epoch;
                    self.position = self.first_from(0);
                }
                Err(_) => break,
            }
        }
    }

    fn slot_for(&mut self, block: usize) -> Option<usize> {
        match block < self.resident {
            true => Some(self.shared.slots.len() - self.resident + block),
            false => self.free.pop_front(),
        }
    }

    fn first_from(&self, block: usize) -> Option<usize> {
        (block..self.shared.blocks.len()).find(|b| self.fed.get(*b) != Some(&true))
    }

    fn following(&mut self, block: usize) -> Option<usize> {
        if let Some(fed) = self.fed.get_mut(block) {
            *fed = true;
        }
        let wrapped = || self.first_from(0).filter(|_| self.shared.options.prefetch_next_pass);
        self.first_from(block + 1).or_else(wrapped)
    }

    fn feed(&mut self, block: usize, slot: usize) -> Result<()> {
        let delivery = Arc::new(Delivery::begin(&self.shared, self.sequence, self.epoch, block, slot)?);
        self.sequence += 1;
        let mut index = 0;
        while let Some(piece) = self.pieces[block].get(index).cloned() {
            match piece {
                Piece::Registered { job, map, from, to } => {
                    if !self.registered(job)? {
                        // From here on everything is staged, this block too.
                        index = 0;
                        continue;
                    }
                    let bytes = from.end - from.start;
                    let shared = &self.shared;
                    shared.device.copy_registered(&shared.copy, &map, from, &shared.slots[slot].memory, to)?;
                    delivery.count_copy(shared, bytes);
                }
                Piece::Staged { segment, len, to } => self.staging()?.push(&delivery, segment, len, to),
            }
            index += 1;
        }
        delivery.piece_done(&self.shared, Ok(0));
        Ok(())
    }

    /// Makes sure that a job is registered; `false` if registration was given
    /// up for staging.
    fn registered(&mut self, job: usize) -> Result<bool> {
        let mut state = lock(&self.state);
        let Some(registrar) = &mut state.registrar else { return Ok(false) };
        let Err(error) = registrar.ensure(job + 1) else { return Ok(true) };
        let options = &self.shared.options;
        let final_word = options.registration == Registration::Require || options.only.is_some();
        if registrar.hung().is_some() || error.code() == Code::Interrupted || final_word {
            return Err(error);
        }
        // Copies from the ranges that are about to be unregistered.
        self.shared.device.synchronize(&self.shared.copy)?;
        registrar.roll_back()?;
        state.registrar = None;
        let rung = state.rung;
        state.passed_over.push(format!("{rung}: {}", error.message()));
        state.rung = Rung::C;
        drop(state);
        self.pieces = self.shared.blocks.iter().map(staged_pieces).collect();
        Ok(false)
    }

    fn staging(&mut self) -> Result<&Staging<D>> {
        if self.staging.is_none() {
            let rung = match lock(&self.state).rung {
                Rung::D => Rung::D,
                _ if self.staging_budget < 2 * self.shared.options.chunk_bytes => Rung::D,
                _ => Rung::C,
            };
            self.staging = Some(Staging::start(&self.shared, rung, self.staging_budget)?);
        }
        self.staging.as_ref().ok_or_else(|| Error::io("staging", "it was not started"))
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
