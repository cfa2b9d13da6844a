//! Tiles of any length, against the digest of the bytes that they make.

use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use weightmill_guest::abi::{Dtype, PlanAnswer, PlanInput, PlanRequest, Tp};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::digest::{HASH_BYTES, LeafHasher, leaf_count, tensor_digest};
use crate::execute::graph::{Step, TargetId};
use crate::plan::CheckedPlan;
use crate::progress::Silent;
use crate::sandbox::{PlanReply, Program, RunReply, TileIo, TileRequest};

/// Answers a tile with the bytes of its one window, each plus one. Keeps the
/// threads that it was called on.
#[derive(Default)]
struct PlusOne(Mutex<Vec<ThreadId>>);

impl Program for PlusOne {
    fn plan(&self, _: &[u8]) -> Result<PlanReply> {
        unreachable!("the plan is made by hand")
    }

    fn run(&self, tile: &TileRequest<'_>, io: &mut dyn TileIo) -> Result<RunReply> {
        self.0.lock().unwrap().push(std::thread::current().id());
        let mut memory = vec![0; tile.windows[0] as usize];
        io.fill(0, &mut memory)?;
        memory.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        io.take(&memory)?;
        Ok(RunReply::Done { fuel: 1 })
    }
}

/// Keeps the bytes, and the digest as a shard's writer makes it.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    hasher: LeafHasher,
    /// Pieces that came with leaf hashes, and without.
    with: usize,
    without: usize,
    works: bool,
    /// The threads that tiles were computed on.
    made_on: Vec<ThreadId>,
}

impl Sink for Kept {
    fn piece(&mut self, bytes: &[u8], leaves: Option<&[u8]>) -> Result<()> {
        match leaves {
            Some(leaves) => {
                assert!(self.bytes.len().is_multiple_of(LEAF_BYTES), "leaves begin on a boundary");
                assert_eq!(leaves, leaf_hashes(bytes));
                assert_eq!(leaves.len() as u64, leaf_count(bytes.len() as u64) * HASH_BYTES as u64);
                self.hasher.append_leaves(bytes.len() as u64, leaves).expect("it is on a boundary");
                self.with += 1;
            }
            None => {
                self.hasher.update(bytes);
                self.without += 1;
            }
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn works(&self) -> bool {
        self.works
    }
}

fn source(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// Makes a tensor from tiles of these lengths, in order.
fn make(tiles: &[usize], threads: usize, works: bool) -> Kept {
    try_make(tiles, threads, works, &Silent).unwrap()
}

fn try_make(tiles: &[usize], threads: usize, works: bool, progress: &dyn Progress) -> Result<Kept> {
    let len: usize = tiles.iter().sum();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let bytes = source(len);
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![len], &bytes).unwrap();
    std::fs::write(&path, safetensors::serialize([("x", view)], None).unwrap()).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());

    let mut offset = 0;
    let groups = tiles.iter().map(|tile| {
        let group = serde_json::json!({ "len": tile, "inputs": [[{ "copy": 0, "offset": offset, "len": tile }]] });
        offset += tile;
        group
    });
    let output = serde_json::json!({
        "role": "w", "dtype": "U8", "shape": [len], "tiles": groups.collect::<Vec<_>>(),
    });
    let answer: PlanAnswer = serde_json::from_value(serde_json::json!({ "outputs": [output] })).unwrap();
    let PlanAnswer::Plan { outputs, scratch } = answer else { panic!("it is a plan") };
    let request = PlanRequest {
        abi: 1,
        inputs: vec![PlanInput { dtype: Dtype::U8, index: 0, role: "w".into(), shape: vec![len as u64] }],
        outputs: vec!["w".into()],
        params: serde_json::json!({}),
        tile_bytes: 1 << 20,
        tp: Tp::ONE,
    };
    let plan = CheckedPlan::check(&request, &[len as u64], &outputs, &scratch).unwrap();
    let from = checkpoint.tensors().values().next().unwrap();
    let input = Source::File { file: 0, offset: from.offset, len: len as u64 };
    let program = Arc::new(PlusOne::default());
    let step = Step {
        plan,
        program: Some(program.clone()),
        inputs: vec![input],
        params: b"{}".to_vec(),
        module: "plus-one".into(),
        names: BTreeMap::new(),
    };
    let graph = Graph::new(checkpoint, vec![step]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let room = SpillRoom::memory_only(0);
    let workshop = Workshop::new(&graph, &pool, 1, &room, progress);
    let mut kept = Kept { works, ..Kept::default() };
    workshop.make(Source::Target(TargetId { application: 0, target: 0 }), len as u64, &mut kept)?;
    kept.made_on = std::mem::take(&mut program.0.lock().unwrap());
    Ok(kept)
}

#[test]
fn tiles_that_end_inside_a_leaf_give_the_digest_of_the_whole() {
    const LEAF: usize = LEAF_BYTES;
    for tiles in [
        &[LEAF][..],
        &[1],
        &[LEAF - 1, 1],
        &[LEAF + 1, LEAF - 1],
        &[10_000; 7],
        &[LEAF + LEAF / 2; 5],
        &[2 * LEAF, 5, LEAF - 5, LEAF, 3 * LEAF + 7],
        &[LEAF, 2 * LEAF, 100],
        &[1; 40],
        &[7, 2 * LEAF - 7, LEAF, 9],
    ] {
        for (threads, works) in [(1, false), (1, true), (3, false), (3, true)] {
            let kept = make(tiles, threads, works);
            let expected: Vec<u8> = source(kept.bytes.len()).iter().map(|byte| byte.wrapping_add(1)).collect();
            assert_eq!(kept.bytes, expected, "{tiles:?}");
            let digest = kept.hasher.finish().0;
            let whole = tensor_digest(expected.len() as u64, &leaf_hashes(&expected));
            assert_eq!(digest, whole, "{tiles:?} on {threads} threads");
        }
    }
}

#[test]
fn leaf_hashes_come_with_what_begins_on_a_boundary_and_does_not_end_inside_a_leaf() {
    const LEAF: usize = LEAF_BYTES;
    let counts = |tiles: &[usize]| {
        let kept = make(tiles, 2, false);
        (kept.with, kept.without)
    };
    assert_eq!(counts(&[LEAF, 2 * LEAF, 100]), (3, 0), "the last leaf may be short");
    assert_eq!(counts(&[100, LEAF, 2 * LEAF]), (0, 3), "nothing begins on a boundary but the first, which ends inside");
    assert_eq!(counts(&[LEAF, LEAF + 8, LEAF - 8, LEAF]), (2, 2));
    assert_eq!(counts(&[5]), (1, 0));
}

#[test]
fn one_thread_makes_tiles_where_they_are_taken_unless_taking_is_work() {
    let here = std::thread::current().id();
    let made_here = |threads, works| {
        let on = make(&[LEAF_BYTES; 5], threads, works).made_on;
        assert_eq!(on.len(), 5);
        on.iter().filter(|&&id| id == here).count()
    };
    assert_eq!(made_here(1, false), 5);
    assert_eq!(made_here(1, true), 0);
    assert_eq!(made_here(2, false), 0);
}

/// Wants to stop once two pieces are delivered.
#[derive(Default)]
struct AfterTwo(std::sync::atomic::AtomicUsize);

impl Progress for AfterTwo {
    fn advance(&self, _: u64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= 2
    }
}

#[test]
fn who_cancels_gets_no_further_piece() {
    for (threads, works) in [(1, false), (1, true), (3, false)] {
        let progress = AfterTwo::default();
        let error = try_make(&[LEAF_BYTES; 9], threads, works, &progress).err().expect("it was cancelled");
        assert_eq!(error.code(), Code::Interrupted);
        assert_eq!(progress.0.into_inner(), 2);
    }
}
