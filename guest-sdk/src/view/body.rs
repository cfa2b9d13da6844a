//! Where the elements of an array come from, without its shape.
//!
//! A [`Body`] is a tree over a list of axes. A leaf gives every axis a stride
//! in its source, or is one byte value throughout. An inner node cuts **one**
//! axis into pieces, and each piece replaces that axis by a list of axes of
//! its own. A node with one piece therefore says that an axis is several
//! axes, merged; so any reshape, permutation, slice and concatenation of
//! arrays of any structure stays a small tree.
//!
//! Invariants: extents are at least 1 (an array without elements is a fill);
//! the product of a piece's axes is its extent; no piece has an axis of extent
//! 1 beside another; offsets and strides are in bits, so that elements smaller
//! than a byte are exact and [`lower`](super::lower) alone decides what is a
//! whole number of bytes.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::replaced;

/// The number of a tensor that parts copy from.
pub(crate) type SourceNumber = u64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Strided {
        source: SourceNumber,
        /// Bits to the first element.
        offset: u64,
        /// Bits from one element to the next, by axis.
        strides: Vec<u64>,
    },
    Fill {
        byte: u8,
    },
    Pieces {
        axis: usize,
        pieces: Vec<Piece>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where the piece ends on the axis that is cut.
    pub(crate) end: u64,
    /// The axes that stand for the cut axis here.
    pub(crate) dims: Vec<u64>,
    pub(crate) body: Body,
}

/// A split that would fall apart into too many pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Irregular;

/// The most pieces that one irregular cut may make.
const MAX_IRREGULAR: u64 = 4096;

/// Where `axis`, which is not `cut`, is in a piece with `dims` axes for `cut`.
fn inside(axis: usize, cut: usize, dims: usize) -> usize {
    if axis < cut { axis } else { axis - 1 + dims }
}

impl Body {
    /// Cuts `axis` into pieces, each with its own axes and body.
    pub(crate) fn from_pieces(axis: usize, parts: Vec<(Vec<u64>, Body)>) -> Body {
        let mut pieces: Vec<Piece> = Vec::with_capacity(parts.len());
        for (dims, body) in parts {
            push_piece(&mut pieces, axis, dims, body);
        }
        match pieces.pop() {
            Some(only) if pieces.is_empty() && only.dims.len() == 1 => only.body,
            Some(last) => {
                pieces.push(last);
                Body::Pieces { axis, pieces }
            }
            None => Body::Fill { byte: 0 },
        }
    }

    /// The axes `at .. at + dims.len()`, of these extents, as one axis.
    pub(crate) fn merge(self, at: usize, dims: &[u64]) -> Body {
        if dims.len() == 1 {
            return self;
        }
        match self {
            Body::Fill { byte } => Body::Fill { byte },
            Body::Strided { source, offset, strides } if is_dense(&strides[at..at + dims.len()], dims) => {
                Body::Strided { source, offset, strides: replaced(&strides, at..at + dims.len() - 1, &[]) }
            }
            body => Body::from_pieces(at, vec![(dims.to_vec(), body)]),
        }
    }

    /// A new axis at `at`, along which everything is repeated.
    pub(crate) fn insert(self, at: usize) -> Body {
        match self {
            Body::Fill { byte } => Body::Fill { byte },
            Body::Strided { source, offset, mut strides } => {
                strides.insert(at, 0);
                Body::Strided { source, offset, strides }
            }
            Body::Pieces { axis, pieces } => {
                let moved = if at <= axis { axis + 1 } else { axis };
                let each = |piece: Piece| {
                    let at = if at <= axis { at } else { at - 1 + piece.dims.len() };
                    Piece { body: piece.body.insert(at), ..piece }
                };
                Body::Pieces { axis: moved, pieces: pieces.into_iter().map(each).collect() }
            }
        }
    }

    /// Without axis `at`, whose extent is 1.
    pub(crate) fn remove_unit(self, at: usize) -> Body {
        match self {
            Body::Fill { byte } => Body::Fill { byte },
            Body::Strided { source, offset, mut strides } => {
                strides.remove(at);
                Body::Strided { source, offset, strides }
            }
            Body::Pieces { axis, mut pieces } if axis == at => match pieces.pop() {
                Some(piece) => piece.dims.iter().fold(piece.body, |body, _| body.remove_unit(at)),
                None => Body::Fill { byte: 0 },
            },
            Body::Pieces { axis, pieces } => {
                let moved = if at < axis { axis - 1 } else { axis };
                let each = |piece: Piece| {
                    let at = inside(at, axis, piece.dims.len());
                    Piece { body: piece.body.remove_unit(at), ..piece }
                };
                Body::Pieces { axis: moved, pieces: pieces.into_iter().map(each).collect() }
            }
        }
    }

    /// Axis `i` of the result is axis `order[i]`.
    pub(crate) fn permute(self, order: &[usize]) -> Body {
        match self {
            Body::Fill { byte } => Body::Fill { byte },
            Body::Strided { source, offset, strides } => {
                Body::Strided { source, offset, strides: order.iter().map(|&from| strides[from]).collect() }
            }
            Body::Pieces { axis, pieces } => {
                let moved = order.iter().take_while(|&&from| from != axis).count();
                let each = |piece: Piece| {
                    let own = piece.dims.len();
                    let mut inner = Vec::with_capacity(order.len() + own);
                    for &from in order {
                        if from == axis {
                            inner.extend(axis..axis + own);
                        } else {
                            inner.push(inside(from, axis, own));
                        }
                    }
                    Piece { body: piece.body.permute(&inner), ..piece }
                };
                Body::Pieces { axis: moved, pieces: pieces.into_iter().map(each).collect() }
            }
        }
    }

    /// Only `range` of axis `at`; not empty, and within the axis.
    pub(crate) fn slice(&self, at: usize, range: Range<u64>) -> Body {
        match self {
            Body::Fill { byte } => Body::Fill { byte: *byte },
            Body::Strided { source, offset, strides } => {
                Body::Strided { source: *source, offset: offset + range.start * strides[at], strides: strides.clone() }
            }
            Body::Pieces { axis, pieces } if *axis == at => {
                let mut kept = Vec::new();
                let first = pieces.partition_point(|piece| piece.end <= range.start);
                for (k, piece) in pieces.iter().enumerate().skip(first) {
                    let start = if k == 0 { 0 } else { pieces[k - 1].end };
                    if start >= range.end {
                        break;
                    }
                    let (from, to) = (range.start.max(start) - start, range.end.min(piece.end) - start);
                    piece.slice_into(at, from..to, &mut kept);
                }
                Body::from_pieces(at, kept)
            }
            Body::Pieces { axis, pieces } => {
                let each = |piece: &Piece| Piece {
                    end: piece.end,
                    dims: piece.dims.clone(),
                    body: piece.body.slice(inside(at, *axis, piece.dims.len()), range.clone()),
                };
                Body::Pieces { axis: *axis, pieces: pieces.iter().map(each).collect() }
            }
        }
    }

    /// Axis `at` as the axes `into`, whose product is its extent.
    pub(crate) fn split(self, at: usize, into: &[u64]) -> Result<Body, Irregular> {
        let wide: Vec<u64> = into.iter().copied().filter(|&extent| extent > 1).collect();
        let mut body = match wide.len() {
            0 => self.remove_unit(at),
            1 => self,
            _ => self.split_wide(at, &wide)?,
        };
        for (k, &extent) in into.iter().enumerate() {
            if extent == 1 {
                body = body.insert(at + k);
            }
        }
        Ok(body)
    }

    /// As [`split`](Self::split), of two or more axes that are all wider than 1.
    fn split_wide(self, at: usize, into: &[u64]) -> Result<Body, Irregular> {
        match self {
            Body::Fill { byte } => Ok(Body::Fill { byte }),
            Body::Strided { source, offset, strides } => {
                let mut stride = strides[at];
                let mut own = vec![0; into.len()];
                for (slot, extent) in own.iter_mut().zip(into).rev() {
                    *slot = stride;
                    stride *= extent;
                }
                Ok(Body::Strided { source, offset, strides: replaced(&strides, at..at + 1, &own) })
            }
            Body::Pieces { axis, pieces } if axis != at => {
                let moved = if at < axis { axis - 1 + into.len() } else { axis };
                let each = |piece: Piece| {
                    let body = piece.body.split_wide(inside(at, axis, piece.dims.len()), into)?;
                    Ok(Piece { end: piece.end, dims: piece.dims, body })
                };
                Ok(Body::Pieces { axis: moved, pieces: pieces.into_iter().map(each).collect::<Result<_, _>>()? })
            }
            Body::Pieces { mut pieces, .. } => match pieces.pop() {
                Some(only) if pieces.is_empty() => only.split_merged(at, into),
                Some(last) => {
                    pieces.push(last);
                    split_pieces(Body::Pieces { axis: at, pieces }, at, into)
                }
                None => Ok(Body::Fill { byte: 0 }),
            },
        }
    }

    /// How the first node that cuts axis `at` cuts it: the end and the axes of
    /// each piece. `None` if no node does.
    pub(crate) fn cuts(&self, at: usize) -> Option<Vec<(u64, Vec<u64>)>> {
        let Body::Pieces { axis, pieces } = self else { return None };
        if *axis == at {
            return Some(pieces.iter().map(|piece| (piece.end, piece.dims.clone())).collect());
        }
        pieces.iter().find_map(|piece| piece.body.cuts(inside(at, *axis, piece.dims.len())))
    }
}

impl Piece {
    /// Appends `range` of this piece, as one box or several, to `kept`.
    fn slice_into(&self, at: usize, range: Range<u64>, kept: &mut Vec<(Vec<u64>, Body)>) {
        let mut boxes = Vec::new();
        cut_boxes(&self.dims, range, &mut Vec::new(), &mut boxes);
        for ranges in boxes {
            let mut body = self.body.clone();
            for (k, range) in ranges.iter().enumerate() {
                if *range != (0..self.dims[k]) {
                    body = body.slice(at + k, range.clone());
                }
            }
            kept.push((ranges.iter().map(|r| r.end - r.start).collect(), body));
        }
    }

    /// The axis `at` that this piece alone makes up, as the axes `into`.
    fn split_merged(self, at: usize, into: &[u64]) -> Result<Body, Irregular> {
        if let Some(refined) = refine(&self.dims, into) {
            let mut body = self.body;
            for (k, own) in refined.of_from.iter().enumerate().rev() {
                body = body.split(at + k, own)?;
            }
            for (k, own) in refined.of_to.iter().enumerate().rev() {
                let first: usize = refined.of_to[..k].iter().map(Vec::len).sum();
                body = body.merge(at + first, own);
            }
            return Ok(body);
        }
        // The two lists of axes have no common refinement, so the rows do not
        // begin at regular places: take them one by one.
        let (own, rows) = (self.dims[0], into[0]);
        if own.min(rows) > MAX_IRREGULAR {
            return Err(Irregular);
        }
        if own <= rows {
            let rest = self.dims[1..].to_vec();
            let parts = (0..own).map(|k| (rest.clone(), self.body.slice(at, k..k + 1).remove_unit(at))).collect();
            return split_pieces(Body::from_pieces(at, parts), at, into);
        }
        let inner: u64 = into[1..].iter().product();
        let whole = Body::Pieces { axis: at, pieces: vec![self] };
        let mut parts = Vec::new();
        for k in 0..rows {
            let row = whole.slice(at, k * inner..(k + 1) * inner);
            parts.push((vec![1], row.split(at, &into[1..])?.insert(at)));
        }
        Ok(Body::from_pieces(at, parts))
    }
}

/// Splits an axis that is cut into several pieces: runs of rows that lie in
/// one piece stay together, a row that crosses a boundary is a piece.
fn split_pieces(body: Body, at: usize, into: &[u64]) -> Result<Body, Irregular> {
    let ends: Vec<u64> = match &body {
        Body::Pieces { axis, pieces } if *axis == at => pieces.iter().map(|piece| piece.end).collect(),
        _ => return body.split(at, into),
    };
    let inner: u64 = into[1..].iter().product();
    let mut parts = Vec::new();
    let mut pos = 0;
    for end in ends {
        let rows = end.saturating_sub(pos) / inner;
        if rows > 0 {
            let mut own = vec![rows];
            own.extend_from_slice(&into[1..]);
            parts.push((vec![rows], body.slice(at, pos..pos + rows * inner).split(at, &own)?));
            pos += rows * inner;
        }
        if pos < end {
            let row = body.slice(at, pos..pos + inner).split(at, &into[1..])?;
            parts.push((vec![1], row.insert(at)));
            pos += inner;
        }
    }
    Ok(Body::from_pieces(at, parts))
}

/// Appends a piece, without needless structure: axes of extent 1 go, a body
/// that is itself cut on this axis is taken apart, and what continues the
/// last piece is joined to it.
fn push_piece(pieces: &mut Vec<Piece>, axis: usize, mut dims: Vec<u64>, mut body: Body) {
    let mut k = 0;
    while k < dims.len() && dims.len() > 1 {
        if dims[k] == 1 {
            dims.remove(k);
            body = body.remove_unit(axis + k);
        } else {
            k += 1;
        }
    }
    let start = pieces.last().map_or(0, |piece| piece.end);
    if dims.len() == 1 {
        match body {
            Body::Pieces { axis: inner, pieces: own } if inner == axis => {
                own.into_iter().for_each(|piece| push_piece(pieces, axis, piece.dims, piece.body));
                return;
            }
            other => body = other,
        }
    }
    let extent: u64 = dims.iter().product();
    if let Some(last) = pieces.last_mut()
        && continues(last, axis, &dims, &body)
    {
        last.dims = vec![last.dims.iter().product::<u64>() + extent];
        last.end += extent;
        return;
    }
    pieces.push(Piece { end: start + extent, dims, body });
}

fn continues(last: &Piece, axis: usize, dims: &[u64], body: &Body) -> bool {
    match (&last.body, body) {
        (Body::Fill { byte: a }, Body::Fill { byte: b }) => a == b,
        (Body::Strided { source: s, offset: o, strides: a }, Body::Strided { source: t, offset: p, strides: b }) => {
            last.dims.len() == 1
                && dims.len() == 1
                && s == t
                && a == b
                && last.dims[0].checked_mul(a[axis]).and_then(|n| n.checked_add(*o)) == Some(*p)
        }
        _ => false,
    }
}

fn is_dense(strides: &[u64], dims: &[u64]) -> bool {
    (1..dims.len()).all(|k| strides[k - 1] == strides[k] * dims[k])
}

/// The boxes that make up `range` of the row-major elements of `dims`: the
/// tail of a first row, whole rows, the head of a last one, at every level.
fn cut_boxes(dims: &[u64], range: Range<u64>, prefix: &mut Vec<Range<u64>>, out: &mut Vec<Vec<Range<u64>>>) {
    let whole: u64 = dims.iter().product();
    let mut emit = |prefix: &[Range<u64>], first: Option<Range<u64>>, rest: &[u64]| {
        let mut ranges = prefix.to_vec();
        ranges.extend(first);
        ranges.extend(rest.iter().map(|&extent| 0..extent));
        out.push(ranges);
    };
    if range == (0..whole) {
        return emit(prefix, None, dims);
    }
    if dims.len() == 1 {
        return emit(prefix, Some(range), &[]);
    }
    let inner = whole / dims[0];
    let (mut first, last) = (range.start / inner, range.end / inner);
    let (head, tail) = (range.start % inner, range.end % inner);
    let row = |k: u64, range: Range<u64>, prefix: &mut Vec<Range<u64>>, out: &mut Vec<Vec<Range<u64>>>| {
        prefix.push(k..k + 1);
        cut_boxes(&dims[1..], range, prefix, out);
        prefix.pop();
    };
    if first == last {
        return row(first, head..tail, prefix, out);
    }
    if head > 0 {
        row(first, head..inner, prefix, out);
        first += 1;
    }
    if first < last {
        let mut ranges = prefix.clone();
        ranges.push(first..last);
        ranges.extend(dims[1..].iter().map(|&extent| 0..extent));
        out.push(ranges);
    }
    if tail > 0 {
        row(last, 0..tail, prefix, out);
    }
}

struct Refined {
    of_from: Vec<Vec<u64>>,
    of_to: Vec<Vec<u64>>,
}

/// The coarsest list of axes that both lists are groups of, or `None`. All
/// extents are wider than 1 and the products are equal.
fn refine(from: &[u64], to: &[u64]) -> Option<Refined> {
    let mut refined = Refined { of_from: vec![Vec::new(); from.len()], of_to: vec![Vec::new(); to.len()] };
    let (mut i, mut j) = (from.len(), to.len());
    let (mut a, mut b) = (1, 1);
    while i > 0 || j > 0 || a > 1 || b > 1 {
        if a == 1 {
            i = i.checked_sub(1)?;
            a = from[i];
        }
        if b == 1 {
            j = j.checked_sub(1)?;
            b = to[j];
        }
        let step = a.min(b);
        if a % step != 0 || b % step != 0 {
            return None;
        }
        refined.of_from[i].insert(0, step);
        refined.of_to[j].insert(0, step);
        a /= step;
        b /= step;
    }
    Some(refined)
}
