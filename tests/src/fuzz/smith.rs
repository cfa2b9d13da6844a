//! Modules of ABI 1 with made-up code: wasm-smith fills the functions that the
//! ABI asks for, and some more.

use std::borrow::Cow;
use std::sync::OnceLock;

use arbitrary::Unstructured;
use wasm_encoder::{CodeSection, CustomSection, DataCountSection, DataSection, Function, Instruction, RawSection};
use wasmparser::{Parser, Payload};

/// What every made-up module exports, with exactly these types.
const SHAPE: &str = r#"(module
    (memory (export "memory") 4 24)
    (func (export "wm_abi_v1") unreachable)
    (func (export "wm_alloc") (param i32) (result i32) unreachable)
    (func (export "wm_plan") (param i32 i32) (result i64) unreachable)
    (func (export "wm_run") (param i32) (result i64) unreachable)
    (global (export "wm_panic") i32 (i32.const 0)))"#;

/// Where [`with_plan`] puts the answer, and where its `wm_alloc` points.
const ANSWER_AT: u32 = 0x1000;
const ALLOCATED_AT: u32 = 0x1_0000;

const METADATA: &[u8] = br#"{"abi":1,"name":"made-up","version":"1.0.0","fuel_per_byte":16}"#;

/// A module from whatever `input` holds; `None` where wasm-smith finds too
/// little in it.
pub(super) fn module(input: &mut Unstructured<'_>) -> Option<Vec<u8>> {
    let flags: u8 = input.arbitrary().ok()?;
    let mut config = wasm_smith::Config {
        exports: Some(shape().to_vec()),
        allow_start_export: false,
        max_imports: 0,
        max_memories: 1,
        max_tables: 2,
        max_table_elements: 1000,
        max_funcs: 6,
        max_instructions: 80,
        max_data_segments: 4,
        max_element_segments: 4,
        max_globals: 6,
        // What the ABI leaves out.
        compact_imports_enabled: false,
        exceptions_enabled: false,
        extended_const_enabled: false,
        gc_enabled: false,
        memory64_enabled: false,
        relaxed_simd_enabled: false,
        tail_call_enabled: false,
        threads_enabled: false,
        wide_arithmetic_enabled: false,
        ..wasm_smith::Config::default()
    };
    config.disallow_traps = flags & 1 != 0;
    config.simd_enabled = flags & 2 != 0;
    config.allow_floats = flags & 4 != 0;
    // Also makes tables of host objects, which are refused: seldom.
    config.reference_types_enabled = flags & 0x38 == 0x38;
    let mut bytes = wasm_smith::Module::new(config, input).ok()?.to_bytes();
    let metadata = CustomSection { name: Cow::Borrowed("weightmill"), data: Cow::Borrowed(METADATA) };
    wasm_encoder::Section::append_to(&metadata, &mut bytes);
    Some(bytes)
}

fn shape() -> &'static [u8] {
    static SHAPE_BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    SHAPE_BYTES.get_or_init(|| wat::parse_str(SHAPE).expect("the shape is well-formed"))
}

/// The same module with an allocator that works and a plan that is `answer`,
/// so that its `wm_run` gets to run.
pub(super) fn with_plan(module: &[u8], answer: &[u8]) -> Vec<u8> {
    let mut out = wasm_encoder::Module::new();
    let exported = |name: &str| exported_function(module, name);
    let (alloc, plan) = (exported("wm_alloc"), exported("wm_plan"));
    let packed = i64::from(ANSWER_AT) << 32 | answer.len() as i64;
    let mut code = CodeSection::new();
    let mut has_data = false;
    let mut bodies = 0;
    for payload in Parser::new(0).parse_all(module) {
        let payload = payload.expect("wasm-smith writes modules");
        match &payload {
            Payload::CodeSectionStart { .. } => {}
            Payload::CodeSectionEntry(body) => {
                let constant = match bodies {
                    body if body == alloc => Some(Instruction::I32Const(ALLOCATED_AT as i32)),
                    body if body == plan => Some(Instruction::I64Const(packed)),
                    _ => None,
                };
                match constant {
                    Some(constant) => {
                        let mut function = Function::new([]);
                        function.instruction(&constant).instruction(&Instruction::End);
                        code.function(&function);
                    }
                    None => drop(code.raw(body.as_bytes())),
                }
                bodies += 1;
            }
            Payload::DataCountSection { count, .. } => drop(out.section(&DataCountSection { count: count + 1 })),
            Payload::DataSection(section) => {
                out.section(&code);
                out.section(&data(section, module, answer));
                has_data = true;
            }
            Payload::CustomSection(_) if !has_data => {
                out.section(&code);
                out.section(&own_data(answer));
                has_data = true;
                raw(&mut out, &payload, module);
            }
            _ => raw(&mut out, &payload, module),
        }
    }
    out.finish()
}

/// Copies a section as it is.
fn raw(out: &mut wasm_encoder::Module, payload: &Payload<'_>, module: &[u8]) {
    if let Some((id, range)) = payload.as_section() {
        out.section(&RawSection { id, data: &module[range] });
    }
}

/// The module's segments, and the answer.
fn data(section: &wasmparser::DataSectionReader<'_>, module: &[u8], answer: &[u8]) -> DataSection {
    let mut data = DataSection::new();
    for segment in section.clone() {
        data.raw(&module[segment.expect("wasm-smith writes segments").range]);
    }
    push_answer(&mut data, answer);
    data
}

fn own_data(answer: &[u8]) -> DataSection {
    let mut data = DataSection::new();
    push_answer(&mut data, answer);
    data
}

fn push_answer(data: &mut DataSection, answer: &[u8]) {
    let at = wasm_encoder::ConstExpr::i32_const(ANSWER_AT as i32);
    data.active(0, &at, answer.iter().copied());
}

/// The index of an exported function; there are no imports before it.
fn exported_function(module: &[u8], name: &str) -> u32 {
    let exports = Parser::new(0).parse_all(module).find_map(|payload| match payload {
        Ok(Payload::ExportSection(section)) => Some(section),
        _ => None,
    });
    let mut exports = exports.expect("a made-up module has exports").into_iter().filter_map(Result::ok);
    exports.find(|export| export.name == name).expect("it has the ABI's exports").index
}
