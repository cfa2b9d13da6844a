//! Tiles of any length, against the digest of the bytes that they make.

use std::sync::Arc;

use weightmill_guest::abi::{Dtype, PlanAnswer, PlanInput, PlanRequest, Tp};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::digest::{HASH_BYTES, LeafHasher, leaf_count, tensor_digest};
use crate::execute::graph::{Step, TargetId};
use crate::plan::CheckedPlan;
use crate::progress::Silent;
use crate::sandbox::{PlanReply, Program, RunReply, TileIo, TileRequest};

/// Answers a tile with the bytes of its one window, each plus one.
struct PlusOne;

impl Program for PlusOne {
    fn plan(&self, _: &[u8]) -> Result<PlanReply> {
        unreachable!("the plan is made by hand")
    }

    fn run(&self, tile: &TileRequest<'_>, io: &mut dyn TileIo) -> Result<RunReply> {
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
}

fn source(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// Makes a tensor from tiles of these lengths, in order.
fn make(tiles: &[usize], threads: usize) -> Kept {
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
    let step = Step {
        plan,
        program: Some(Arc::new(PlusOne)),
        inputs: vec![input],
        params: b"{}".to_vec(),
        module: "plus-one".into(),
        names: BTreeMap::new(),
    };
    let graph = Graph::new(checkpoint, vec![step]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let room = SpillRoom::memory_only(0);
    let workshop = Workshop::new(&graph, &pool, 1, &room, &Silent);
    let mut kept = Kept::default();
    workshop.make(Source::Target(TargetId { application: 0, target: 0 }), len as u64, &mut kept).unwrap();
    kept
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
        for threads in [1, 3] {
            let kept = make(tiles, threads);
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
        let kept = make(tiles, 2);
        (kept.with, kept.without)
    };
    assert_eq!(counts(&[LEAF, 2 * LEAF, 100]), (3, 0), "the last leaf may be short");
    assert_eq!(counts(&[100, LEAF, 2 * LEAF]), (0, 3), "nothing begins on a boundary but the first, which ends inside");
    assert_eq!(counts(&[LEAF, LEAF + 8, LEAF - 8, LEAF]), (2, 2));
    assert_eq!(counts(&[5]), (1, 0));
}
