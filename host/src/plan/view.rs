//! A checked view: bytes moved, as loops over copies.
//!
//! A [`View`] is what a plan's list of parts becomes once every length is
//! known to add up and every copy to stay inside its source. Nothing about it
//! can fail any more but reading, so walking it needs no checks. A walk of any
//! byte range of the view costs the nesting depth plus the runs in the range,
//! and names regular runs as one [`Grid`] or [`Strided`] piece, so that a
//! transpose is executed as two tight loops.

use weightmill_guest::abi::{Part, limits};

use super::check::Flaw;

/// A run of bytes, as copies of sources, fills, and loops of these.
#[derive(Clone, Debug)]
pub struct View {
    nodes: Vec<Node>,
    len: u64,
    /// Loops outside the view itself: 1 for a tile's window, else 0.
    outer: usize,
    /// The bytes of its shortest copy.
    shortest: u64,
}

#[derive(Clone, Debug)]
struct Node {
    /// Where it begins in its parent's body.
    start: u64,
    /// Its bytes, all turns together.
    len: u64,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// `strides` has one value for each enclosing loop.
    Copy {
        source: u32,
        offset: u64,
        strides: Vec<u64>,
    },
    Fill {
        byte: u8,
    },
    Repeat {
        count: u64,
        body_len: u64,
        parts: Vec<Node>,
    },
}

/// Equal runs at a regular distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Source number.
    pub source: u32,
    /// First byte of the first run.
    pub offset: u64,
    /// Bytes of one run.
    pub len: u64,
    /// How many runs, at least 1.
    pub count: u64,
    /// From one run's first byte to the next one's.
    pub stride: u64,
}

/// Equal [`Strided`] pieces at a regular distance: a transpose is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The first row.
    pub row: Strided,
    /// How many rows, at least 1.
    pub rows: u64,
    /// From one row's first byte to the next one's.
    pub row_stride: u64,
}

/// What a walk finds, in order. `at` counts from the start of the walk.
pub trait Visit {
    /// What stops a walk.
    type Error;
    /// One run.
    fn copy(&mut self, at: u64, source: u32, offset: u64, len: u64) -> Result<(), Self::Error>;
    /// One byte value.
    fn fill(&mut self, at: u64, byte: u8, len: u64) -> Result<(), Self::Error>;
    /// Regular runs.
    fn strided(&mut self, at: u64, runs: Strided) -> Result<(), Self::Error> {
        (0..runs.count)
            .try_for_each(|i| self.copy(at + i * runs.len, runs.source, runs.offset + i * runs.stride, runs.len))
    }
    /// Rows of regular runs.
    fn grid(&mut self, at: u64, grid: Grid) -> Result<(), Self::Error> {
        let row_len = grid.row.len * grid.row.count;
        (0..grid.rows).try_for_each(|i| {
            self.strided(at + i * row_len, Strided { offset: grid.row.offset + i * grid.row_stride, ..grid.row })
        })
    }
}

impl View {
    /// Checks `parts` against the sources' sizes. `outer_turns` is the number
    /// of turns of a loop around the whole view (a tile group's), if any;
    /// `budget` counts parts down over a whole plan.
    pub(super) fn check(
        parts: &[Part],
        source_len: &dyn Fn(u64) -> Option<u64>,
        outer_turns: Option<u64>,
        budget: &mut usize,
    ) -> Result<Self, Flaw> {
        let mut turns: Vec<u64> = outer_turns.into_iter().collect();
        let (nodes, len) = check_parts(parts, source_len, &mut turns, budget)?;
        let shortest = shortest_copy(&nodes);
        Ok(View { nodes, len, outer: usize::from(outer_turns.is_some()), shortest })
    }

    /// A lower bound of the length of its runs, but for those that the ends of
    /// a range cut; `u64::MAX` where nothing is copied.
    pub(crate) fn shortest_run(&self) -> u64 {
        self.shortest
    }

    /// The view's bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The source that this view is, byte for byte from its start, if it is
    /// one copy.
    pub fn as_single_copy(&self) -> Option<(u32, u64)> {
        match self.nodes.as_slice() {
            [Node { kind: Kind::Copy { source, offset, .. }, .. }] if self.outer == 0 => Some((*source, *offset)),
            _ => None,
        }
    }

    /// How many nodes it is written with.
    pub fn parts(&self) -> usize {
        fn count(nodes: &[Node]) -> usize {
            nodes.iter().map(|n| 1 + if let Kind::Repeat { parts, .. } = &n.kind { count(parts) } else { 0 }).sum()
        }
        count(&self.nodes)
    }

    /// Walks bytes `start..start + len`. `outer_turn` is the turn of the loop
    /// around the view, 0 where there is none.
    ///
    /// # Panics
    /// If the range is not inside the view.
    pub fn visit<V: Visit>(&self, outer_turn: u64, start: u64, len: u64, visitor: &mut V) -> Result<(), V::Error> {
        let end = start.checked_add(len).filter(|end| *end <= self.len);
        let end = end.unwrap_or_else(|| panic!("{len} bytes from {start} are not inside a view of {}", self.len));
        let mut turns = Vec::with_capacity(8);
        if self.outer == 1 {
            turns.push(outer_turn);
        }
        walk(&self.nodes, start, end, 0, &mut turns, visitor)
    }
}

fn shortest_copy(nodes: &[Node]) -> u64 {
    let shortest = |node: &Node| match &node.kind {
        Kind::Copy { .. } => node.len,
        Kind::Fill { .. } => u64::MAX,
        Kind::Repeat { parts, .. } => shortest_copy(parts),
    };
    nodes.iter().map(shortest).min().unwrap_or(u64::MAX)
}

fn check_parts(
    parts: &[Part],
    source_len: &dyn Fn(u64) -> Option<u64>,
    turns: &mut Vec<u64>,
    budget: &mut usize,
) -> Result<(Vec<Node>, u64), Flaw> {
    let mut nodes = Vec::with_capacity(parts.len().min(*budget));
    let mut start = 0_u64;
    for part in parts {
        *budget =
            budget.checked_sub(1).ok_or_else(|| Flaw::new(format!("it has more than {} parts", limits::PARTS)))?;
        let (kind, len) = match part {
            Part::Copy { copy, offset, len, strides } => {
                (check_copy(*copy, *offset, *len, strides, source_len, turns)?, *len)
            }
            Part::Fill { fill, len } => {
                positive("a fill's len", *len)?;
                (Kind::Fill { byte: *fill }, *len)
            }
            Part::Repeat { repeat, parts } => {
                positive("a repeat", *repeat)?;
                if turns.len() >= limits::DEPTH {
                    return Err(Flaw::new(format!("its repeats are nested more than {} deep", limits::DEPTH)));
                }
                turns.push(*repeat);
                let (parts, body_len) = check_parts(parts, source_len, turns, budget)?;
                turns.pop();
                positive("the length of a repeat's parts", body_len)?;
                let len = product(body_len, *repeat)?;
                (Kind::Repeat { count: *repeat, body_len, parts }, len)
            }
        };
        nodes.push(Node { start, len, kind });
        start = sum(start, len)?;
    }
    Ok((nodes, start))
}

fn check_copy(
    source: u64,
    offset: u64,
    len: u64,
    strides: &[u64],
    source_len: &dyn Fn(u64) -> Option<u64>,
    turns: &[u64],
) -> Result<Kind, Flaw> {
    positive("a copy's len", len)?;
    let size = source_len(source)
        .ok_or_else(|| Flaw::new(format!("it copies from source {source}, which it may not read")))?;
    if strides.len() > turns.len() {
        return Err(Flaw::new(format!("a copy has {} strides inside {} repeats", strides.len(), turns.len())));
    }
    let mut end = sum(offset, len)?;
    for (stride, turns) in strides.iter().zip(turns) {
        end = sum(end, product(*stride, turns - 1)?)?;
    }
    if end > size {
        return Err(Flaw::new(format!("it reads up to byte {end} of source {source}, which has {size}")));
    }
    let mut strides = strides.to_vec();
    strides.resize(turns.len(), 0);
    // In range: `source_len` answered for it, and sources are counted in u32.
    Ok(Kind::Copy { source: source as u32, offset, strides })
}

fn positive(what: &str, n: u64) -> Result<(), Flaw> {
    if n == 0 { Err(Flaw::new(format!("{what} is 0"))) } else { Ok(()) }
}

/// A sum within [`limits::SIZE`].
pub(super) fn sum(a: u64, b: u64) -> Result<u64, Flaw> {
    a.checked_add(b).filter(|n| *n <= limits::SIZE).ok_or_else(|| Flaw::new(format!("{a} + {b} is beyond 2^53-1")))
}

/// A product within [`limits::SIZE`].
pub(super) fn product(a: u64, b: u64) -> Result<u64, Flaw> {
    a.checked_mul(b).filter(|n| *n <= limits::SIZE).ok_or_else(|| Flaw::new(format!("{a} × {b} is beyond 2^53-1")))
}

/// Walks `start..end` of a body; `at` is where `start` lands.
fn walk<V: Visit>(
    nodes: &[Node],
    start: u64,
    end: u64,
    mut at: u64,
    turns: &mut Vec<u64>,
    visitor: &mut V,
) -> Result<(), V::Error> {
    let first = nodes.partition_point(|n| n.start + n.len <= start);
    for node in &nodes[first..] {
        if node.start >= end {
            break;
        }
        let from = start.max(node.start) - node.start;
        let to = end.min(node.start + node.len) - node.start;
        match &node.kind {
            Kind::Copy { source, offset, strides } => {
                visitor.copy(at, *source, offset + dot(strides, turns) + from, to - from)?;
            }
            Kind::Fill { byte } => visitor.fill(at, *byte, to - from)?,
            Kind::Repeat { body_len, parts, .. } => walk_repeat(*body_len, parts, from, to, at, turns, visitor)?,
        }
        at += to - from;
    }
    Ok(())
}

/// Walks bytes `from..to` of all turns of a repeat: a broken turn, whole
/// turns, a broken turn.
fn walk_repeat<V: Visit>(
    body_len: u64,
    parts: &[Node],
    from: u64,
    to: u64,
    at: u64,
    turns: &mut Vec<u64>,
    visitor: &mut V,
) -> Result<(), V::Error> {
    let whole_from = from.div_ceil(body_len);
    let whole_to = to / body_len;
    let depth = turns.len();
    let broken = |turn: u64, turns: &mut Vec<u64>, visitor: &mut V| {
        let base = turn * body_len;
        let (a, b) = (from.max(base), to.min(base + body_len));
        turns.push(turn);
        let walked = walk(parts, a - base, b - base, at + (a - from), turns, visitor);
        turns.truncate(depth);
        walked
    };
    if whole_from > whole_to {
        return broken(whole_to, turns, visitor);
    }
    if from < whole_from * body_len {
        broken(whole_from - 1, turns, visitor)?;
    }
    if whole_from < whole_to {
        let landing = at + (whole_from * body_len - from);
        walk_whole_turns(body_len, parts, whole_from, whole_to, landing, turns, visitor)?;
    }
    if to > whole_to * body_len {
        broken(whole_to, turns, visitor)?;
    }
    Ok(())
}

fn walk_whole_turns<V: Visit>(
    body_len: u64,
    parts: &[Node],
    first: u64,
    end: u64,
    at: u64,
    turns: &mut Vec<u64>,
    visitor: &mut V,
) -> Result<(), V::Error> {
    let depth = turns.len();
    if let [Node { len, kind, .. }] = parts {
        match kind {
            Kind::Copy { source, offset, strides } => {
                turns.push(first);
                let offset = offset + dot(strides, turns);
                turns.truncate(depth);
                let runs = Strided { source: *source, offset, len: *len, count: end - first, stride: strides[depth] };
                return visitor.strided(at, runs);
            }
            Kind::Repeat { count, body_len: run_len, parts: inner } => {
                if let [Node { kind: Kind::Copy { source, offset, strides }, .. }] = inner.as_slice() {
                    turns.extend([first, 0]);
                    let offset = offset + dot(strides, turns);
                    turns.truncate(depth);
                    let row =
                        Strided { source: *source, offset, len: *run_len, count: *count, stride: strides[depth + 1] };
                    return visitor.grid(at, Grid { row, rows: end - first, row_stride: strides[depth] });
                }
            }
            Kind::Fill { byte } => return visitor.fill(at, *byte, (end - first) * body_len),
        }
    }
    for turn in first..end {
        turns.push(turn);
        let walked = walk(parts, 0, body_len, at + (turn - first) * body_len, turns, visitor);
        turns.truncate(depth);
        walked?;
    }
    Ok(())
}

fn dot(strides: &[u64], turns: &[u64]) -> u64 {
    strides.iter().zip(turns).map(|(s, t)| s * t).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn view(json: &str, size: u64) -> Result<View, Flaw> {
        let parts: Vec<Part> = serde_json::from_str(json).unwrap();
        View::check(&parts, &|s| (s == 0).then_some(size), None, &mut 100)
    }

    /// Writes source offsets, one a byte; fills are `u64::MAX`.
    struct Offsets(Vec<u64>);

    impl Visit for Offsets {
        type Error = Infallible;
        fn copy(&mut self, at: u64, _: u32, offset: u64, len: u64) -> Result<(), Infallible> {
            assert_eq!(at, self.0.len() as u64);
            self.0.extend(offset..offset + len);
            Ok(())
        }
        fn fill(&mut self, at: u64, _: u8, len: u64) -> Result<(), Infallible> {
            assert_eq!(at, self.0.len() as u64);
            self.0.extend(std::iter::repeat_n(u64::MAX, len as usize));
            Ok(())
        }
    }

    fn offsets(view: &View, start: u64, len: u64) -> Vec<u64> {
        let mut found = Offsets(Vec::new());
        let Ok(()) = view.visit(0, start, len, &mut found);
        found.0
    }

    #[test]
    fn every_range_of_a_view_is_a_range_of_the_whole() {
        for json in [
            r#"[{"repeat":3,"parts":[{"repeat":4,"parts":[{"copy":0,"len":2,"strides":[2,6]}]}]}]"#,
            r#"[{"repeat":2,"parts":[{"repeat":2,"parts":[{"copy":0,"len":3,"strides":[6,3]},{"fill":0,"len":2}]},{"copy":0,"offset":1,"len":1,"strides":[5]}]},{"copy":0,"len":4}]"#,
            r#"[{"repeat":2,"parts":[{"repeat":3,"parts":[{"repeat":2,"parts":[{"copy":0,"len":1,"strides":[12,2,6]}]}]}]},{"repeat":5,"parts":[{"fill":9,"len":1}]}]"#,
        ] {
            let view = view(json, 24).unwrap();
            let whole = offsets(&view, 0, view.len());
            assert_eq!(whole.len() as u64, view.len());
            for start in 0..=view.len() {
                for len in 0..=view.len() - start {
                    assert_eq!(
                        offsets(&view, start, len),
                        whole[start as usize..(start + len) as usize],
                        "{json} {start}+{len}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_transpose_is_the_transpose() {
        let view =
            view(r#"[{"repeat":3,"parts":[{"repeat":2,"parts":[{"copy":0,"len":1,"strides":[1,3]}]}]}]"#, 6).unwrap();
        assert_eq!(offsets(&view, 0, 6), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn an_outer_turn_moves_the_window() {
        let parts: Vec<Part> = serde_json::from_str(r#"[{"copy":0,"len":4,"strides":[4]}]"#).unwrap();
        let window = View::check(&parts, &|_| Some(12), Some(3), &mut 9).unwrap();
        let mut found = Offsets(Vec::new());
        let Ok(()) = window.visit(2, 1, 2, &mut found);
        assert_eq!(found.0, [9, 10]);
        assert!(View::check(&parts, &|_| Some(11), Some(3), &mut 9).is_err());
    }

    #[test]
    fn flaws_are_found() {
        for (json, what) in [
            (r#"[{"copy":0,"offset":21,"len":4}]"#, "up to byte 25"),
            (r#"[{"copy":1,"len":4}]"#, "source 1"),
            (r#"[{"repeat":7,"parts":[{"copy":0,"len":1,"strides":[4]}]}]"#, "up to byte 25"),
            (r#"[{"copy":0,"len":1,"strides":[1]}]"#, "1 strides inside 0 repeats"),
            (r#"[{"copy":0,"len":0}]"#, "is 0"),
            (r#"[{"repeat":0,"parts":[{"fill":0,"len":1}]}]"#, "is 0"),
            (r#"[{"repeat":1,"parts":[]}]"#, "is 0"),
            (r#"[{"repeat":9007199254740991,"parts":[{"fill":0,"len":2}]}]"#, "beyond 2^53-1"),
            (r#"[{"fill":0,"len":9007199254740991},{"fill":0,"len":1}]"#, "beyond 2^53-1"),
            (
                r#"[{"repeat":18446744073709551615,"parts":[{"copy":0,"len":1,"strides":[18446744073709551615]}]}]"#,
                "beyond",
            ),
        ] {
            let flaw = view(json, 24).unwrap_err();
            assert!(flaw.to_string().contains(what), "{json}: {flaw}");
        }
    }

    #[test]
    fn parts_are_budgeted() {
        let parts = vec![Part::Fill { fill: 0, len: 1 }; 101];
        assert!(View::check(&parts, &|_| None, None, &mut 100).is_err());
    }

    #[test]
    fn the_shortest_run_is_that_of_any_depth() {
        let shortest = |json: &str| view(json, 1000).unwrap().shortest_run();
        assert_eq!(shortest(r#"[{"fill": 0, "len": 3}]"#), u64::MAX);
        assert_eq!(shortest(r#"[{"fill": 0, "len": 3}, {"copy": 0, "offset": 5, "len": 70}]"#), 70);
        let nested = r#"[{"copy": 0, "offset": 0, "len": 9}, {"repeat": 3, "parts": [{"repeat": 2, "parts":
            [{"copy": 0, "offset": 0, "len": 20, "strides": [1, 2]}, {"copy": 0, "offset": 0, "len": 8}]}]}]"#;
        assert_eq!(shortest(nested), 8);
    }
}
