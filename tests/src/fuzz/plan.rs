//! What a module answers to a plan request: decoded, checked, walked.

use weightmill::error::Fault;
use weightmill::plan::{Body, CheckedPlan, View, Visit, decode};
use weightmill_guest::abi::{PlanAnswer, PlanInput, PlanRequest, Tp, limits};
use weightmill_guest::native::gather;

use super::check_error;

/// Bytes of each of the two inputs.
const INPUT_LENS: [u64; 2] = [64, 64];
/// So much of a view is walked from either end.
const WALKED_BYTES: u64 = 4096;

/// The input is the answer.
pub(super) fn run(input: &[u8]) {
    let answer = match decode(input) {
        Ok(answer) => answer,
        Err(error) => return check_error(&error, Fault::Module),
    };
    let again = serde_json::to_vec(&answer).expect("an answer can be written");
    assert_eq!(decode(&again).expect("what was written is an answer"), answer);
    let PlanAnswer::Plan { outputs, scratch } = &answer else { return };
    let Ok(plan) = CheckedPlan::check(&request(), &INPUT_LENS, outputs, scratch) else { return };
    let targets = plan.targets.iter().map(|target| target.tensor.len_bytes());
    let lens: Vec<u64> = INPUT_LENS.into_iter().chain(targets).collect();
    let mut order = plan.order.clone();
    order.sort_unstable();
    assert!(order.into_iter().eq(0..plan.targets.len()), "every target is made once");
    for target in &plan.targets {
        match &target.body {
            Body::View(view) => {
                assert_eq!(view.len(), target.tensor.len_bytes());
                walk(view, 0, &INPUT_LENS);
            }
            Body::Tiles(groups) => {
                let (mut offset, mut tile) = (0, 0);
                for group in groups {
                    assert_eq!((group.offset, group.first_tile), (offset, tile));
                    offset += group.count * u64::from(group.len);
                    tile += group.count;
                    let windows: u64 = group.windows.iter().map(View::len).sum();
                    assert!(windows + u64::from(group.len) <= limits::TILE_BYTES);
                    for window in group.windows.iter().take(8) {
                        walk(window, 0, &lens);
                        walk(window, group.count - 1, &lens);
                    }
                }
                assert_eq!(offset, target.tensor.len_bytes());
            }
        }
    }
    outputs.iter().filter_map(|output| output.view.as_ref()).for_each(|parts| by_the_letter(parts, &plan, outputs));
}

/// Walks both ends of a view: runs follow each other and stay inside.
fn walk(view: &View, turn: u64, lens: &[u64]) {
    let part = view.len().min(WALKED_BYTES);
    for start in [0, view.len() - part] {
        let mut runs = Runs { at: 0, lens, bytes: None };
        let Ok(()) = view.visit(turn, start, part, &mut runs);
        assert_eq!(runs.at, part);
    }
}

/// A small view gives the bytes that the SDK's own reading of parts gives.
fn by_the_letter(
    parts: &[weightmill_guest::abi::Part],
    plan: &CheckedPlan,
    outputs: &[weightmill_guest::abi::PlanOutput],
) {
    let same = |output: &&weightmill_guest::abi::PlanOutput| {
        output.view.as_deref().is_some_and(|own| std::ptr::eq(own, parts))
    };
    let Some(role) = outputs.iter().find(same).map(|output| &output.role) else { return };
    let target = plan.output(role).expect("a checked plan has its outputs");
    let Body::View(view) = &plan.targets[target].body else { panic!("{role} is a view") };
    if view.len() > WALKED_BYTES {
        return;
    }
    let sources: Vec<Vec<u8>> =
        INPUT_LENS.iter().zip([0_u8, 100]).map(|(len, base)| (base..base + *len as u8).collect()).collect();
    let mut runs = Runs { at: 0, lens: &INPUT_LENS, bytes: Some((&sources, Vec::new())) };
    let Ok(()) = view.visit(0, 0, view.len(), &mut runs);
    let mut expected = Vec::new();
    gather(parts, &sources.iter().cloned().map(Some).collect::<Vec<_>>(), &mut Vec::new(), &mut expected);
    assert_eq!(runs.bytes.map(|(_, bytes)| bytes), Some(expected));
}

struct Runs<'a> {
    at: u64,
    lens: &'a [u64],
    /// The sources, and what was gathered from them.
    bytes: Option<(&'a [Vec<u8>], Vec<u8>)>,
}

impl Visit for Runs<'_> {
    type Error = std::convert::Infallible;

    fn copy(&mut self, at: u64, source: u32, offset: u64, len: u64) -> Result<(), Self::Error> {
        assert!(at == self.at && len > 0);
        assert!(offset + len <= self.lens[source as usize], "{len} bytes at {offset} of source {source}");
        if let Some((sources, bytes)) = &mut self.bytes {
            bytes.extend_from_slice(&sources[source as usize][offset as usize..][..len as usize]);
        }
        self.at += len;
        Ok(())
    }

    fn fill(&mut self, at: u64, byte: u8, len: u64) -> Result<(), Self::Error> {
        assert!(at == self.at && len > 0);
        if let Some((_, bytes)) = &mut self.bytes {
            bytes.resize(bytes.len() + len as usize, byte);
        }
        self.at += len;
        Ok(())
    }
}

fn request() -> PlanRequest {
    let input = |dtype: &str, role: &str, shape| PlanInput {
        dtype: dtype.parse().expect("a dtype"),
        index: 0,
        role: role.into(),
        shape,
    };
    PlanRequest {
        abi: 1,
        inputs: vec![input("U8", "a", vec![64]), input("F32", "b", vec![4, 4])],
        outputs: vec!["w".into()],
        params: serde_json::json!({}),
        tile_bytes: 1 << 20,
        tp: Tp::ONE,
    }
}
