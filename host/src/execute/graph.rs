//! What has to be made, and from what.
//!
//! A [`Graph`] is the applications' checked plans, wired to the checkpoint and
//! to each other. A *target* is one tensor of a plan: an output or a scratch
//! tensor. Views are read through, without being made anywhere, where their
//! runs are long; a computed target, or a view of short runs, that something
//! else reads is *spilled*: made once, before its readers start, and dropped
//! after the last of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::buffers::Buffers;
use super::gather::{Survey, gather};
use super::spill::Spill;
use crate::checkpoint::Checkpoint;
use crate::error::{Code, Error, Result};
use crate::plan::{Body, CheckedPlan, Target};
use crate::recipe::Origin;
use crate::sandbox::Program;
use crate::tensor::{TensorName, TensorType};

/// A view's runs must be this long, on average, for a reader to read through.
const READ_THROUGH_BYTES: u64 = 4096;

/// One application, ready to run.
pub struct Step {
    /// Its plan.
    pub plan: CheckedPlan,
    /// The compiled module; `None` if no target has tiles.
    pub program: Option<Arc<dyn Program>>,
    /// Where its inputs come from, by source number.
    pub inputs: Vec<Source>,
    /// Its parameters, canonical.
    pub params: Vec<u8>,
    /// The module's name, for messages.
    pub module: String,
    /// The final or intermediate name of each output, by role.
    pub names: BTreeMap<String, TensorName>,
}

/// A tensor of an application's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TargetId {
    /// Position of the application.
    pub application: usize,
    /// Position in its plan's targets.
    pub target: usize,
}

/// Where bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A region of a checkpoint file.
    File {
        /// Position in the checkpoint's files.
        file: usize,
        /// The tensor's first byte.
        offset: u64,
        /// The tensor's bytes.
        len: u64,
    },
    /// Another target.
    Target(TargetId),
}

struct SpillSlot {
    /// Whether something reads this target in a way that needs it whole.
    needed: bool,
    /// Wanted tensors that are not made yet and read it, directly or not.
    readers: AtomicUsize,
    /// Held while the content is being made. It is a lock of its own because
    /// making looks at the content.
    making: Mutex<()>,
    content: Mutex<Option<Arc<Spill>>>,
}

/// Everything that an execution reads.
pub struct Graph {
    checkpoint: Arc<Checkpoint>,
    steps: Vec<Step>,
    spills: Vec<Vec<SpillSlot>>,
    pub(super) buffers: Buffers,
    source_bytes_read: AtomicU64,
    pub(super) fuel: AtomicU64,
    pub(super) inside_ns: AtomicU64,
}

impl Graph {
    /// Wires `steps`, whose inputs refer to `checkpoint` and to earlier steps.
    pub fn new(checkpoint: Arc<Checkpoint>, steps: Vec<Step>) -> Self {
        let slot = |_: &Target| SpillSlot {
            needed: false,
            readers: AtomicUsize::new(0),
            making: Mutex::new(()),
            content: Mutex::new(None),
        };
        let mut spills: Vec<Vec<SpillSlot>> = steps.iter().map(|s| s.plan.targets.iter().map(slot).collect()).collect();
        for (application, step) in steps.iter().enumerate() {
            for target in &step.plan.targets {
                let Body::Tiles(groups) = &target.body else { continue };
                for read in groups.iter().flat_map(|g| &g.windows).flat_map(sources_of) {
                    if read as usize >= step.plan.inputs {
                        spills[application][read as usize - step.plan.inputs].needed = true;
                    }
                }
            }
            for input in &step.inputs {
                let Source::Target(id) = input else { continue };
                let target = &steps[id.application].plan.targets[id.target];
                let through = match &target.body {
                    Body::Tiles(_) => false,
                    Body::View(view) => {
                        let survey = Survey::of(view, 0, 0, view.len());
                        survey.mean_run() >= READ_THROUGH_BYTES
                    }
                };
                spills[id.application][id.target].needed |= !through;
            }
        }
        Graph {
            checkpoint,
            steps,
            spills,
            buffers: Buffers::default(),
            source_bytes_read: AtomicU64::new(0),
            fuel: AtomicU64::new(0),
            inside_ns: AtomicU64::new(0),
        }
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Source bytes read so far.
    pub fn source_bytes_read(&self) -> u64 {
        self.source_bytes_read.load(Ordering::Relaxed)
    }

    /// Fuel used by `run` so far.
    pub fn fuel(&self) -> u64 {
        self.fuel.load(Ordering::Relaxed)
    }

    /// Time that the modules' own code ran for tiles so far, over all threads.
    pub fn time_inside_modules(&self) -> Duration {
        Duration::from_nanos(self.inside_ns.load(Ordering::Relaxed))
    }

    /// Where a final tensor's bytes come from, and what it is.
    ///
    /// # Errors
    /// `checkpoint_invalid` or `module_bad_plan` if the origin is not there,
    /// which resolving and planning have ruled out.
    pub fn locate(&self, origin: &Origin) -> Result<(Source, TensorType)> {
        match origin {
            Origin::Source(name) => {
                let source = self.checkpoint.tensors().get(name).ok_or_else(|| {
                    Error::new(Code::CheckpointInvalid, format!("the checkpoint has no tensor {name}"))
                })?;
                let len = source.tensor.len_bytes();
                Ok((Source::File { file: source.file, offset: source.offset, len }, source.tensor.clone()))
            }
            Origin::Output { application, role } => {
                let plan = &self.steps[*application].plan;
                let target = plan
                    .output(role)
                    .ok_or_else(|| Error::new(Code::ModuleBadPlan, format!("the module answers no output '{role}'")))?;
                let id = TargetId { application: *application, target };
                Ok((Source::Target(id), plan.targets[target].tensor.clone()))
            }
        }
    }

    /// How a source's bytes come about: `read`, `moved` or `computed`.
    pub fn how(&self, source: Source) -> &'static str {
        match source {
            Source::File { .. } => "read",
            Source::Target(id) => match &self.target(id).body {
                Body::View(_) => "moved",
                Body::Tiles(_) => "computed",
            },
        }
    }

    pub(crate) fn step(&self, id: TargetId) -> &Step {
        &self.steps[id.application]
    }

    pub(crate) fn target(&self, id: TargetId) -> &Target {
        &self.steps[id.application].plan.targets[id.target]
    }

    /// What source number `number` of `id`'s application is.
    fn numbered(&self, id: TargetId, number: u32) -> Source {
        let step = self.step(id);
        let number = number as usize;
        match number.checked_sub(step.plan.inputs) {
            None => step.inputs[number],
            Some(target) => Source::Target(TargetId { target, ..id }),
        }
    }

    /// Reads bytes of a source.
    pub(super) fn read(&self, source: Source, offset: u64, out: &mut [u8]) -> Result<()> {
        match source {
            Source::File { file, offset: first, .. } => {
                self.source_bytes_read.fetch_add(out.len() as u64, Ordering::Relaxed);
                self.checkpoint.files()[file].read_exact_at(out, first + offset)
            }
            Source::Target(id) => match (self.spilled(id), &self.target(id).body) {
                (Some(spill), _) => spill.read_exact_at(out, offset),
                (None, Body::View(view)) => {
                    gather(view, 0, offset, out, &|s, at, to| self.read_numbered(id, s, at, to), &self.buffers)
                }
                (None, Body::Tiles(_)) => {
                    Err(Error::new(Code::IoError, "a computed tensor was read before it was made"))
                }
            },
        }
    }

    /// Reads bytes of source `number` of `id`'s application.
    pub(super) fn read_numbered(&self, id: TargetId, number: u32, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(self.numbered(id, number), offset, out)
    }

    /// The content of a target that has been spilled.
    pub(super) fn spilled(&self, id: TargetId) -> Option<Arc<Spill>> {
        let slot = &self.spills[id.application][id.target];
        if !slot.needed {
            return None;
        }
        slot.content.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a target's content with `make` unless it is there. Callers that
    /// come while it is being made wait for it, so they must not be threads
    /// that the making needs.
    pub(super) fn spill_once(&self, id: TargetId, make: impl FnOnce() -> Result<Spill>) -> Result<()> {
        let slot = &self.spills[id.application][id.target];
        let _making = slot.making.lock().unwrap_or_else(PoisonError::into_inner);
        if self.spilled(id).is_none() {
            let made = Arc::new(make()?);
            *slot.content.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        }
        Ok(())
    }

    /// The targets that have to be spilled before `source` can be read,
    /// dependencies first; `source` itself is the last of them if it is one.
    pub(super) fn spills_before(&self, source: Source) -> Vec<TargetId> {
        let mut found = Vec::new();
        self.collect_spills(source, &mut found);
        found
    }

    fn collect_spills(&self, source: Source, found: &mut Vec<TargetId>) {
        let Source::Target(id) = source else { return };
        if found.contains(&id) {
            return;
        }
        let reads = match &self.target(id).body {
            Body::View(view) => sources_of(view),
            Body::Tiles(groups) => {
                let mut reads: Vec<u32> = groups.iter().flat_map(|g| &g.windows).flat_map(sources_of).collect();
                reads.sort_unstable();
                reads.dedup();
                reads
            }
        };
        for number in reads {
            self.collect_spills(self.numbered(id, number), found);
        }
        if self.spills[id.application][id.target].needed {
            found.push(id);
        }
    }

    /// Announces that `source` will be made, so that what it reads is kept.
    pub(crate) fn retain(&self, source: Source) {
        for id in self.spills_before(source) {
            self.spills[id.application][id.target].readers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes back what [`retain`](Self::retain) announced: `source` is made.
    pub(crate) fn release(&self, source: Source) {
        for id in self.spills_before(source) {
            let slot = &self.spills[id.application][id.target];
            if slot.readers.fetch_sub(1, Ordering::AcqRel) == 1 {
                *slot.content.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
    }
}

fn sources_of(view: &crate::plan::View) -> Vec<u32> {
    // Turn 0 names the same sources as any other.
    Survey::of(view, 0, 0, view.len()).sources()
}
