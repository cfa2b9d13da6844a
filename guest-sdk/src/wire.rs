//! The ABI's documents as a module reads and writes them.
//!
//! The types and their meaning are in [`abi`](crate::abi), where the host
//! reads and writes them with its own library; the tests here send every
//! document through both.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::abi::{
    Part, PlanAnswer, PlanErrorBody, PlanErrorKind, PlanInput, PlanOutput, PlanRequest, RunError, Scratch, TileGroup,
    Tp,
};
use crate::json::{Value, Writer};

/// A plan request as a module has it.
pub type Request = PlanRequest<Value>;

/// Reads a plan request.
///
/// # Errors
/// A text that says what is wrong with it.
///
/// ```
/// let error = weightmill_guest::wire::read_request(b"{}").unwrap_err();
/// assert_eq!(error, "the plan request has no valid \"abi\"");
/// ```
pub fn read_request(document: &[u8]) -> Result<Request, String> {
    let mut document = Value::parse(document).map_err(|e| format!("the plan request is no JSON: {e}"))?;
    let params = match &mut document {
        Value::Object(members) => members.iter_mut().find(|(name, _)| name == "params").map(|(_, value)| value),
        _ => None,
    };
    let params = params.map(|value| core::mem::replace(value, Value::Null));
    let abi = whole(&document, "abi")? as u32;
    let tp = document.get("tp").unwrap_or(&Value::Null);
    let size = Some(whole(tp, "size")?).filter(|&size| size > 0);
    Ok(PlanRequest {
        abi,
        inputs: list(&document, "inputs")?.iter().map(read_input).collect::<Result<_, _>>()?,
        outputs: list(&document, "outputs")?
            .iter()
            .map(|role| role.as_str().map(String::from).ok_or_else(|| lacks("outputs")))
            .collect::<Result<_, _>>()?,
        params: params.ok_or_else(|| lacks("params"))?,
        tile_bytes: whole(&document, "tile_bytes")?,
        tp: Tp { rank: whole(tp, "rank")?, size: size.ok_or_else(|| lacks("size"))? },
    })
}

fn read_input(input: &Value) -> Result<PlanInput, String> {
    let extents = list(input, "shape")?.iter().map(|extent| extent.as_u64().ok_or_else(|| lacks("shape")));
    Ok(PlanInput {
        dtype: text(input, "dtype")?.parse().map_err(|_| lacks("dtype"))?,
        index: whole(input, "index")?,
        role: text(input, "role")?.into(),
        shape: extents.collect::<Result<_, _>>()?,
    })
}

fn whole(of: &Value, name: &str) -> Result<u64, String> {
    of.get(name).and_then(Value::as_u64).ok_or_else(|| lacks(name))
}

fn text<'v>(of: &'v Value, name: &str) -> Result<&'v str, String> {
    of.get(name).and_then(Value::as_str).ok_or_else(|| lacks(name))
}

fn list<'v>(of: &'v Value, name: &str) -> Result<&'v [Value], String> {
    of.get(name).and_then(Value::as_array).ok_or_else(|| lacks(name))
}

fn lacks(name: &str) -> String {
    format!("the plan request has no valid \"{name}\"")
}

/// Writes a plan's answer.
///
/// ```
/// use weightmill_guest::abi::PlanAnswer;
///
/// let bytes = weightmill_guest::wire::write_answer(&PlanAnswer::Plan { outputs: vec![], scratch: vec![] });
/// assert_eq!(bytes, b"{\"outputs\":[]}");
/// ```
pub fn write_answer(answer: &PlanAnswer) -> Vec<u8> {
    let mut to = Writer::default();
    match answer {
        PlanAnswer::Error { error } => write_plan_error(&mut to, error),
        PlanAnswer::Plan { outputs, scratch } => {
            to.raw("{\"outputs\":").list(outputs, write_output);
            if !scratch.is_empty() {
                to.raw(",\"scratch\":").list(scratch, write_scratch);
            }
            to.raw("}");
        }
    }
    to.finish()
}

fn write_plan_error(to: &mut Writer, error: &PlanErrorBody) {
    to.raw("{\"error\":{\"kind\":").text(match error.kind {
        PlanErrorKind::Params => "params",
        PlanErrorKind::Input => "input",
        PlanErrorKind::Tp => "tp",
    });
    for (name, text) in [("param", &error.param), ("role", &error.role), ("hint", &error.hint)] {
        write_member(to, name, text.as_deref());
    }
    write_member(to, "message", Some(&error.message));
    to.raw("}}");
}

fn write_member(to: &mut Writer, name: &str, text: Option<&str>) {
    if let Some(text) = text {
        to.raw(",").text(name).raw(":").text(text);
    }
}

fn write_type(to: &mut Writer, dtype: &str, shape: &[u64]) {
    to.raw("\"dtype\":").text(dtype).raw(",\"shape\":").list(shape, |to, &extent| {
        to.whole(extent);
    });
}

fn write_output(to: &mut Writer, output: &PlanOutput) {
    to.raw("{\"role\":").text(&output.role).raw(",");
    write_type(to, output.dtype.as_str(), &output.shape);
    if let Some(view) = &output.view {
        to.raw(",\"view\":").list(view, write_part);
    }
    if let Some(tiles) = &output.tiles {
        to.raw(",\"tiles\":").list(tiles, write_group);
    }
    to.raw("}");
}

fn write_scratch(to: &mut Writer, scratch: &Scratch) {
    to.raw("{");
    write_type(to, scratch.dtype.as_str(), &scratch.shape);
    to.raw(",\"tiles\":").list(&scratch.tiles, write_group).raw("}");
}

fn write_group(to: &mut Writer, group: &TileGroup) {
    to.raw("{");
    if group.count != 1 {
        to.raw("\"count\":").whole(group.count).raw(",");
    }
    to.raw("\"len\":").whole(group.len).raw(",\"inputs\":").list(&group.inputs, |to, parts| {
        to.list(parts, write_part);
    });
    if !group.args.is_empty() {
        to.raw(",\"args\":").list(&group.args, |to, &arg| {
            to.signed(arg);
        });
    }
    to.raw("}");
}

fn write_part(to: &mut Writer, part: &Part) {
    match part {
        Part::Copy { copy, offset, len, strides } => {
            to.raw("{\"copy\":").whole(*copy);
            if *offset > 0 {
                to.raw(",\"offset\":").whole(*offset);
            }
            to.raw(",\"len\":").whole(*len);
            if !strides.is_empty() {
                to.raw(",\"strides\":").list(strides, |to, &stride| {
                    to.whole(stride);
                });
            }
        }
        Part::Fill { fill, len } => {
            to.raw("{\"fill\":").whole(u64::from(*fill)).raw(",\"len\":").whole(*len);
        }
        Part::Repeat { repeat, parts } => {
            to.raw("{\"repeat\":").whole(*repeat).raw(",\"parts\":").list(parts, write_part);
        }
    }
    to.raw("}");
}

/// Writes a run's error.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// let bytes = weightmill_guest::wire::write_run_error(DataError::at("w", 9, "NaN").body());
/// assert_eq!(bytes, br#"{"kind":"data","role":"w","message":"NaN","index":9}"#);
/// ```
pub fn write_run_error(error: &RunError) -> Vec<u8> {
    let mut to = Writer::default();
    to.raw("{\"kind\":").text(&error.kind);
    write_member(&mut to, "role", error.role.as_deref());
    write_member(&mut to, "hint", error.hint.as_deref());
    write_member(&mut to, "message", Some(&error.message));
    if let Some(index) = error.index {
        to.raw(",\"index\":").whole(index);
    }
    to.raw("}");
    to.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Dtype;

    fn every_part() -> Vec<Part> {
        let copy = Part::Copy { copy: 3, offset: 7, len: 8, strides: vec![1, 0, 9] };
        let plain = Part::Copy { copy: 0, offset: 0, len: 1, strides: vec![] };
        vec![Part::Repeat { repeat: 2, parts: vec![copy, Part::Fill { fill: 255, len: 4 }] }, plain]
    }

    #[test]
    fn the_host_reads_what_a_module_answers() {
        let tiles = vec![
            TileGroup { count: 1, len: 4, inputs: vec![every_part(), vec![]], args: vec![-3, i64::from(u32::MAX)] },
            TileGroup { count: 9, len: 1, inputs: vec![], args: vec![] },
        ];
        let outputs = vec![
            PlanOutput {
                role: "a\"é".into(),
                dtype: Dtype::F8_E4M3,
                shape: vec![],
                view: Some(every_part()),
                tiles: None,
            },
            PlanOutput {
                role: "b".into(),
                dtype: Dtype::F4,
                shape: vec![2, 3],
                view: None,
                tiles: Some(tiles.clone()),
            },
        ];
        let body = |kind| PlanErrorBody {
            kind,
            param: Some("p".into()),
            role: None,
            message: "line\nbreak".into(),
            hint: Some("h".into()),
        };
        for answer in [
            PlanAnswer::Plan {
                outputs: outputs.clone(),
                scratch: vec![Scratch { dtype: Dtype::U8, shape: vec![4], tiles }],
            },
            PlanAnswer::Plan { outputs, scratch: vec![] },
            PlanAnswer::Error { error: body(PlanErrorKind::Params) },
            PlanAnswer::Error { error: body(PlanErrorKind::Input) },
            PlanAnswer::Error { error: PlanErrorBody { param: None, hint: None, ..body(PlanErrorKind::Tp) } },
        ] {
            let document = write_answer(&answer);
            assert_eq!(serde_json::from_slice::<PlanAnswer>(&document).unwrap(), answer);
        }
        let error = RunError { kind: "data".into(), role: None, index: Some(3), message: "m".into(), hint: None };
        assert_eq!(serde_json::from_slice::<RunError>(&write_run_error(&error)).unwrap(), error);
    }

    #[test]
    fn a_module_reads_what_the_host_asks() {
        let params = serde_json::json!({ "a": [1, "x", 2.5], "b": null });
        let request = PlanRequest {
            abi: 1,
            inputs: vec![PlanInput { dtype: Dtype::BF16, index: 2, role: "w".into(), shape: vec![3, 0] }],
            outputs: vec!["w".into()],
            params,
            tile_bytes: 64,
            tp: Tp { rank: 1, size: 2 },
        };
        let text = serde_json::to_vec(&request).unwrap();
        let read = read_request(&text).unwrap();
        assert_eq!((read.inputs, read.outputs, read.tp), (request.inputs, request.outputs, request.tp));
        assert_eq!((read.abi, read.tile_bytes), (1, 64));
        assert_eq!(read.params, Value::parse(br#"{"a":[1,"x",2.5],"b":null}"#).unwrap());
        for name in ["abi", "inputs", "outputs", "params", "tile_bytes", "tp"] {
            let mut less: serde_json::Value = serde_json::from_slice(&text).unwrap();
            less.as_object_mut().unwrap().remove(name);
            assert!(read_request(&serde_json::to_vec(&less).unwrap()).is_err(), "{name}");
        }
    }
}
