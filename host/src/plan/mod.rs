//! Plans: what a module answers from metadata only, checked before use, and
//! the action that determines an entry.
//!
//! [`ask`] puts a module's [`PlanRequest`] into the sandbox and turns the
//! answer into a [`CheckedPlan`] or a typed error. [`action`] builds the
//! canonical document whose SHA-256 is the key.

pub mod action;
mod check;
mod view;

pub use check::{Body, CheckedPlan, Flaw, Group, Target};
pub use view::{Grid, Strided, View, Visit};

use weightmill_guest::abi::{
    ABI_VERSION, PlanAnswer, PlanErrorBody, PlanErrorKind, PlanInput, PlanRequest, Tp, limits,
};

use crate::canonical::to_canonical;
use crate::error::{Code, Error, Result};
use crate::sandbox::Program;
use crate::tensor::TensorType;

/// An input of a plan: role, index in its role, and what it is.
pub type Input<'a> = (&'a str, u64, &'a TensorType);

/// What a module refused, and why, as its plan's error document says.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The parameter that is wrong, if it is one.
    pub param: Option<String>,
    /// The input that does not fit, if it is one.
    pub role: Option<String>,
    /// The error, without a location.
    pub error: Error,
}

/// Builds the request for an application. `outputs` are the roles that the
/// recipe asks for, sorted.
///
/// # Errors
/// `module_rejected_input` if there are more inputs than the ABI allows.
pub fn request(
    params: &serde_json::Value,
    inputs: &[Input<'_>],
    outputs: Vec<String>,
    tp: Tp,
    tile_bytes: u64,
) -> Result<PlanRequest> {
    if inputs.len() > limits::INPUTS {
        return Err(Error::new(
            Code::ModuleRejectedInput,
            format!("an application has {} inputs, more than {}", inputs.len(), limits::INPUTS),
        ));
    }
    let inputs = inputs
        .iter()
        .map(|(role, index, tensor)| PlanInput {
            dtype: tensor.dtype(),
            index: *index,
            role: (*role).to_string(),
            shape: tensor.shape().to_vec(),
        })
        .collect();
    Ok(PlanRequest { abi: ABI_VERSION, inputs, outputs, params: params.clone(), tile_bytes, tp })
}

/// Asks a module for a plan and checks the answer.
///
/// # Errors
/// `Ok(Err(refusal))` if the module refuses its parameters or inputs; `Err`
/// with a module code if it misbehaves.
pub fn ask(program: &dyn Program, request: &PlanRequest, input_lens: &[u64]) -> Result<Result<CheckedPlan, Refusal>> {
    let reply = program.plan(&to_canonical(request)?)?;
    let answer = decode(&reply.answer)?;
    let (outputs, scratch) = match answer {
        PlanAnswer::Error { error } => return Ok(Err(refusal(error))),
        PlanAnswer::Plan { outputs, scratch } => (outputs, scratch),
    };
    let plan = CheckedPlan::check(request, input_lens, &outputs, &scratch)
        .map_err(|flaw| Error::new(Code::ModuleBadPlan, format!("the module's plan is wrong: {flaw}")))?;
    Ok(Ok(plan))
}

/// Decodes an answer.
///
/// # Errors
/// `module_bad_answer`.
pub fn decode(answer: &[u8]) -> Result<PlanAnswer> {
    if answer.len() > limits::ANSWER_BYTES {
        return Err(Error::new(
            Code::ModuleBadAnswer,
            format!("the module's answer has {} bytes, more than {}", answer.len(), limits::ANSWER_BYTES),
        ));
    }
    serde_json::from_slice(answer)
        .map_err(|e| Error::new(Code::ModuleBadAnswer, format!("the module's answer is no plan: {e}")))
}

fn refusal(body: PlanErrorBody) -> Refusal {
    let code = match body.kind {
        PlanErrorKind::Params => Code::BadParams,
        PlanErrorKind::Input | PlanErrorKind::Tp => Code::ModuleRejectedInput,
    };
    let mut error = Error::new(code, printable(&body.message));
    if let Some(hint) = &body.hint {
        error = error.hint(printable(hint));
    }
    Refusal { param: body.param, role: body.role, error }
}

/// A module's text, safe to print on a terminal.
pub fn printable(text: &str) -> String {
    text.chars().take(2000).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
