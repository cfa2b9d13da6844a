//! From a module's answer to a plan that can be trusted.
//!
//! The answer of a sandboxed module is hostile until proven otherwise: every
//! requested output must be there once, its bytes exactly covered, every copy
//! inside its source, every size and count within [`limits`], and no tensor
//! may depend on itself. A [`CheckedPlan`] is the proof.

use std::collections::BTreeMap;
use std::fmt;

use weightmill_guest::abi::{PlanOutput, PlanRequest, Scratch, TileGroup, limits};

use super::view::{View, product, sum};
use crate::tensor::TensorType;

/// Why an answer is not a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw(String);

impl Flaw {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Flaw(what.into())
    }

    fn within(self, place: impl fmt::Display) -> Self {
        Flaw(format!("{place}: {}", self.0))
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A plan that describes its outputs exactly.
///
/// Source numbers count the inputs, then [`CheckedPlan::targets`].
#[derive(Clone, Debug)]
pub struct CheckedPlan {
    /// How many inputs the request had.
    pub inputs: usize,
    /// Outputs in the answer's order, then scratch tensors.
    pub targets: Vec<Target>,
    /// How many of `targets` are outputs.
    pub outputs: usize,
    /// Positions in `targets`, dependencies first.
    pub order: Vec<usize>,
}

/// An output or a scratch tensor.
#[derive(Clone, Debug)]
pub struct Target {
    /// The output's role; `None` for a scratch tensor.
    pub role: Option<String>,
    /// What it is.
    pub tensor: TensorType,
    /// How it is made.
    pub body: Body,
}

/// How a tensor is made.
#[derive(Clone, Debug)]
pub enum Body {
    /// Bytes moved, from inputs only.
    View(View),
    /// Bytes computed.
    Tiles(Vec<Group>),
}

/// Equal tiles.
#[derive(Clone, Debug)]
pub struct Group {
    /// The first tile's first byte in the target.
    pub offset: u64,
    /// The first tile's position in the target.
    pub first_tile: u64,
    /// How many.
    pub count: u64,
    /// Output bytes of each.
    pub len: u32,
    /// What each reads.
    pub windows: Vec<View>,
    /// For the module's own use.
    pub args: Vec<i64>,
}

impl CheckedPlan {
    /// Checks `outputs` and `scratch` against what was asked.
    ///
    /// # Errors
    /// A [`Flaw`]: the module's fault.
    pub fn check(
        request: &PlanRequest,
        input_lens: &[u64],
        outputs: &[PlanOutput],
        scratch: &[Scratch],
    ) -> Result<Self, Flaw> {
        for (what, count) in [("outputs", outputs.len()), ("scratch tensors", scratch.len())] {
            if count > limits::OUTPUTS {
                return Err(Flaw::new(format!("it has {count} {what}, more than {}", limits::OUTPUTS)));
            }
        }
        check_roles(request, outputs)?;
        let mut tensors = Vec::new();
        for output in outputs {
            tensors.push(tensor_type(output.dtype, &output.shape).map_err(|f| f.within(place(Some(&output.role), 0)))?);
        }
        for (i, scratch) in scratch.iter().enumerate() {
            tensors.push(tensor_type(scratch.dtype, &scratch.shape).map_err(|f| f.within(place(None, i)))?);
        }
        let lens: Vec<u64> = input_lens.iter().copied().chain(tensors.iter().map(TensorType::len_bytes)).collect();
        let mut checker = Checker { inputs: input_lens.len(), lens: &lens, parts: limits::PARTS, reads: Vec::new() };
        let mut targets = Vec::new();
        for (i, tensor) in tensors.into_iter().enumerate() {
            let (role, view, tiles) = match outputs.get(i) {
                Some(output) => (Some(output.role.clone()), output.view.as_ref(), output.tiles.as_ref()),
                None => (None, None, Some(&scratch[i - outputs.len()].tiles)),
            };
            let at = || place(role.as_deref(), i.saturating_sub(outputs.len()));
            let body = match (view, tiles) {
                (Some(parts), None) => checker.view(parts, tensor.len_bytes()).map(Body::View),
                (None, Some(groups)) => checker.tiles(groups, tensor.len_bytes()).map(Body::Tiles),
                _ => Err(Flaw::new("it needs exactly one of view and tiles")),
            };
            let body = body.map_err(|f| f.within(at()))?;
            targets.push(Target { role, tensor, body });
        }
        let order = dependency_order(input_lens.len(), &checker.reads)?;
        Ok(CheckedPlan { inputs: input_lens.len(), targets, outputs: outputs.len(), order })
    }

    /// The position of the output with `role`.
    pub fn output(&self, role: &str) -> Option<usize> {
        self.targets[..self.outputs].iter().position(|t| t.role.as_deref() == Some(role))
    }

    /// Every output's dtype and shape.
    pub fn facts(&self) -> BTreeMap<String, TensorType> {
        self.targets[..self.outputs].iter().filter_map(|t| Some((t.role.clone()?, t.tensor.clone()))).collect()
    }
}

fn place(role: Option<&str>, scratch: usize) -> String {
    match role {
        Some(role) => format!("output '{}'", role.escape_debug()),
        None => format!("scratch tensor {scratch}"),
    }
}

fn check_roles(request: &PlanRequest, outputs: &[PlanOutput]) -> Result<(), Flaw> {
    let mut seen = std::collections::BTreeSet::new();
    for output in outputs {
        if !seen.insert(output.role.as_str()) {
            return Err(Flaw::new(format!("it answers output '{}' twice", output.role.escape_debug())));
        }
    }
    match request.outputs.iter().find(|role| !seen.contains(role.as_str())) {
        Some(role) => Err(Flaw::new(format!("it does not answer output '{role}', which was asked for"))),
        None => Ok(()),
    }
}

fn tensor_type(dtype: weightmill_guest::abi::Dtype, shape: &[u64]) -> Result<TensorType, Flaw> {
    if shape.len() > limits::DIMS {
        return Err(Flaw::new(format!("it has {} dimensions, more than {}", shape.len(), limits::DIMS)));
    }
    TensorType::new(dtype, shape.to_vec())
        .ok_or_else(|| Flaw::new(format!("{dtype} {shape:?} is no whole number of bytes within 2^53-1")))
}

struct Checker<'a> {
    inputs: usize,
    /// Bytes of every source.
    lens: &'a [u64],
    /// Parts left for the whole plan.
    parts: usize,
    /// For each target, the sources it reads.
    reads: Vec<Vec<u64>>,
}

impl Checker<'_> {
    fn view(&mut self, parts: &[weightmill_guest::abi::Part], len: u64) -> Result<View, Flaw> {
        let inputs = &self.lens[..self.inputs];
        let view = View::check(parts, &|s| inputs.get(usize::try_from(s).ok()?).copied(), None, &mut self.parts)?;
        if view.len() != len {
            return Err(Flaw::new(format!("its view has {} bytes where the tensor has {len}", view.len())));
        }
        self.reads.push(Vec::new());
        Ok(view)
    }

    fn tiles(&mut self, groups: &[TileGroup], len: u64) -> Result<Vec<Group>, Flaw> {
        let (mut offset, mut tile) = (0_u64, 0_u64);
        let mut checked = Vec::with_capacity(groups.len().min(1024));
        let reads = std::cell::RefCell::new(Vec::new());
        for (i, group) in groups.iter().enumerate() {
            let group = self.group(group, offset, tile, &reads).map_err(|f| f.within(format!("tile group {i}")))?;
            offset = sum(offset, product(u64::from(group.len), group.count)?)?;
            tile = sum(tile, group.count)?;
            checked.push(group);
        }
        if tile > limits::TILES {
            return Err(Flaw::new(format!("it has {tile} tiles, more than {}", limits::TILES)));
        }
        if offset != len {
            return Err(Flaw::new(format!("its tiles have {offset} bytes where the tensor has {len}")));
        }
        let mut reads = reads.into_inner();
        reads.sort_unstable();
        reads.dedup();
        self.reads.push(reads);
        Ok(checked)
    }

    fn group(
        &mut self,
        group: &TileGroup,
        offset: u64,
        first_tile: u64,
        reads: &std::cell::RefCell<Vec<u64>>,
    ) -> Result<Group, Flaw> {
        if group.count == 0 || group.len == 0 {
            return Err(Flaw::new("its count or len is 0"));
        }
        if group.inputs.len() > limits::WINDOWS {
            return Err(Flaw::new(format!("it has {} windows, more than {}", group.inputs.len(), limits::WINDOWS)));
        }
        if group.args.len() > limits::ARGS {
            return Err(Flaw::new(format!("it has {} args, more than {}", group.args.len(), limits::ARGS)));
        }
        if group.args.iter().any(|a| a.unsigned_abs() > limits::SIZE) {
            return Err(Flaw::new("an arg is beyond ±(2^53-1)"));
        }
        self.parts = self.parts.checked_sub(1).ok_or_else(|| Flaw::new("the plan has too many parts"))?;
        let lens = self.lens;
        let source_len = |s: u64| {
            let len = lens.get(usize::try_from(s).ok()?).copied()?;
            reads.borrow_mut().push(s);
            Some(len)
        };
        let mut total = group.len;
        let mut windows = Vec::with_capacity(group.inputs.len());
        for (i, parts) in group.inputs.iter().enumerate() {
            let window = View::check(parts, &source_len, Some(group.count), &mut self.parts)
                .map_err(|f| f.within(format!("window {i}")))?;
            total = sum(total, window.len())?;
            windows.push(window);
        }
        if total > limits::TILE_BYTES {
            return Err(Flaw::new(format!(
                "a tile and its windows have {total} bytes, more than {}",
                limits::TILE_BYTES
            )));
        }
        // In range: at most TILE_BYTES.
        let len = group.len as u32;
        Ok(Group { offset, first_tile, count: group.count, len, windows, args: group.args.clone() })
    }
}

/// Targets, dependencies first; of independent ones the lower position first.
fn dependency_order(inputs: usize, reads: &[Vec<u64>]) -> Result<Vec<usize>, Flaw> {
    let mut order = Vec::with_capacity(reads.len());
    let mut done = vec![false; reads.len()];
    while order.len() < reads.len() {
        let ready = (0..reads.len()).find(|&t| {
            // In range: `reads` holds numbers of sources that exist.
            !done[t] && reads[t].iter().all(|&s| (s as usize) < inputs || done[s as usize - inputs])
        });
        let ready = ready.ok_or_else(|| Flaw::new("its tiles depend on themselves in a circle"))?;
        done[ready] = true;
        order.push(ready);
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightmill_guest::abi::{PlanAnswer, PlanInput, Tp};

    fn request() -> PlanRequest {
        PlanRequest {
            abi: 1,
            inputs: vec![PlanInput { dtype: "U8".parse().unwrap(), index: 0, role: "w".into(), shape: vec![8] }],
            outputs: vec!["w".into()],
            params: serde_json::json!({}),
            tile_bytes: 1 << 20,
            tp: Tp::ONE,
        }
    }

    fn check(answer: &str) -> Result<CheckedPlan, Flaw> {
        let PlanAnswer::Plan { outputs, scratch } = serde_json::from_str(answer).unwrap() else { panic!() };
        CheckedPlan::check(&request(), &[8], &outputs, &scratch)
    }

    #[test]
    fn scratch_comes_before_what_reads_it() {
        let plan = check(
            r#"{"outputs":[{"role":"w","dtype":"U8","shape":[8],"tiles":[{"count":2,"len":4,"inputs":[[{"copy":0,"len":4,"strides":[4]}],[{"copy":3,"len":4}]]}]},
                {"role":"s","dtype":"F32","shape":[1],"tiles":[{"len":4,"inputs":[[{"copy":3,"len":4}]]}]}],
                "scratch":[{"dtype":"F32","shape":[1],"tiles":[{"len":4,"inputs":[[{"copy":0,"len":8}]]}]}]}"#,
        )
        .unwrap();
        assert_eq!(plan.order, [2, 0, 1]);
        assert_eq!(plan.facts()["s"].to_string(), "F32 [1]");
        let Body::Tiles(groups) = &plan.targets[0].body else { panic!() };
        assert_eq!((groups[0].count, groups[0].len, groups[0].windows[1].len()), (2, 4, 4));
    }

    #[test]
    fn flaws_are_found_and_placed() {
        let view = |v: &str| format!(r#"{{"outputs":[{{"role":"w","dtype":"U8","shape":[8],"view":{v}}}]}}"#);
        let tiles = |t: &str| format!(r#"{{"outputs":[{{"role":"w","dtype":"U8","shape":[8],"tiles":{t}}}]}}"#);
        for (answer, what) in [
            (view(r#"[{"copy":0,"len":7}]"#), "output 'w': its view has 7 bytes where the tensor has 8"),
            (view(r#"[{"copy":0,"len":8},{"fill":0,"len":1}]"#), "its view has 9 bytes"),
            (view(r#"[{"copy":1,"len":8}]"#), "source 1, which it may not read"),
            (tiles(r#"[{"len":8,"inputs":[[{"copy":1,"len":8}]]}]"#), "in a circle"),
            (tiles(r#"[{"len":8,"inputs":[[{"copy":2,"len":8}]]}]"#), "tile group 0: window 0: it copies from source 2"),
            (tiles(r#"[{"len":0}]"#), "is 0"),
            (tiles(r#"[{"count":2,"len":3}]"#), "its tiles have 6 bytes"),
            (tiles(r#"[{"count":9007199254740991,"len":9007199254740991}]"#), "more than"),
            (tiles(r#"[{"len":8,"args":[9007199254740992]}]"#), "an arg"),
            (r#"{"outputs":[]}"#.into(), "does not answer output 'w'"),
            (r#"{"outputs":[{"role":"w","dtype":"U8","shape":[8]}]}"#.into(), "exactly one of"),
            (r#"{"outputs":[{"role":"w","dtype":"U8","shape":[4294967296,4294967296],"view":[]}]}"#.into(), "no whole number"),
            (
                r#"{"outputs":[{"role":"w","dtype":"U8","shape":[0],"view":[]},{"role":"w","dtype":"U8","shape":[0],"view":[]}]}"#.into(),
                "twice",
            ),
        ] {
            let flaw = check(&answer).unwrap_err();
            assert!(flaw.to_string().contains(what), "{answer}: {flaw}");
        }
    }
}
