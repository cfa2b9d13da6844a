//! From an array to few, fused parts.
//!
//! Elements are emitted in row-major order, outermost axis first. While axes
//! `0 .. at` are done, each of them is one enclosing repeat of whatever comes
//! after, and is level `0 .. at` of every copy's strides. Going back outwards,
//! a repeat dissolves where its turns continue each other. All numbers are
//! bits until [`Lowered::finish`] turns them into bytes.

use alloc::vec;
use alloc::vec::Vec;

use super::body::Body;
use super::replaced;
use crate::abi::{Part, limits};

/// Why a view has no parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LowerError {
    /// More parts than an answer may have.
    TooMany,
    /// A repeat inside more repeats than a view may have.
    TooDeep,
    /// Runs that are no whole number of bytes.
    PartOfByte,
    /// Tiles of one group that would read differently laid out bytes.
    UnevenTiles,
}

impl LowerError {
    /// The message for the author.
    pub(crate) fn message(self) -> &'static str {
        match self {
            LowerError::TooMany => "the view has more parts than the 1048576 of a plan",
            LowerError::TooDeep => "the view has more nested repeats than the 24 of a plan",
            LowerError::PartOfByte => "the view moves elements smaller than a byte apart from each other",
            LowerError::UnevenTiles => "the tiles of one group would read differently laid out bytes",
        }
    }

    /// What to do about it.
    pub(crate) fn hint(self) -> &'static str {
        match self {
            LowerError::TooMany | LowerError::TooDeep => "use a simpler view, or several outputs",
            LowerError::PartOfByte => "move along axes whose rows are whole bytes",
            LowerError::UnevenTiles => "cut the array where its parts meet, and make a group for each",
        }
    }
}

/// The parts of a whole array.
pub(crate) fn view(body: &Body, dims: &[u64], element_bits: u64) -> Result<Vec<Part>, LowerError> {
    if dims.contains(&0) {
        return Ok(Vec::new());
    }
    let mut lowering = Lowering { element_bits, made: 0 };
    let parts = lowering.emit(body, dims, 0)?;
    finish(parts, 0)
}

/// The parts of one tile of an array whose first axis counts the tiles; their
/// first stride is from tile to tile.
pub(crate) fn window(body: &Body, dims: &[u64], element_bits: u64) -> Result<Vec<Part>, LowerError> {
    if dims.contains(&0) {
        return Ok(Vec::new());
    }
    if body.cuts(0).is_some() {
        return Err(LowerError::UnevenTiles);
    }
    let mut lowering = Lowering { element_bits, made: 0 };
    let mut parts = lowering.emit(body, dims, 1)?;
    if dims[0] == 1 {
        each_copy(&mut parts, &mut |_, strides| strides[0] = 0);
    }
    finish(parts, 1)
}

struct Lowering {
    element_bits: u64,
    made: usize,
}

impl Lowering {
    fn emit(&mut self, body: &Body, dims: &[u64], at: usize) -> Result<Vec<Part>, LowerError> {
        if at == dims.len() {
            return self.leaf(body);
        }
        let mut parts = Vec::new();
        if let Body::Pieces { axis, pieces } = body
            && *axis == at
        {
            for piece in pieces {
                self.append(&mut parts, &piece.body, &replaced(dims, at..at + 1, &piece.dims), at)?;
            }
            return Ok(parts);
        }
        let Some(cuts) = body.cuts(at) else {
            let inner = self.emit(body, dims, at + 1)?;
            return Ok(wrap(dims[at], inner, at));
        };
        // A node further down cuts this axis, so cut the whole tree there.
        let mut start = 0;
        for (end, own) in cuts {
            let cut = body.slice(at, start..end).split(at, &own).map_err(|_| LowerError::TooMany)?;
            self.append(&mut parts, &cut, &replaced(dims, at..at + 1, &own), at)?;
            start = end;
        }
        Ok(parts)
    }

    fn append(&mut self, parts: &mut Vec<Part>, body: &Body, dims: &[u64], at: usize) -> Result<(), LowerError> {
        for part in self.emit(body, dims, at)? {
            join(parts, part, at);
        }
        Ok(())
    }

    fn leaf(&mut self, body: &Body) -> Result<Vec<Part>, LowerError> {
        self.made += 1;
        if self.made > limits::PARTS {
            return Err(LowerError::TooMany);
        }
        Ok(vec![match body {
            Body::Strided { source, offset, strides } => {
                Part::Copy { copy: *source, offset: *offset, len: self.element_bits, strides: strides.clone() }
            }
            Body::Fill { byte } => Part::Fill { fill: *byte, len: self.element_bits },
            Body::Pieces { .. } => unreachable!("every axis is done, so none is left to be cut"),
        }])
    }
}

/// `count` turns of `parts`, of which the copies' level `level` is this repeat.
fn wrap(count: u64, mut parts: Vec<Part>, level: usize) -> Vec<Part> {
    if count == 1 {
        drop_level(&mut parts, level);
        return parts;
    }
    match parts.as_mut_slice() {
        [Part::Fill { len, .. }] => {
            *len *= count;
            return parts;
        }
        [Part::Copy { len, strides, .. }] if strides[level] == *len => {
            *len *= count;
            drop_level(&mut parts, level);
            return parts;
        }
        [Part::Repeat { repeat, parts: inner }] if steps_on(inner, level, *repeat) => {
            *repeat *= count;
            drop_level(inner, level);
            return parts;
        }
        _ => {}
    }
    vec![Part::Repeat { repeat: count, parts }]
}

/// Whether a turn at `level` continues the `turns` turns at the next level.
fn steps_on(parts: &[Part], level: usize, turns: u64) -> bool {
    parts.iter().all(|part| match part {
        Part::Copy { strides, .. } => strides[level + 1].checked_mul(turns) == Some(strides[level]),
        Part::Fill { .. } => true,
        Part::Repeat { parts, .. } => steps_on(parts, level, turns),
    })
}

/// Appends a part at `level`, or lengthens the last one by it.
fn join(parts: &mut Vec<Part>, part: Part, level: usize) {
    match (parts.last_mut(), &part) {
        (Some(Part::Fill { fill: a, len }), Part::Fill { fill: b, len: more }) if a == b => *len += more,
        (
            Some(Part::Copy { copy: a, offset, len, strides: s }),
            Part::Copy { copy: b, offset: next, len: more, strides: t },
        ) if a == b && s == t && *offset + *len == *next => *len += more,
        (Some(Part::Repeat { repeat, parts: a }), Part::Repeat { repeat: more, parts: b })
            if follows(a, b, level, *repeat) =>
        {
            *repeat += more;
        }
        _ => parts.push(part),
    }
}

/// Whether `b` is what `a` becomes after `turns` turns at `level`.
fn follows(a: &[Part], b: &[Part], level: usize, turns: u64) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|pair| match pair {
            (
                Part::Copy { copy: a, offset, len: l, strides: s },
                Part::Copy { copy: b, offset: next, len: m, strides: t },
            ) => a == b && l == m && s == t && offset + s[level] * turns == *next,
            (Part::Repeat { repeat: n, parts: a }, Part::Repeat { repeat: m, parts: b }) => {
                n == m && follows(a, b, level, turns)
            }
            (a, b) => a == b,
        })
}

fn drop_level(parts: &mut [Part], level: usize) {
    each_copy(parts, &mut |_, strides| {
        strides.remove(level);
    });
}

fn each_copy(parts: &mut [Part], f: &mut impl FnMut(&mut u64, &mut Vec<u64>)) {
    for part in parts {
        match part {
            Part::Copy { offset, strides, .. } => f(offset, strides),
            Part::Fill { .. } => {}
            Part::Repeat { parts, .. } => each_copy(parts, f),
        }
    }
}

/// Bits to bytes, and the form that is cheapest to walk through.
fn finish(mut parts: Vec<Part>, depth: usize) -> Result<Vec<Part>, LowerError> {
    each_repeat(&mut parts, &mut unroll_pair);
    parts.iter_mut().try_for_each(|part| to_bytes(part, depth))?;
    Ok(parts)
}

/// Calls `f` with the parts of every repeat, innermost first.
fn each_repeat(parts: &mut [Part], f: &mut impl FnMut(&mut Vec<Part>)) {
    for part in parts {
        if let Part::Repeat { parts, .. } = part {
            each_repeat(parts, f);
            f(parts);
        }
    }
}

/// Two turns of one copy, as all that another repeat does, are two copies.
fn unroll_pair(parts: &mut Vec<Part>) {
    if let [Part::Repeat { repeat: 2, parts: inner }] = parts.as_slice()
        && let [Part::Copy { copy, offset, len, strides }] = inner.as_slice()
        && let Some((step, outer)) = strides.split_last()
    {
        let turn = |offset: u64| Part::Copy { copy: *copy, offset, len: *len, strides: outer.to_vec() };
        *parts = vec![turn(*offset), turn(offset + step)];
    }
}

fn to_bytes(part: &mut Part, depth: usize) -> Result<(), LowerError> {
    let bytes = |bits: &mut u64| {
        let whole = bits.is_multiple_of(8);
        *bits /= 8;
        if whole { Ok(()) } else { Err(LowerError::PartOfByte) }
    };
    match part {
        Part::Copy { offset, len, strides, .. } => {
            while strides.last() == Some(&0) {
                strides.pop();
            }
            bytes(offset)?;
            bytes(len)?;
            strides.iter_mut().try_for_each(bytes)
        }
        Part::Fill { len, .. } => bytes(len),
        Part::Repeat { parts, .. } => {
            if depth == limits::DEPTH {
                return Err(LowerError::TooDeep);
            }
            parts.iter_mut().try_for_each(|part| to_bytes(part, depth + 1))
        }
    }
}
