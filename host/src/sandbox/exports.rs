//! What a module exports, held against what the ABI asks for.

use wasmparser::types::{EntityType, TypesRef};
use wasmparser::{ExternalKind, FuncType, GlobalType, ValType};

use super::Export;
use super::metadata::shown;
use super::rules::bad_abi;
use crate::error::Result;

/// The prefix that only the ABI's own names have.
const RESERVED_PREFIX: &str = "wm_";
const MARKER_PREFIX: &str = "wm_abi_v";

/// The functions of the ABI: name, parameters, results.
const FUNCTIONS: &[(&str, &[ValType], &[ValType])] = &[
    ("wm_abi_v1", &[], &[]),
    ("wm_alloc", &[ValType::I32], &[ValType::I32]),
    ("wm_plan", &[ValType::I32, ValType::I32], &[ValType::I64]),
    ("wm_run", &[ValType::I32], &[ValType::I64]),
];

/// The exports of one module, while it is being checked.
#[derive(Default)]
pub(super) struct Exports {
    list: Vec<Entry>,
}

struct Entry {
    name: String,
    kind: ExternalKind,
    index: u32,
    /// Known once all sections are read.
    ty: Option<Type>,
}

#[derive(Clone)]
enum Type {
    Function(FuncType),
    Global(GlobalType, Option<u32>),
    Other,
}

impl Exports {
    pub(super) fn push(&mut self, export: wasmparser::Export<'_>) {
        self.list.push(Entry { name: export.name.to_string(), kind: export.kind, index: export.index, ty: None });
    }

    /// Looks up the types, now that the module is known to be valid.
    /// `globals` holds the value of each global that is a constant i32.
    pub(super) fn resolve(&mut self, types: TypesRef<'_>, globals: &[Option<u32>]) {
        for entry in &mut self.list {
            let export = wasmparser::Export { name: &entry.name, kind: entry.kind, index: entry.index };
            let ty = match types.entity_type_from_export(&export) {
                Some(EntityType::Func(id)) => Type::Function(types[id].unwrap_func().clone()),
                Some(EntityType::Global(ty)) => Type::Global(ty, globals.get(entry.index as usize).copied().flatten()),
                _ => Type::Other,
            };
            entry.ty = Some(ty);
        }
    }

    /// Checks that everything is there with its exact type, and that no other
    /// name has the reserved prefix. Returns the panic buffer's address.
    pub(super) fn check(&self) -> Result<u32> {
        self.marker()?;
        let memory = self.find("memory").ok_or_else(|| bad_abi("it does not export 'memory'"))?;
        if memory.kind != ExternalKind::Memory {
            return Err(bad_abi(format!("its export 'memory' is a {}, not the memory", kind_name(memory.kind))));
        }
        for (name, parameters, results) in FUNCTIONS {
            self.function(name, parameters, results)?;
        }
        let panic_buffer = self.panic_buffer()?;
        for entry in &self.list {
            if entry.name.starts_with(RESERVED_PREFIX) && !is_known(&entry.name) {
                return Err(bad_abi(format!(
                    "it exports '{}', but names that begin with '{RESERVED_PREFIX}' are reserved",
                    shown(&entry.name)
                )));
            }
        }
        Ok(panic_buffer)
    }

    pub(super) fn into_list(self) -> Vec<Export> {
        let what = |entry: &Entry| match &entry.ty {
            Some(Type::Function(ty)) => signature(ty.params(), ty.results()),
            Some(Type::Global(ty, _)) if ty.mutable => format!("mutable global {}", ty.content_type),
            Some(Type::Global(ty, _)) => format!("global {}", ty.content_type),
            _ => kind_name(entry.kind).to_string(),
        };
        self.list.iter().map(|entry| Export { what: what(entry), name: entry.name.clone() }).collect()
    }

    fn find(&self, name: &str) -> Option<&Entry> {
        self.list.iter().find(|entry| entry.name == name)
    }

    /// A module for another version of the ABI gets a message of its own.
    fn marker(&self) -> Result<()> {
        if self.find("wm_abi_v1").is_some() {
            return Ok(());
        }
        let other = self.list.iter().find(|entry| is_marker(&entry.name));
        Err(match other {
            Some(other) => bad_abi(format!("it exports '{}' but not 'wm_abi_v1'", shown(&other.name)))
                .hint("it was made for another version of the ABI; this host speaks version 1"),
            None => bad_abi("it does not export 'wm_abi_v1'")
                .hint("a module is made with the SDK, or as the ABI's specification says"),
        })
    }

    fn function(&self, name: &str, parameters: &[ValType], results: &[ValType]) -> Result<()> {
        let expected = || signature(parameters, results);
        let entry = self.find(name).ok_or_else(|| bad_abi(format!("it does not export '{name}', {}", expected())))?;
        match &entry.ty {
            Some(Type::Function(ty)) if ty.params() == parameters && ty.results() == results => Ok(()),
            Some(Type::Function(ty)) => Err(bad_abi(format!(
                "its export '{name}' is {}, expected {}",
                signature(ty.params(), ty.results()),
                expected()
            ))),
            _ => Err(bad_abi(format!("its export '{name}' is a {}, expected {}", kind_name(entry.kind), expected()))),
        }
    }

    fn panic_buffer(&self) -> Result<u32> {
        let entry = self.find("wm_panic").ok_or_else(|| bad_abi("it does not export 'wm_panic', global i32"))?;
        match &entry.ty {
            Some(Type::Global(ty, Some(address))) if ty.content_type == ValType::I32 && !ty.mutable => Ok(*address),
            Some(Type::Global(ty, _)) => Err(bad_abi(format!(
                "its export 'wm_panic' is a {}global {}, expected an immutable global i32",
                if ty.mutable { "mutable " } else { "" },
                ty.content_type
            ))),
            _ => Err(bad_abi(format!(
                "its export 'wm_panic' is a {}, expected an immutable global i32",
                kind_name(entry.kind)
            ))),
        }
    }
}

fn is_known(name: &str) -> bool {
    name == "wm_panic" || is_marker(name) || FUNCTIONS.iter().any(|(known, ..)| *known == name)
}

/// `wm_abi_v` and a number.
fn is_marker(name: &str) -> bool {
    name.strip_prefix(MARKER_PREFIX).is_some_and(|version| {
        !version.is_empty() && !version.starts_with('0') && version.bytes().all(|b| b.is_ascii_digit())
    })
}

/// In the notation of the ABI's specification.
fn signature(parameters: &[ValType], results: &[ValType]) -> String {
    let list = |types: &[ValType]| types.iter().map(ValType::to_string).collect::<Vec<_>>().join(", ");
    match results {
        [one] => format!("function ({}) -> {one}", list(parameters)),
        _ => format!("function ({}) -> ({})", list(parameters), list(results)),
    }
}

pub(super) fn kind_name(kind: ExternalKind) -> &'static str {
    match kind {
        ExternalKind::Func | ExternalKind::FuncExact => "function",
        ExternalKind::Table => "table",
        ExternalKind::Memory => "memory",
        ExternalKind::Global => "global",
        ExternalKind::Tag => "tag",
    }
}
