//! Where a NaN's bits can be seen at all.
//!
//! Arithmetic does not care about the bits of a NaN that it is given: its
//! result is a NaN, and just as open. Nor do comparisons and conversions to
//! integers. So of a chain of arithmetic only the end has to be canonical: a
//! value that is stored, passed on, or taken apart as bits. What comes out is
//! the same, bit for bit, as with every result made canonical.
//!
//! Values are followed through one function. On the operand stack that is
//! exact: a value has one producer and one consumer. Through locals it goes by
//! *webs*: all values that one `local.get` may read, and all reads of those,
//! found with the joins that SSA form would have (a local may serve several
//! purposes one after the other, and does, after register allocation). A web
//! is made canonical where its values are made or, if each of them is a result
//! of one kind of arithmetic, where they are read as bits: whichever is run
//! less often, by loop depth.
//!
//! All else (block results, call arguments, globals, `select`) counts as seen.

use std::collections::BTreeMap;

use wasmparser::{BinaryReaderError, FuncValidator, FunctionBody, Operator, ValType, WasmModuleResources};

use super::super::floats::{self, Float};
use super::nans::Place;

/// Values, at joins and on the operand stack, that are followed in one
/// function. Beyond it every result of the function is made canonical.
const FOLLOWED_VALUES: usize = 500_000;
/// How much more often what is in a loop is assumed to run.
const LOOP_TURNS: u64 = 8;
/// Loops deeper than this count as this deep.
const DEPTH_MAX: u32 = 16;

/// Where `body`, for which `validator` was made, needs canonical NaNs. `None`:
/// it is too intricate to say.
pub(super) fn places<R: WasmModuleResources>(
    body: &FunctionBody<'_>,
    validator: &mut FuncValidator<R>,
) -> Result<Option<Vec<Place>>, BinaryReaderError> {
    let parameters = validator.len_locals();
    let mut locals = body.get_locals_reader()?;
    for _ in 0..locals.get_count() {
        let offset = locals.original_position();
        let (count, ty) = locals.read()?;
        validator.define_locals(offset, count, ty)?;
    }
    let mut flow = Flow::new(validator, parameters);
    let mut operators = body.get_operators_reader()?;
    while !operators.eof() {
        let offset = operators.original_position();
        let operator = operators.read()?;
        let arity = operator.operator_arity(&*validator);
        validator.op(offset, &operator)?;
        let Some((pops, pushes)) = arity else { return Ok(None) };
        flow.step(&operator, pops as usize, pushes as usize, operators.original_position());
        if flow.joined + flow.stack.len() > FOLLOWED_VALUES {
            return Ok(None);
        }
    }
    Ok(Some(flow.places()))
}

/// What a local may hold.
#[derive(Clone, Debug)]
enum Value {
    /// Bits that are exact whatever they are.
    Exact,
    /// A constant, the low bytes of a vector.
    Constant(u128),
    /// A result of arithmetic.
    Made(Place, u32),
    /// One of these.
    Join(Vec<Id>),
}

type Id = u32;
/// The value [`Value::Exact`], and the zero that locals begin with. They are
/// shared, so they tie no webs together.
const EXACT: Id = 0;
const ZERO: Id = 1;

/// An entry of the operand stack.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Exact,
    Constant(u128),
    /// Just made by arithmetic, and nowhere else yet.
    Made(Place),
    /// A copy of a local's value, on the stack from this place on.
    Read(Id, usize),
}

/// How an instruction looks at an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// As numbers of a kind.
    Numbers(Float),
    /// At its bits.
    Bits,
}

/// A value of a local, read.
#[derive(Clone, Copy, Debug)]
struct Read {
    value: Id,
    look: Look,
    /// Where the value is on the stack.
    place: usize,
    depth: u32,
}

/// A block that is open.
struct Frame {
    what: What,
    /// Height of the operand stack without the block's parameters.
    height: usize,
    parameters: usize,
    /// Whether it can be reached at all.
    live: bool,
    /// What the locals hold at its end, from the branches to there.
    end: Option<Vec<Id>>,
    /// The joins in `end` that are its own.
    own: Vec<bool>,
}

enum What {
    Block,
    /// The joins at its head.
    Loop(Vec<Id>),
    /// What the locals hold at `else`.
    If(Vec<Id>),
}

struct Flow {
    /// For each local its position in `locals`, if it can hold a float.
    followed: Vec<Option<usize>>,
    locals: Vec<Id>,
    values: Vec<Value>,
    stack: Vec<Entry>,
    frames: Vec<Frame>,
    live: bool,
    depth: u32,
    reads: Vec<Read>,
    places: Vec<Place>,
    joined: usize,
}

impl Flow {
    fn new<R: WasmModuleResources>(validator: &FuncValidator<R>, parameters: u32) -> Self {
        let mut flow = Flow {
            followed: Vec::new(),
            locals: Vec::new(),
            values: vec![Value::Exact, Value::Constant(0)],
            stack: Vec::new(),
            frames: Vec::new(),
            live: true,
            depth: 0,
            reads: Vec::new(),
            places: Vec::new(),
            joined: 0,
        };
        for local in 0..validator.len_locals() {
            let float = matches!(validator.get_local_type(local), Some(ValType::F32 | ValType::F64 | ValType::V128));
            flow.followed.push(float.then_some(flow.locals.len()));
            // Locals that are not parameters begin at zero.
            flow.locals.extend(float.then_some(if local < parameters { EXACT } else { ZERO }));
        }
        flow.open(0, 0, |_| What::Block);
        flow
    }

    /// Follows one instruction; `place` is where the next one begins.
    fn step(&mut self, operator: &Operator<'_>, pops: usize, pushes: usize, place: usize) {
        match operator {
            Operator::Block { .. } => self.open(pops, pops, |_| What::Block),
            Operator::Loop { .. } => self.open(pops, pops, |flow| What::Loop(flow.join_at_head())),
            // One operand is the condition.
            Operator::If { .. } => self.open(pops, pops - 1, |flow| What::If(flow.copied())),
            Operator::Else => self.at_else(pops),
            Operator::End => self.at_end(pops, pushes),
            // What cannot be reached needs nothing.
            _ if !self.live => {}
            Operator::LocalSet { local_index } => _ = self.set(*local_index),
            Operator::LocalTee { local_index } => {
                let value = self.set(*local_index);
                self.stack.push(value.map_or(Entry::Exact, |value| Entry::Read(value, place)));
            }
            Operator::LocalGet { local_index } => {
                let local = self.followed[*local_index as usize];
                self.stack.push(local.map_or(Entry::Exact, |local| Entry::Read(self.locals[local], place)));
            }
            Operator::F32Const { value } => self.stack.push(Entry::Constant(value.bits().into())),
            Operator::F64Const { value } => self.stack.push(Entry::Constant(value.bits().into())),
            Operator::V128Const { value } => self.stack.push(Entry::Constant(u128::from_le_bytes(*value.bytes()))),
            Operator::Drop => _ = self.stack.pop(),
            _ => self.other(operator, pops, pushes, place),
        }
    }

    fn other(&mut self, operator: &Operator<'_>, pops: usize, pushes: usize, place: usize) {
        self.pop(pops, floats::read_by(operator).map_or(Look::Bits, Look::Numbers));
        match floats::made_by(operator) {
            Some(kind) => self.stack.push(Entry::Made(Place { at: place, kind })),
            None => self.push_exact(pushes),
        }
        match operator {
            Operator::Br { relative_depth } => {
                self.branch(*relative_depth);
                self.live = false;
            }
            Operator::BrIf { relative_depth } => self.branch(*relative_depth),
            Operator::BrTable { targets } => {
                // Valid: the reader has been through it.
                let mut all: Vec<u32> = targets.targets().flatten().chain([targets.default()]).collect();
                all.sort_unstable();
                all.dedup();
                all.into_iter().for_each(|depth| self.branch(depth));
                self.live = false;
            }
            Operator::Return | Operator::Unreachable => self.live = false,
            _ => {}
        }
    }

    fn push_exact(&mut self, count: usize) {
        self.stack.extend(std::iter::repeat_n(Entry::Exact, count));
    }

    /// Takes operands from the stack.
    fn pop(&mut self, count: usize, look: Look) {
        for entry in self.stack.split_off(self.stack.len().saturating_sub(count)) {
            match entry {
                Entry::Made(place) if look != Look::Numbers(place.kind) => self.places.push(place),
                Entry::Read(value, place) if value != EXACT => {
                    self.reads.push(Read { value, look, place, depth: self.depth });
                }
                Entry::Made(_) | Entry::Read(..) | Entry::Exact | Entry::Constant(_) => {}
            }
        }
    }

    /// Puts the stack's top into a local: what that holds from now on.
    fn set(&mut self, local: u32) -> Option<Id> {
        let entry = self.stack.pop()?;
        let local = self.followed[local as usize]?;
        let value = match entry {
            Entry::Exact => EXACT,
            Entry::Constant(bits) => self.value(Value::Constant(bits)),
            Entry::Made(place) => self.value(Value::Made(place, self.depth)),
            Entry::Read(value, _) => value,
        };
        self.locals[local] = value;
        Some(value)
    }

    fn value(&mut self, value: Value) -> Id {
        self.values.push(value);
        // Bounded by the function's bytes and by FOLLOWED_VALUES.
        (self.values.len() - 1) as Id
    }

    fn open(&mut self, pops: usize, parameters: usize, what: impl FnOnce(&mut Self) -> What) {
        let mut frame = Frame { what: What::Block, height: 0, parameters, live: self.live, end: None, own: Vec::new() };
        if self.live {
            self.pop(pops, Look::Bits);
            frame.what = what(self);
            self.depth += u32::from(matches!(frame.what, What::Loop(_)));
        }
        frame.height = self.stack.len();
        if self.live {
            self.push_exact(parameters);
        }
        self.frames.push(frame);
    }

    fn copied(&mut self) -> Vec<Id> {
        self.joined += self.locals.len();
        self.locals.clone()
    }

    /// New values for all locals, each of them a join of what it was and what
    /// branches bring.
    fn join_at_head(&mut self) -> Vec<Id> {
        self.joined += self.locals.len();
        for local in 0..self.locals.len() {
            self.locals[local] = self.value(Value::Join(vec![self.locals[local]]));
        }
        self.locals.clone()
    }

    fn branch(&mut self, depth: u32) {
        let Some(target) = self.frames.len().checked_sub(1 + depth as usize) else { return };
        match &self.frames[target].what {
            What::Loop(head) => {
                self.joined += head.len();
                for (join, value) in head.iter().zip(&self.locals) {
                    if let Value::Join(values) = &mut self.values[*join as usize]
                        && join != value
                    {
                        values.push(*value);
                    }
                }
            }
            // What locals hold when a function returns is lost.
            _ if target == 0 => {}
            _ => {
                let locals = std::mem::take(&mut self.locals);
                self.reach_end(target, &locals);
                self.locals = locals;
            }
        }
    }

    /// Control gets to a block's end with this in the locals.
    fn reach_end(&mut self, target: usize, locals: &[Id]) {
        let Frame { end, own, .. } = &mut self.frames[target];
        self.joined += locals.len();
        let Some(end) = end else {
            *end = Some(locals.to_vec());
            own.resize(locals.len(), false);
            return;
        };
        for ((end, own), &value) in end.iter_mut().zip(own).zip(locals) {
            if *end == value {
                continue;
            }
            if !*own {
                self.values.push(Value::Join(vec![*end]));
                (*end, *own) = ((self.values.len() - 1) as Id, true);
            }
            if let Value::Join(values) = &mut self.values[*end as usize] {
                values.push(value);
            }
        }
    }

    fn at_else(&mut self, pops: usize) {
        let target = self.frames.len() - 1;
        if self.live {
            self.pop(pops, Look::Bits);
            let locals = std::mem::take(&mut self.locals);
            self.reach_end(target, &locals);
        }
        let frame = &mut self.frames[target];
        self.live = frame.live;
        self.stack.truncate(frame.height);
        let parameters = frame.parameters;
        if let What::If(locals) = std::mem::replace(&mut frame.what, What::Block) {
            self.locals = locals;
            self.push_exact(parameters);
        }
    }

    fn at_end(&mut self, pops: usize, pushes: usize) {
        if self.live {
            self.pop(pops, Look::Bits);
        }
        let target = self.frames.len() - 1;
        match std::mem::replace(&mut self.frames[target].what, What::Block) {
            What::Loop(_) => self.depth -= 1,
            what => {
                if self.live {
                    let locals = std::mem::take(&mut self.locals);
                    self.reach_end(target, &locals);
                }
                // An `if` without `else`.
                if let What::If(locals) = what {
                    self.reach_end(target, &locals);
                }
                if let Some(end) = self.frames[target].end.take() {
                    (self.locals, self.live) = (end, true);
                }
            }
        }
        self.stack.truncate(self.frames[target].height);
        if self.live {
            self.push_exact(pushes);
        }
        self.frames.pop();
    }

    /// The places, ascending.
    fn places(mut self) -> Vec<Place> {
        let webs = self.webs();
        let mut web_of: BTreeMap<Id, Web> = BTreeMap::new();
        for (id, root) in webs.iter().enumerate().filter(|(_, root)| **root != UNREAD) {
            web_of.entry(*root).or_default().take(&self.values[id]);
        }
        for read in &self.reads {
            if let Some(web) = web_of.get_mut(&webs[read.value as usize]) {
                web.read(read);
            }
        }
        for web in web_of.into_values() {
            self.places.extend(web.places());
        }
        self.places.sort_unstable_by_key(|place| place.at);
        self.places
    }

    /// For each value that may be read, its web's root.
    fn webs(&self) -> Vec<Id> {
        let mut roots = vec![UNREAD; self.values.len()];
        let mut open: Vec<Id> = self.reads.iter().map(|read| read.value).collect();
        while let Some(id) = open.pop() {
            if roots[id as usize] != UNREAD {
                continue;
            }
            roots[id as usize] = id;
            if let Value::Join(values) = &self.values[id as usize] {
                open.extend(values);
            }
        }
        for (id, value) in self.values.iter().enumerate() {
            let Value::Join(values) = value else { continue };
            if roots[id] == UNREAD {
                continue;
            }
            for value in values.iter().filter(|value| **value > ZERO) {
                let (a, b) = (root(&mut roots, id as Id), root(&mut roots, *value));
                roots[a.max(b) as usize] = a.min(b);
            }
        }
        for id in 0..roots.len() as Id {
            if roots[id as usize] != UNREAD {
                roots[id as usize] = root(&mut roots, id);
            }
        }
        roots
    }
}

/// In place of a root: nothing reads the value.
const UNREAD: Id = Id::MAX;

/// The root of a value that is read; the way there gets shorter.
fn root(roots: &mut [Id], mut id: Id) -> Id {
    while roots[id as usize] != id {
        roots[id as usize] = roots[roots[id as usize] as usize];
        id = roots[id as usize];
    }
    id
}

/// Values of locals that are read together.
#[derive(Default)]
struct Web {
    made: Vec<Place>,
    constants: Vec<u128>,
    /// Whether something is in it that is neither.
    exact: bool,
    /// Where its bits are looked at.
    seen: Vec<usize>,
    /// How often it is made, as far as loops tell, and how often its bits are
    /// looked at.
    made_turns: u64,
    seen_turns: u64,
}

impl Web {
    fn take(&mut self, value: &Value) {
        match value {
            // Only in its own web, in which nothing is made.
            Value::Exact => {}
            Value::Constant(bits) => self.constants.push(*bits),
            Value::Made(place, depth) => {
                self.made.push(*place);
                self.made_turns = self.made_turns.saturating_add(turns(*depth));
            }
            Value::Join(values) => self.exact |= values.contains(&EXACT),
        }
    }

    /// To be called when all values are taken.
    fn read(&mut self, read: &Read) {
        let kind = self.made.first().map(|place| place.kind);
        if kind.is_some_and(|kind| read.look != Look::Numbers(kind)) {
            self.seen.push(read.place);
            self.seen_turns = self.seen_turns.saturating_add(turns(read.depth));
        }
    }

    /// Where to make it canonical.
    fn places(self) -> Vec<Place> {
        let Some(kind) = self.made.first().map(|place| place.kind) else { return Vec::new() };
        if self.made.iter().any(|place| place.kind != kind) {
            return self.made;
        }
        if self.seen.is_empty() {
            return Vec::new();
        }
        // What is something else must not be changed where it is read.
        let only_made = !self.exact && !self.constants.iter().any(|bits| has_nan(kind, *bits));
        if only_made && self.seen_turns < self.made_turns {
            return self.seen.into_iter().map(|at| Place { at, kind }).collect();
        }
        self.made
    }
}

/// How often an instruction inside so many loops is taken to run.
fn turns(depth: u32) -> u64 {
    LOOP_TURNS.pow(depth.min(DEPTH_MAX))
}

/// Whether a constant holds a NaN of this kind.
fn has_nan(kind: Float, bits: u128) -> bool {
    let lane = |lane: u32| f32::from_bits((bits >> (32 * lane)) as u32).is_nan();
    let long_lane = |lane: u32| f64::from_bits((bits >> (64 * lane)) as u64).is_nan();
    match kind {
        Float::F32 => lane(0),
        Float::F32x4 => (0..4).any(lane),
        Float::F64 => long_lane(0),
        Float::F64x2 => (0..2).any(long_lane),
    }
}
