//! Running one tile: its windows are gathered into the instance's memory, and
//! its output is taken from there.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::gather::gather;
use super::graph::{Graph, Step, TargetId};
use crate::error::{Code, Error, Result};
use crate::plan::{Body, Group, printable};
use crate::sandbox::{RunReply, TileIo, TileRequest};

impl Graph {
    /// Runs tile `turn` of a target's tile group; `out` has the tile's length.
    ///
    /// # Errors
    /// `bad_data` if the module refuses the data; a module code if it
    /// misbehaves; what reading says.
    pub(super) fn run_tile(&self, id: TargetId, group: usize, turn: u64, out: &mut [u8]) -> Result<()> {
        let step = self.step(id);
        let target = self.target(id);
        let (Body::Tiles(groups), Some(program)) = (&target.body, &step.program) else {
            return Err(Error::new(Code::ModuleBadPlan, "a view has no tiles"));
        };
        let group_at = &groups[group];
        let windows: Vec<u32> = group_at.windows.iter().map(|w| w.len() as u32).collect();
        let request = TileRequest {
            target: id.target as u32,
            group: group as u32,
            turn: turn as u32,
            tile: (group_at.first_tile + turn) as u32,
            offset: group_at.offset + turn * u64::from(group_at.len),
            out_len: group_at.len,
            windows: &windows,
            args: &group_at.args,
            params: &step.params,
        };
        let mut io = Windows { graph: self, id, group: group_at, turn, out };
        let label = || step.label(id.target);
        match program.run(&request, &mut io).map_err(|e| e.context(label()))? {
            RunReply::Done { fuel } => {
                self.fuel.fetch_add(fuel, Ordering::Relaxed);
                Ok(())
            }
            RunReply::Refused { error, .. } => {
                let mut refusal = Error::new(Code::BadData, format!("{}: {}", label(), printable(&error.message)));
                if let Some(hint) = &error.hint {
                    refusal = refusal.hint(printable(hint));
                }
                Err(refusal)
            }
        }
    }
}

impl Step {
    /// What a message calls this step's work on one of its targets.
    pub(super) fn label(&self, target: usize) -> String {
        let role = self.plan.targets.get(target).and_then(|t| t.role.as_ref());
        let named = role.and_then(|role| self.names.get(role)).or_else(|| self.names.values().next());
        match named {
            Some(name) => format!("{} of {name}", self.module),
            None => self.module.clone(),
        }
    }
}

struct Windows<'a> {
    graph: &'a Graph,
    id: TargetId,
    group: &'a Group,
    turn: u64,
    out: &'a mut [u8],
}

impl TileIo for Windows<'_> {
    fn fill(&mut self, window: usize, memory: &mut [u8]) -> Result<()> {
        let graph = self.graph;
        let read = |s: u32, at: u64, to: &mut [u8]| graph.read_numbered(self.id, s, at, to);
        gather(&self.group.windows[window], self.turn, 0, memory, &read, &graph.buffers)
    }

    fn take(&mut self, output: &[u8]) -> Result<()> {
        self.out.copy_from_slice(output);
        Ok(())
    }

    fn ran(&mut self, inside: Duration) {
        self.graph.inside_ns.fetch_add(inside.as_nanos() as u64, Ordering::Relaxed);
    }
}
