//! A layerwise forward pass with weights that are streamed block by block.
//!
//! A stack of residual layers, each of four square BF16 matrices, runs twice:
//! once with all weights resident on the GPU, once with two slots that the
//! blocks are streamed through while the layer before computes. Both runs
//! queue the same cuBLAS calls, so their outputs must agree bit for bit. It
//! prints the time of copying alone, of computing alone, and of both.
//!
//! ```sh
//! cargo run --release --example layerwise -- [layers] [width] [tokens]
//! ```
//!
//! It needs a CUDA device and libcublas; without them it says so.

#![allow(unsafe_code)]

use std::error::Error;
use std::ffi::c_void;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use cudarc::cublas::{result as cublas, sys};
use weightmill::offload::{
    BlockSpec, Content, CudaDevice, CudaMemory, Device, DeviceBlock, Memory, PlacedTensor, Segment, StreamOptions,
    Streamer,
};
use weightmill::tensor::{Dtype, TensorName, TensorType};

const MATRICES: usize = 4;
const REPEATS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    let number = |i: usize, default| numbers.get(i).copied().unwrap_or(default);
    let shape = Shape { layers: number(0, 32), width: number(1, 4096), tokens: number(2, 8192) };
    let device = Arc::new(CudaDevice::open(0)?);
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err("libcublas was not found: add its folder to LD_LIBRARY_PATH".into());
    }
    let folder = std::env::temp_dir().join(format!("weightmill-layerwise-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let outcome = run(&device, &folder, shape);
    std::fs::remove_dir_all(&folder)?;
    outcome
}

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    width: usize,
    tokens: usize,
}

impl Shape {
    fn block_bytes(self) -> usize {
        MATRICES * self.width * self.width * 2
    }
}

fn run(device: &Arc<CudaDevice>, folder: &Path, shape: Shape) -> Result<(), Box<dyn Error>> {
    let paths = (0..shape.layers).map(|layer| write_layer(folder, layer, shape)).collect::<Result<Vec<_>, _>>()?;
    let blocks = || paths.iter().enumerate().map(|(i, p)| block(i, p, shape)).collect::<Result<Vec<_>, _>>();

    let mut resident = Streamer::open(device.clone(), blocks()?, StreamOptions::default().load_all())?;
    resident.load_all()?;
    let (expected, compute_ms) = forward(&mut resident, shape)?;

    let mut streamed = Streamer::open(device.clone(), blocks()?, StreamOptions::default())?;
    streamed.pass(|_| Ok(()))?;
    let copies =
        (0..REPEATS).map(|_| Ok(streamed.pass(|_| Ok(()))?.ms)).collect::<weightmill::error::Result<Vec<f64>>>()?;
    let copy_ms = median(copies);
    let (found, total_ms) = forward(&mut streamed, shape)?;

    if expected != found {
        return Err("the streamed run has another output than the resident one".into());
    }
    let bytes = (shape.layers * shape.block_bytes()) as f64;
    let flops = 2.0 * (shape.layers * MATRICES * shape.tokens * shape.width * shape.width) as f64;
    let slower = copy_ms.max(compute_ms);
    println!(
        "{} layers of {} MiB, {} tokens: outputs agree bit for bit",
        shape.layers,
        shape.block_bytes() >> 20,
        shape.tokens
    );
    println!("rung      {}", streamed.report().rung);
    println!("copy      {copy_ms:8.2} ms  {:6.1} GB/s", bytes / copy_ms / 1e6);
    println!("compute   {compute_ms:8.2} ms  {:6.1} TFLOP/s", flops / compute_ms / 1e9);
    println!(
        "together  {total_ms:8.2} ms  {:.3} of the slower one, {:.0} % of the faster one hidden",
        total_ms / slower,
        100.0 * (copy_ms + compute_ms - total_ms) / copy_ms.min(compute_ms)
    );
    Ok(())
}

/// Runs the layers `REPEATS` times; gives the output and the median time.
fn forward(streamer: &mut Streamer<CudaDevice>, shape: Shape) -> Result<(Vec<u8>, f64), Box<dyn Error>> {
    let device = streamer.device().clone();
    let gemm = Gemm::new(streamer.compute_stream().as_raw(), shape)?;
    let activation_bytes = (shape.tokens * shape.width * 2) as u64;
    let state =
        [device.allocate(activation_bytes)?, device.allocate(activation_bytes)?, device.allocate(activation_bytes)?];
    let input = bf16_noise(shape.tokens * shape.width, 0xA11CE, 1.0);
    let mut times = Vec::new();
    for _ in 0..=REPEATS {
        device.copy_pageable(streamer.compute_stream(), &input, &state[0], 0)?;
        device.synchronize(streamer.compute_stream())?;
        let start = Instant::now();
        streamer.pass(|block| gemm.layer(block, &state))?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut output = vec![0; activation_bytes as usize];
    device.read_back(streamer.compute_stream(), &state[0], 0, &mut output)?;
    Ok((output, median(times.split_off(1))))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A cuBLAS handle on a stream.
struct Gemm {
    handle: sys::cublasHandle_t,
    shape: Shape,
}

impl Gemm {
    fn new(stream: *mut c_void, shape: Shape) -> Result<Self, Box<dyn Error>> {
        let handle = cublas::create_handle()?;
        // SAFETY: the stream outlives every call of this handle.
        unsafe { cublas::set_stream(handle, stream.cast()) }?;
        Ok(Gemm { handle, shape })
    }

    /// `x += w3·(w2·(w1·(w0·x)))` over the block's matrices; `state` is x and
    /// two temporaries. Queued on the block's stream.
    fn layer(&self, block: &DeviceBlock<'_, CudaDevice>, state: &[CudaMemory; 3]) -> weightmill::error::Result<()> {
        let [x, a, b] = state;
        let hops = [(x, a, 0.0), (a, b, 0.0), (b, a, 0.0), (a, x, 1.0)];
        for (weight, (from, to, add)) in block.tensors().zip(hops) {
            self.multiply(weight.address, from.address(), to.address(), add)?;
        }
        Ok(())
    }

    fn multiply(&self, weight: u64, from: u64, to: u64, add: f32) -> weightmill::error::Result<()> {
        let (n, m) = (self.shape.width as i32, self.shape.tokens as i32);
        let one = 1.0_f32;
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        let plain = sys::cublasOperation_t::CUBLAS_OP_N;
        // SAFETY: the weight is `n` by `n` and the activations `n` by `m` BF16
        // values in device memory; the block keeps its slot until the work
        // queued here is done; the scalars are read before this returns.
        unsafe {
            cublas::gemm_ex(
                self.handle,
                plain,
                plain,
                n,
                m,
                n,
                (&raw const one).cast(),
                weight as *const c_void,
                bf16,
                n,
                from as *const c_void,
                bf16,
                n,
                (&raw const add).cast(),
                to as *mut c_void,
                bf16,
                n,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(|e| weightmill::error::Error::io("multiplying with cuBLAS", e))
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        unsafe { cublas::destroy_handle(self.handle) }.ok();
    }
}

fn write_layer(folder: &Path, layer: usize, shape: Shape) -> std::io::Result<PathBuf> {
    let path = folder.join(format!("{layer}.bin"));
    // Small weights, so that activations neither grow nor vanish.
    let scale = 1.0 / (shape.width as f32).sqrt();
    File::create(&path)?.write_all(&bf16_noise(shape.block_bytes() / 2, layer as u64, scale))?;
    Ok(path)
}

fn block(layer: usize, path: &Path, shape: Shape) -> Result<BlockSpec, Box<dyn Error>> {
    let side = shape.width as u64;
    let tensor = |i: usize| -> Result<PlacedTensor, Box<dyn Error>> {
        Ok(PlacedTensor {
            name: TensorName::new(&format!("layers.{layer}.w{i}"))?,
            ty: TensorType::new(Dtype::BF16, vec![side, side]).ok_or("a matrix is too large")?,
            offset: i as u64 * side * side * 2,
            leaf_hashes: None,
        })
    };
    let content = Content::File { file: Arc::new(File::open(path)?), path: path.into(), offset: 0 };
    Ok(BlockSpec {
        name: format!("layers.{layer}"),
        segments: vec![Segment { content, len: shape.block_bytes() as u64 }],
        tensors: (0..MATRICES).map(tensor).collect::<Result<_, _>>()?,
    })
}

/// `count` BF16 values, uniform in ±`scale`.
fn bf16_noise(count: usize, seed: u64, scale: f32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(2 * count);
    for _ in 0..count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let unit = (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
        bytes.extend_from_slice(&((unit * scale).to_bits() >> 16).to_le_bytes()[..2]);
    }
    bytes
}
