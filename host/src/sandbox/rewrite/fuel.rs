//! Fuel, counted by the code itself: one unit for an instruction, one for a
//! local that a function declares, one for each byte or element that a bulk
//! operation goes through, and more for what leaves compiled code, so that fuel
//! bounds time.
//!
//! wasmtime counts fuel too, but where it finds none left it calls the host,
//! at the head of every loop. That call is never made in a loop that behaves,
//! and yet every vector that lives across it goes through memory at every turn,
//! because a call may clobber all vector registers: kernels ran at half their
//! speed. Here the code traps instead, which clobbers nothing.
//!
//! A function keeps the count in a local of its own. It takes it from a global
//! when it begins and after every call, and gives it back before every call and
//! when it returns. Straight code is paid for at its end; whether anything is
//! left is asked where code can come back to: when a function begins, when it
//! goes on after a call, at the head of a loop, and before an instruction whose
//! work an operand says. What runs between two questions is bounded by a
//! function's size. The host asks last, when its call has returned.

use wasmparser::{BinaryReaderError, FunctionBody, Operator};

use super::{Edits, FUEL_EXPORT, I32, I64, i64_const, indexed, leb, op};

/// The global's entry: a mutable i64, at first 0.
pub(super) const GLOBAL: &[u8] = &[I64, 1, op::I64_CONST, 0, op::END];

/// What leaves compiled code costs this much instead of one, and a page of
/// memory that grows as much again.
const LEAVES_COMPILED_CODE: u64 = 100;

/// The export's entry.
pub(super) fn export(global: u32) -> Vec<u8> {
    const KIND_GLOBAL: u8 = 3;
    let mut entry = Vec::new();
    leb(&mut entry, FUEL_EXPORT.len() as u64);
    entry.extend_from_slice(FUEL_EXPORT.as_bytes());
    indexed(&mut entry, KIND_GLOBAL, global);
    entry
}

/// Adds counting to a function; `global` is the new global's number.
pub(super) fn count(body: &FunctionBody<'_>, global: u32, edits: &mut Edits) -> Result<(), BinaryReaderError> {
    let mut operators = body.get_operators_reader()?;
    // A function's locals have to be zeroed.
    let mut owed = 1;
    for group in body.get_locals_reader()? {
        owed += u64::from(group?.0);
    }
    let mut meter = Meter { global, fuel: edits.local(I64), operand: None, owed, edits };
    let mut code = Vec::new();
    meter.take(&mut code);
    meter.ask(&mut code);
    meter.edits.insert(operators.original_position(), code);
    // Blocks that are open.
    let mut depth = 0;
    while !operators.eof() {
        let at = operators.original_position();
        let operator = operators.read()?;
        meter.before(&operator, at, depth);
        match operator {
            Operator::Block { .. } | Operator::Loop { .. } | Operator::If { .. } => depth += 1,
            // The last one is the function's.
            Operator::End => depth = depth.saturating_sub(1),
            _ => {}
        }
        meter.after(&operator, operators.original_position());
    }
    Ok(())
}

struct Meter<'e> {
    global: u32,
    /// The local with what is left.
    fuel: u32,
    /// A local for an instruction's operand, once there is one.
    operand: Option<u32>,
    /// What ran and is not paid for.
    owed: u64,
    edits: &'e mut Edits,
}

impl Meter<'_> {
    /// Control may leave the straight line at this instruction.
    fn before(&mut self, operator: &Operator<'_>, at: usize, depth: u32) {
        use Operator::*;
        self.owed += cost(operator);
        let mut code = Vec::new();
        match operator {
            Br { relative_depth } | BrIf { relative_depth } => {
                self.pay(&mut code);
                self.give_back_if(*relative_depth == depth, &mut code);
            }
            BrTable { targets } => {
                self.pay(&mut code);
                let returns = targets.default() == depth || targets.targets().flatten().any(|target| target == depth);
                self.give_back_if(returns, &mut code);
            }
            Return | Call { .. } | CallIndirect { .. } => {
                self.pay(&mut code);
                self.give_back_if(true, &mut code);
            }
            End => {
                self.pay(&mut code);
                self.give_back_if(depth == 0, &mut code);
            }
            Loop { .. } | If { .. } | Else => self.pay(&mut code),
            MemoryGrow { .. } => self.pay_operand(LEAVES_COMPILED_CODE, &mut code),
            MemoryCopy { .. }
            | MemoryFill { .. }
            | MemoryInit { .. }
            | TableGrow { .. }
            | TableFill { .. }
            | TableCopy { .. }
            | TableInit { .. } => self.pay_operand(1, &mut code),
            _ => {}
        }
        if !code.is_empty() {
            self.edits.insert(at, code);
        }
    }

    fn after(&mut self, operator: &Operator<'_>, next: usize) {
        let mut code = Vec::new();
        match operator {
            Operator::Loop { .. } => self.ask(&mut code),
            Operator::Call { .. } | Operator::CallIndirect { .. } => {
                self.take(&mut code);
                self.ask(&mut code);
            }
            _ => return,
        }
        self.edits.insert(next, code);
    }

    fn take(&self, code: &mut Vec<u8>) {
        indexed(code, op::GLOBAL_GET, self.global);
        indexed(code, op::LOCAL_SET, self.fuel);
    }

    fn give_back_if(&self, it_is_needed: bool, code: &mut Vec<u8>) {
        if it_is_needed {
            indexed(code, op::LOCAL_GET, self.fuel);
            indexed(code, op::GLOBAL_SET, self.global);
        }
    }

    fn pay(&mut self, code: &mut Vec<u8>) {
        if self.owed > 0 {
            indexed(code, op::LOCAL_GET, self.fuel);
            i64_const(code, self.owed);
            code.push(op::I64_SUB);
            indexed(code, op::LOCAL_SET, self.fuel);
            self.owed = 0;
        }
    }

    /// Pays what is owed, and `each` for every unit of the i32 on the stack.
    fn pay_operand(&mut self, each: u64, code: &mut Vec<u8>) {
        self.pay(code);
        let operand = *self.operand.get_or_insert_with(|| self.edits.local(I32));
        indexed(code, op::LOCAL_TEE, operand);
        indexed(code, op::LOCAL_GET, self.fuel);
        indexed(code, op::LOCAL_GET, operand);
        code.push(op::I64_EXTEND_I32_U);
        i64_const(code, each);
        code.extend_from_slice(&[op::I64_MUL, op::I64_SUB]);
        indexed(code, op::LOCAL_SET, self.fuel);
        self.ask(code);
    }

    /// Traps if nothing is left, and says so in the global.
    fn ask(&self, code: &mut Vec<u8>) {
        indexed(code, op::LOCAL_GET, self.fuel);
        i64_const(code, 0);
        code.extend_from_slice(&[op::I64_LT_S, op::IF, op::NO_VALUE]);
        self.give_back_if(true, code);
        code.extend_from_slice(&[op::UNREACHABLE, op::END]);
    }
}

fn cost(operator: &Operator<'_>) -> u64 {
    use Operator::*;
    match operator {
        Nop | Drop | Block { .. } | Loop { .. } | Else | End | Return | Unreachable => 0,
        MemoryGrow { .. }
        | MemoryCopy { .. }
        | MemoryFill { .. }
        | MemoryInit { .. }
        | DataDrop { .. }
        | TableGrow { .. }
        | TableCopy { .. }
        | TableFill { .. }
        | TableInit { .. }
        | ElemDrop { .. } => LEAVES_COMPILED_CODE,
        _ => 1,
    }
}
