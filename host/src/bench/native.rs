//! The shipped modules' own code compiled natively: what the sandbox costs is
//! measured against it. Nothing but the benchmark runs it.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use weightmill_guest::abi::{PlanRequest, RunBlock};
use weightmill_guest::native::{self, Window};
use weightmill_guest::prelude::{Tile, Transform};

use crate::error::{Code, Error, Result};
use crate::sandbox::{PlanReply, Program, RunReply, TileIo, TileRequest};

/// A transform as a program, without a sandbox.
struct Native<T> {
    /// Buffers of finished tiles: fresh memory would be measured instead.
    windows: Mutex<Vec<Vec<Window>>>,
    transform: PhantomData<fn() -> T>,
}

/// The native form of a shipped module; `None` if there is no such module.
pub(super) fn program(module: &str) -> Option<Arc<dyn Program>> {
    fn of<T: Transform + 'static>() -> Arc<dyn Program> {
        Arc::new(Native::<T> { windows: Mutex::default(), transform: PhantomData })
    }
    Some(match module {
        "awq-dequantize" => of::<awq_dequantize::AwqDequantize>(),
        "cast" => of::<cast::Cast>(),
        "fp8-dequantize" => of::<fp8_dequantize::Fp8Dequantize>(),
        "fp8-fnuz" => of::<fp8_fnuz::Fp8Fnuz>(),
        "fp8-quantize" => of::<fp8_quantize::Fp8Quantize>(),
        "gptq-dequantize" => of::<gptq_dequantize::GptqDequantize>(),
        "lora-merge" => of::<lora_merge::LoraMerge>(),
        "mxfp4-dequantize" => of::<mxfp4_dequantize::Mxfp4Dequantize>(),
        "weight-norm-fold" => of::<weight_norm_fold::WeightNormFold>(),
        _ => return None,
    })
}

impl<T> Native<T> {
    /// Buffers of these lengths.
    fn take(&self, lens: &[usize]) -> Vec<Window> {
        let mut free = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |set: &Vec<Window>| set.iter().map(|w| w.bytes().len()).eq(lens.iter().copied());
        match free.iter().position(fits) {
            Some(found) => free.swap_remove(found),
            None => lens.iter().map(|len| Window::zeroed(*len)).collect(),
        }
    }

    fn give_back(&self, windows: Vec<Window>) {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner).push(windows);
    }
}

impl<T: Transform + 'static> Program for Native<T> {
    fn plan(&self, request: &[u8]) -> Result<PlanReply> {
        let request: PlanRequest = serde_json::from_slice(request)
            .map_err(|e| Error::new(Code::ModuleBadAnswer, format!("the request: {e}")))?;
        let answer = serde_json::to_vec(&native::plan::<T>(&request));
        let answer = answer.map_err(|e| Error::new(Code::ModuleBadAnswer, format!("the answer: {e}")))?;
        Ok(PlanReply { answer, fuel: 0 })
    }

    fn run(&self, tile: &TileRequest<'_>, io: &mut dyn TileIo) -> Result<RunReply> {
        let lens: Vec<usize> = tile.windows.iter().chain([&tile.out_len]).map(|len| *len as usize).collect();
        let mut windows = self.take(&lens);
        let Some((output, inputs)) = windows.split_last_mut() else {
            return Err(Error::new(Code::ModuleBadPlan, "a tile has an output"));
        };
        for (number, window) in inputs.iter_mut().enumerate() {
            io.fill(number, window.bytes_mut())?;
        }
        output.bytes_mut().fill(0);
        let params = serde_json::from_slice(tile.params)
            .map_err(|e| Error::new(Code::ModuleBadAnswer, format!("the parameters: {e}")))?;
        let block = RunBlock {
            target: tile.target,
            group: tile.group,
            turn: tile.turn,
            offset: tile.offset,
            tile: tile.tile,
            out_len: tile.out_len,
            ..RunBlock::default()
        };
        let read: Vec<&[u8]> = inputs.iter().map(|w| w.bytes()).collect();
        let start = Instant::now();
        let ran = native::run::<T>(&params, &mut Tile::new(block, read, tile.args, output.bytes_mut()));
        io.ran(start.elapsed());
        if ran.is_ok() {
            io.take(output.bytes())?;
        }
        self.give_back(windows);
        Ok(match ran {
            Ok(()) => RunReply::Done { fuel: 0 },
            Err(error) => RunReply::Refused { error, fuel: 0 },
        })
    }
}
