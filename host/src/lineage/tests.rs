//! Explanations of actions that are written here, hostile ones included.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::canonical::to_canonical;
use crate::digest::{ApplicationDigest, ModuleDigest, TensorDigest};
use crate::error::Code;
use crate::modules::Library;
use crate::sandbox::{EngineName, Module, engine};
use crate::tensor::{Dtype, TensorName, TensorType};

/// An action under construction.
#[derive(Default)]
struct Written {
    applications: serde_json::Map<String, Value>,
}

impl Written {
    /// Adds a use of a shipped module with one input `w`, and gives its digest.
    fn apply(&mut self, module: &str, params: Value, input: Value) -> String {
        let module = crate::modules::SHIPPED.iter().find(|s| s.name == module).unwrap();
        let mut input = input;
        input["role"] = "w".into();
        input["index"] = 0.into();
        let document = json!({
            "module": ModuleDigest::of(module.bytes), "params": params, "inputs": [input], "outputs": ["w"],
        });
        let digest = ApplicationDigest::of(&to_canonical(&document).unwrap()).to_string();
        self.applications.insert(digest.clone(), document);
        digest
    }

    fn action(&self, from: Value) -> Vec<u8> {
        let mut tensor = from;
        tensor["name"] = "x".into();
        let document =
            json!({ "schema": "weightmill action v1", "applications": self.applications, "tensors": [tensor] });
        to_canonical(&document).unwrap()
    }
}

fn source(shape: &[u64]) -> Value {
    json!({ "dtype": "F32", "shape": shape, "digest": TensorDigest::of(b"source") })
}

fn output(application: &str) -> Value {
    json!({ "application": application, "output": "w" })
}

fn explained(action: &[u8], tensor: &TensorType, lineages: &[Lineage]) -> Result<Explanation> {
    let library = Library::new(None);
    let module = |digest: &ModuleDigest| -> Result<Option<Arc<Module>>> { library.by_digest(digest) };
    explain(&Asked {
        action,
        tensor: &TensorName::new("x").unwrap(),
        tensor_type: tensor,
        lineages,
        module: &module,
        engine: engine(EngineName::Wasmi)?.as_ref(),
    })
}

fn float(shape: &[u64]) -> TensorType {
    TensorType::new(Dtype::F32, shape.to_vec()).unwrap()
}

/// Rows 2 and 3 of four, of columns 8 to 16 of sixteen.
fn slice_of_slice() -> Vec<u8> {
    let mut written = Written::default();
    let columns = written.apply("slice", json!({"dim": 1, "start": 8, "stop": 16}), source(&[4, 16]));
    let rows = written.apply("slice", json!({"dim": 0, "start": 2, "stop": 4}), output(&columns));
    written.action(output(&rows))
}

#[test]
fn only_what_the_next_step_takes_is_needed_of_the_one_before() {
    let mut found = explained(&slice_of_slice(), &float(&[2, 8]), &[]).unwrap();
    assert_eq!((found.steps.len(), found.named), (2, false));
    let [last, first] = &mut found.steps[..] else { panic!() };
    assert_eq!(last.inputs[0].ranges.as_mut().unwrap().spans(), [(64, 128)], "rows of 8 floats");
    assert_eq!(first.inputs[0].ranges.as_mut().unwrap().spans(), [(160, 192), (224, 256)], "of rows of 16");
    assert_eq!(found.sources[0].ranges.as_mut().unwrap().spans(), [(160, 192), (224, 256)]);
    assert_eq!(last.inputs[0].link, Link::Output { step: 1, role: "w".into() });
}

#[test]
fn a_lineage_that_does_not_fit_is_not_used() {
    let fitting = |action: &[u8]| -> Value {
        let found = explained(action, &float(&[2, 8]), &[]).unwrap();
        let record = |step: &StepUse, inputs: Value| json!({"digest": step.application, "step": 1, "captures": [], "inputs": inputs, "outputs": {}});
        json!({
            "schema": "weightmill lineage v1",
            "modules": {},
            "applications": [
                record(&found.steps[1], json!([{"source": "y"}])),
                record(&found.steps[0], json!([{"application": 0, "output": "w"}])),
            ],
            "tensors": {"x": {"application": 1, "output": "w"}},
        })
    };
    let action = slice_of_slice();
    let good = fitting(&action);
    let named = |lineage: &Value| {
        let lineage = Lineage::read(lineage).unwrap();
        explained(&action, &float(&[2, 8]), &[lineage]).unwrap()
    };
    let found = named(&good);
    assert_eq!((found.named, found.sources[0].name.as_ref().unwrap().as_str()), (true, "y"));
    for (pointer, value) in [
        ("/tensors/x/application", json!(0)),
        ("/tensors/x/application", json!(7)),
        ("/tensors/x/output", json!("v")),
        ("/tensors/x", json!({"source": "y"})),
        ("/applications/1/inputs", json!([])),
        ("/applications/1/inputs/0", json!({"application": 1, "output": "w"})),
        ("/applications/1/inputs/0", json!({"source": "y"})),
        ("/applications/0/digest", json!("0".repeat(64))),
    ] {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        let found = named(&bad);
        assert!(!found.named && found.sources[0].name.is_none(), "{pointer}");
    }
    let mut other = good.clone();
    other["schema"] = "weightmill lineage v2".into();
    assert!(Lineage::read(&other).is_none());
}

#[test]
fn actions_that_lie_are_refused() {
    let mut written = Written::default();
    let one = written.apply("slice", json!({"dim": 0, "start": 0, "stop": 1}), source(&[4]));
    let refused = |action: &[u8], tensor: &TensorType| explained(action, tensor, &[]).unwrap_err();

    // The application is another than its digest says: so could one be its own input.
    let mut lying = Written { applications: written.applications.clone() };
    lying.applications[&one]["inputs"][0] = json!({"role": "w", "index": 0, "application": one, "output": "w"});
    assert_eq!(refused(&lying.action(output(&one)), &float(&[1])).code(), Code::DigestMismatch);
    let nowhere = "0".repeat(64);
    assert_eq!(refused(&written.action(output(&nowhere)), &float(&[1])).code(), Code::DigestMismatch);
    assert_eq!(refused(b"{}", &float(&[1])).code(), Code::SourceUnavailable);
    let other = json!({"schema": "weightmill action v9", "applications": {}, "tensors": []});
    assert_eq!(refused(other.to_string().as_bytes(), &float(&[1])).code(), Code::SourceUnavailable);
    let huge = json!({"dtype": "F32", "shape": [1_u64 << 52, 1_u64 << 52], "digest": TensorDigest::of(b"")});
    assert_eq!(refused(&written.action(huge), &float(&[1])).code(), Code::DigestMismatch);

    // An entry whose tensor is not what the plan gives.
    assert_eq!(refused(&written.action(output(&one)), &float(&[2])).code(), Code::ModuleBadPlan);

    // More steps in a row than anybody writes.
    let mut from = one;
    for _ in 0..1100 {
        from = written.apply("slice", json!({"dim": 0, "start": 0, "stop": 1}), output(&from));
    }
    let error = refused(&written.action(output(&from)), &float(&[1]));
    assert!(error.message().contains("steps in a row"), "{error}");
}
