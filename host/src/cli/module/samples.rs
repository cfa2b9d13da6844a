//! An application of every shipped module, to check it on. The inputs' bytes
//! are made up: what matters is that every way to compute gives the same.

use std::collections::BTreeMap;

use serde::Deserialize;
use weightmill_guest::abi::{Dtype, Tp};

use super::tiles::Application;
use crate::error::{Code, Error, Result};
use crate::modules::SHIPPED;
use crate::sandbox::Module;
use crate::tensor::TensorType;

const SAMPLES: &str = include_str!("samples.json");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sample {
    params: serde_json::Value,
    #[serde(default = "no_tp")]
    tp: Tp,
    inputs: Vec<(String, u64, Dtype, Vec<u64>)>,
    outputs: Vec<String>,
}

fn no_tp() -> Tp {
    Tp::ONE
}

/// The samples of `module`; none if it is not shipped.
///
/// # Errors
/// `io_error` if the program's own table is broken, which a test rules out.
pub(super) fn of(module: &Module) -> Result<Vec<Application>> {
    let broken = |e: &dyn std::fmt::Display| Error::new(Code::IoError, format!("the table of samples is broken: {e}"));
    if !SHIPPED.iter().any(|shipped| shipped.bytes == module.bytes()) {
        return Ok(Vec::new());
    }
    let mut samples: BTreeMap<String, Vec<Sample>> = serde_json::from_str(SAMPLES).map_err(|e| broken(&e))?;
    let samples = samples.remove(&module.metadata().name).unwrap_or_default();
    samples
        .into_iter()
        .enumerate()
        .map(|(number, sample)| {
            let inputs = sample.inputs.into_iter().map(|(role, index, dtype, shape)| {
                let tensor = TensorType::new(dtype, shape).ok_or_else(|| broken(&format!("a shape of {role}")))?;
                let bytes = made_up(&tensor, index);
                Ok((role, index, tensor, bytes))
            });
            Ok(Application {
                name: format!("sample {number}"),
                params: sample.params,
                tp: sample.tp,
                inputs: inputs.collect::<Result<_>>()?,
                outputs: sample.outputs,
            })
        })
        .collect()
}

/// Seeded bytes; floats are finite and of moderate size.
fn made_up(tensor: &TensorType, seed: u64) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64 ^ (seed << 32 | tensor.len_bytes());
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = std::iter::repeat_with(&mut next).flatten().take(tensor.len_bytes() as usize).collect();
    // The byte with the upper bits of the exponent, and what it becomes.
    let (size, exponent) = match tensor.dtype() {
        Dtype::F32 => (4, 0x3E),
        Dtype::BF16 => (2, 0x3E),
        Dtype::F16 => (2, 0x34),
        // Codes and exponents without the NaNs at their end.
        _ => {
            bytes.iter_mut().for_each(|b| *b &= 0x77);
            return bytes;
        }
    };
    bytes.iter_mut().skip(size - 1).step_by(size).for_each(|b| *b = *b & 0x81 | exponent);
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::tiles::{Order, fresh, make};
    use super::*;
    use crate::sandbox::{EngineName, TileRequest, engine};

    #[test]
    fn every_shipped_module_has_samples_that_it_takes() {
        let engine = engine(EngineName::Wasmi).unwrap();
        let names: BTreeMap<String, Vec<Sample>> = serde_json::from_str(SAMPLES).unwrap();
        assert!(names.keys().map(String::as_str).eq(SHIPPED.iter().map(|s| s.name)));
        for shipped in SHIPPED {
            let module = Module::parse(shipped.bytes).unwrap();
            let program = engine.compile(&module).unwrap();
            let samples = of(&module).unwrap();
            assert!(!samples.is_empty(), "{}", shipped.name);
            for sample in samples {
                let run =
                    &mut |request: &TileRequest<'_>, windows: &[Vec<u8>]| fresh(program.as_ref(), request, windows);
                let made = make((&module, program.as_ref()), &sample, 1 << 20, Order::Ascending, run);
                let made = made.unwrap_or_else(|e| panic!("{} {}: {e}", shipped.name, sample.name));
                assert!(made.outputs.values().all(|(_, bytes)| bytes.iter().any(|&b| b != 0)), "{}", shipped.name);
            }
        }
    }
}
