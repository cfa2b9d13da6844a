//! Carrying out a plan tile by tile in any order, by the letter of the ABI,
//! on tensors in memory. It shares no code with the executor, so that `check`
//! compares two ways to the same bytes.

use std::collections::BTreeMap;

use weightmill_guest::abi::{PlanAnswer, TileGroup, Tp};
use weightmill_guest::native::gather;

use crate::canonical::to_canonical;
use crate::error::{Code, Error, Result};
use crate::plan::{self, CheckedPlan, printable};
use crate::sandbox::{Module, Program, RunReply, TileIo, TileRequest};
use crate::tensor::TensorType;

/// A use of a module, its inputs in memory.
pub(super) struct Application {
    pub(super) name: String,
    pub(super) params: serde_json::Value,
    pub(super) tp: Tp,
    /// By role, then index.
    pub(super) inputs: Vec<(String, u64, TensorType, Vec<u8>)>,
    /// Sorted.
    pub(super) outputs: Vec<String>,
}

impl Application {
    pub(super) fn input_bytes(&self) -> u64 {
        self.inputs.iter().map(|(.., bytes)| bytes.len() as u64).sum()
    }
}

/// In which order the tiles of a tensor are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Ascending,
    /// Each tile twice, all in a seeded random order.
    ShuffledTwice,
}

/// A finished application.
pub(super) struct Made {
    pub(super) outputs: BTreeMap<String, (TensorType, Vec<u8>)>,
    /// Tiles of all targets.
    pub(super) tiles: u64,
    /// A tile that gave other bytes the second time.
    pub(super) unsteady: Option<String>,
}

/// Runs one tile over windows that are in memory.
pub(super) type RunTile<'a> = dyn FnMut(&TileRequest<'_>, &[Vec<u8>]) -> Result<Vec<u8>> + 'a;

/// Runs a tile as the executor does, in an instance of its own.
pub(super) fn fresh(program: &dyn Program, request: &TileRequest<'_>, windows: &[Vec<u8>]) -> Result<Vec<u8>> {
    let mut io = InMemory { windows, output: Vec::new() };
    match program.run(request, &mut io)? {
        RunReply::Done { .. } => Ok(io.output),
        RunReply::Refused { error, .. } => Err(Error::new(Code::BadData, printable(&error.message))),
    }
}

struct InMemory<'a> {
    windows: &'a [Vec<u8>],
    output: Vec<u8>,
}

impl TileIo for InMemory<'_> {
    fn fill(&mut self, window: usize, memory: &mut [u8]) -> Result<()> {
        memory.copy_from_slice(&self.windows[window]);
        Ok(())
    }

    fn take(&mut self, output: &[u8]) -> Result<()> {
        self.output = output.to_vec();
        Ok(())
    }
}

/// What the host tells a module about tensor parallelism.
pub(super) fn effective_tp(module: &Module, tp: Tp) -> Tp {
    if module.metadata().uses_tp { tp } else { Tp::ONE }
}

/// Plans and makes every output.
///
/// # Errors
/// What the module refuses, or does wrong.
pub(super) fn make(
    (module, program): (&Module, &dyn Program),
    application: &Application,
    tile_bytes: u64,
    order: Order,
    run: &mut RunTile<'_>,
) -> Result<Made> {
    let types: Vec<plan::Input<'_>> = application.inputs.iter().map(|(role, i, t, _)| (role.as_str(), *i, t)).collect();
    let tp = effective_tp(module, application.tp);
    let request = plan::request(&application.params, &types, application.outputs.clone(), tp, tile_bytes)?;
    let lens: Vec<u64> = types.iter().map(|(_, _, t)| t.len_bytes()).collect();
    let answer = plan::decode(&program.plan(&to_canonical(&request)?)?.answer)?;
    let PlanAnswer::Plan { outputs, scratch } = answer else {
        // `ask` says what a refusal means; it ends the same way.
        return Err(match plan::ask(program, &request, &lens)? {
            Err(refusal) => refusal.error,
            Ok(_) => Error::new(Code::ModuleBadAnswer, "the module refuses a request once, and plans it another time"),
        });
    };
    let checked = CheckedPlan::check(&request, &lens, &outputs, &scratch)
        .map_err(|flaw| Error::new(Code::ModuleBadPlan, format!("the module's plan is wrong: {flaw}")))?;
    let params = to_canonical(&application.params)?;
    let bodies = outputs.iter().map(|o| (o.view.as_ref(), o.tiles.as_ref()));
    let bodies: Vec<_> = bodies.chain(scratch.iter().map(|s| (None, Some(&s.tiles)))).collect();
    let mut sources: Vec<Option<Vec<u8>>> = application.inputs.iter().map(|(.., bytes)| Some(bytes.clone())).collect();
    sources.resize(checked.inputs + checked.targets.len(), None);
    let mut loom = Loom { params: &params, order, tiles: 0, unsteady: None };
    for &target in &checked.order {
        let mut bytes = Vec::new();
        match bodies[target] {
            (Some(parts), _) => gather(parts, &sources, &mut Vec::new(), &mut bytes),
            (None, Some(groups)) => bytes = loom.tensor(target, groups, &sources, run)?,
            (None, None) => {}
        }
        sources[checked.inputs + target] = Some(bytes);
    }
    let made = checked.targets.iter().take(checked.outputs).zip(sources.into_iter().skip(checked.inputs));
    let outputs = made.filter_map(|(target, bytes)| Some((target.role.clone()?, (target.tensor.clone(), bytes?))));
    Ok(Made { outputs: outputs.collect(), tiles: loom.tiles, unsteady: loom.unsteady })
}

struct Loom<'a> {
    params: &'a [u8],
    order: Order,
    tiles: u64,
    unsteady: Option<String>,
}

/// A tile's place.
#[derive(Clone, Copy)]
struct Place {
    group: usize,
    turn: u64,
    tile: u64,
    offset: u64,
}

impl Loom<'_> {
    fn tensor(
        &mut self,
        target: usize,
        groups: &[TileGroup],
        sources: &[Option<Vec<u8>>],
        run: &mut RunTile<'_>,
    ) -> Result<Vec<u8>> {
        let mut places = Vec::new();
        let (mut tile, mut offset) = (0, 0);
        for (group, TileGroup { count, len, .. }) in groups.iter().enumerate() {
            for turn in 0..*count {
                places.push(Place { group, turn, tile, offset });
                tile += 1;
                offset += len;
            }
        }
        self.tiles += tile;
        if self.order == Order::ShuffledTwice {
            places.extend_from_within(..);
            shuffle(&mut places);
        }
        // In range: the plan is checked, and its inputs are in memory.
        let mut bytes = vec![0; offset as usize];
        let mut done = vec![false; tile as usize];
        for place in places {
            let made = self.tile(target, place, &groups[place.group], sources, run)?;
            let at = place.offset as usize..place.offset as usize + made.len();
            if std::mem::replace(&mut done[place.tile as usize], true) && bytes[at.clone()] != made {
                self.unsteady.get_or_insert(format!("tile {} of target {target}", place.tile));
            }
            bytes[at].copy_from_slice(&made);
        }
        Ok(bytes)
    }

    fn tile(
        &self,
        target: usize,
        place: Place,
        group: &TileGroup,
        sources: &[Option<Vec<u8>>],
        run: &mut RunTile<'_>,
    ) -> Result<Vec<u8>> {
        let windows: Vec<Vec<u8>> = group
            .inputs
            .iter()
            .map(|parts| {
                let mut window = Vec::new();
                gather(parts, sources, &mut vec![place.turn], &mut window);
                window
            })
            .collect();
        // In range: all are within the ABI's limits.
        let lens: Vec<u32> = windows.iter().map(|w| w.len() as u32).collect();
        let request = TileRequest {
            target: target as u32,
            group: place.group as u32,
            turn: place.turn as u32,
            tile: place.tile as u32,
            offset: place.offset,
            out_len: group.len as u32,
            windows: &lens,
            args: &group.args,
            params: self.params,
        };
        run(&request, &windows)
    }
}

/// Fisher and Yates, with xorshift64 and a fixed seed.
fn shuffle<T>(items: &mut [T]) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for i in (1..items.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        items.swap(i, (state % (i as u64 + 1)) as usize);
    }
}
