//! Checkpoints to measure and try things on.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Code, Error, Result};
use crate::store::ShardLayout;
use crate::tensor::{Dtype, TensorName, TensorType};

/// The name of tensors that are scales: positive, as they are in checkpoints.
pub(super) const SCALE: &str = "s";

/// Writes a safetensors file with `tensors` of seeded, finite values.
///
/// # Errors
/// `io_error`, `bad_tensor_name`, `bad_params` if a shape overflows.
pub fn write_tensors(path: &Path, tensors: &[(String, Dtype, Vec<u64>)]) -> Result<()> {
    let mut sorted = Vec::new();
    for (name, dtype, shape) in tensors {
        let tensor = TensorType::new(*dtype, shape.clone())
            .ok_or_else(|| Error::new(Code::BadParams, format!("{dtype} {shape:?} is too large")))?;
        sorted.push((TensorName::new(name)?, tensor));
    }
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    let layout = ShardLayout::new(sorted)?;
    let io = |e: std::io::Error| Error::io(format!("writing {}", path.display()), e);
    let file = File::create(path).map_err(io)?;
    file.set_len(layout.size_bytes()).map_err(io)?;
    file.write_all_at(layout.header(), 0).map_err(io)?;
    let mut piece = vec![0; 1 << 20];
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for tensor in layout.tensors() {
        let mut at = tensor.offset;
        while at < tensor.end() {
            let len = piece.len().min((tensor.end() - at) as usize);
            fill(&mut piece[..len], tensor.ty.dtype(), &mut state);
            if tensor.ty.dtype() == Dtype::F32 && tensor.name.as_str() == SCALE {
                piece[3..len].iter_mut().step_by(4).for_each(|high| *high &= 0x7F);
            }
            file.write_all_at(&piece[..len], at).map_err(io)?;
            at += len as u64;
        }
    }
    file.sync_all().map_err(io)
}

/// Random bits of values between 2⁻³ and 2⁴ in magnitude for floats; random
/// bytes otherwise.
fn fill(bytes: &mut [u8], dtype: Dtype, state: &mut u64) {
    let mut next = || {
        // xorshift64*, Marsaglia's parameters.
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    };
    match dtype {
        Dtype::F32 => bytes.chunks_exact_mut(4).for_each(|v| {
            let r = next();
            let exponent = 124 + (r >> 60) as u32 % 7;
            v.copy_from_slice(&((r as u32 & 0x807F_FFFF) | exponent << 23).to_le_bytes());
        }),
        Dtype::BF16 => bytes.chunks_exact_mut(2).for_each(|v| {
            let r = next();
            let exponent = 124 + (r >> 60) as u16 % 7;
            v.copy_from_slice(&((r as u16 & 0x807F) | exponent << 7).to_le_bytes());
        }),
        Dtype::F16 => bytes.chunks_exact_mut(2).for_each(|v| {
            let r = next();
            let exponent = 12 + (r >> 60) as u16 % 7;
            v.copy_from_slice(&((r as u16 & 0x83FF) | exponent << 10).to_le_bytes());
        }),
        Dtype::U8 => bytes.iter_mut().for_each(|b| *b = (next() >> 57) as u8),
        Dtype::F8_E4M3 => bytes.iter_mut().for_each(|b| *b = (next() >> 56) as u8 & 0xF7),
        _ => bytes.chunks_mut(8).for_each(|v| {
            let r = next().to_le_bytes();
            v.copy_from_slice(&r[..v.len()]);
        }),
    }
}

/// A checkpoint with the names, shapes and config.json of a GPT-NeoX model, in
/// BF16.
///
/// # Errors
/// `io_error`; `bad_params` if `hidden` is not a multiple of 64.
pub fn write_gpt_neox(folder: &Path, layers: u64, hidden: u64) -> Result<()> {
    if hidden == 0 || !hidden.is_multiple_of(64) {
        return Err(Error::new(Code::BadParams, format!("--hidden {hidden} is no multiple of 64")));
    }
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[u64]| tensors.push((name, Dtype::BF16, shape.to_vec()));
    add("gpt_neox.embed_in.weight".into(), &[50_304, hidden]);
    add("embed_out.weight".into(), &[50_304, hidden]);
    for i in 0..layers {
        let layer = format!("gpt_neox.layers.{i}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("{layer}.{norm}.weight"), &[hidden]);
            add(format!("{layer}.{norm}.bias"), &[hidden]);
        }
        for (linear, rows, columns) in [
            ("attention.query_key_value", 3 * hidden, hidden),
            ("attention.dense", hidden, hidden),
            ("mlp.dense_h_to_4h", 4 * hidden, hidden),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden),
        ] {
            add(format!("{layer}.{linear}.weight"), &[rows, columns]);
            add(format!("{layer}.{linear}.bias"), &[rows]);
        }
    }
    add("gpt_neox.final_layer_norm.weight".into(), &[hidden]);
    add("gpt_neox.final_layer_norm.bias".into(), &[hidden]);
    let io = |e: std::io::Error| Error::io(format!("writing {}", folder.display()), e);
    std::fs::create_dir_all(folder).map_err(io)?;
    let config = serde_json::json!({
        "model_type": "gpt_neox", "hidden_size": hidden, "num_attention_heads": hidden / 64,
        "num_hidden_layers": layers, "vocab_size": 50_304, "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("config.json"), format!("{config:#}\n")).map_err(io)?;
    write_tensors(&folder.join("model.safetensors"), &tensors)
}
