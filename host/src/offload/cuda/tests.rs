//! On a machine with a GPU these run on it; elsewhere they check what is said
//! when there is none.

use std::process::Command;

use super::*;
use crate::digest::{LEAF_BYTES, leaf_hashes};

fn device() -> Option<Arc<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(Arc::new(device)),
        Err(error) => {
            assert_eq!(error.code(), Code::NoDevice, "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

#[test]
fn a_missing_device_is_an_error_with_a_hint() {
    let error = CudaDevice::open(99).err().expect("nobody has a hundred GPUs");
    assert_eq!(error.code(), Code::NoDevice);
    assert!(error.message().contains("libcuda") || error.message().contains("99"), "{error}");
}

#[test]
fn the_kernel_hashes_like_the_host() {
    let Some(device) = device() else { return };
    let bytes: Vec<u8> = (0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    // Every tail length of interest, and whole leaves.
    let lens = [0, 1, 3, 55, 56, 63, 64, 65, 119, 120, 128, 1000, 16_383, 16_384, 16_385, 100_000];
    let stream = device.stream().unwrap();
    let memory = device.allocate(bytes.len() as u64).unwrap();
    device.copy_pageable(&stream, &bytes, &memory, 0).unwrap();
    for start in [0_usize, 16, 256, 4096 + 48] {
        for len in lens {
            let part = &bytes[start..start + len];
            let leaves: Vec<Leaf> = (0..len)
                .step_by(LEAF_BYTES)
                .map(|at| Leaf { offset: (start + at) as u64, len: LEAF_BYTES.min(len - at) as u64 })
                .collect();
            // Behind another block's table and hashes.
            let tables = device.leaf_tables(&[&[Leaf { offset: 0, len: 5 }], &leaves]).unwrap();
            let hashes = device.allocate_pinned((1 + leaves.len()) * HASH_BYTES).unwrap();
            device.hash_leaves(&stream, &memory, &tables[1], &hashes, HASH_BYTES).unwrap();
            device.hash_leaves(&stream, &memory, &tables[0], &hashes, 0).unwrap();
            device.synchronize(&stream).unwrap();
            hashes.read(&mut |found| {
                assert_eq!(found[..HASH_BYTES], leaf_hashes(&bytes[..5]));
                assert_eq!(found[HASH_BYTES..], leaf_hashes(part), "{len} at {start}");
            });
            assert!(device.hash_leaves(&stream, &memory, &tables[0], &hashes, hashes_len(&leaves) + 1).is_err());
        }
    }
}

#[test]
fn bounds_are_checked_before_the_driver_is_asked() {
    let Some(device) = device() else { return };
    let stream = device.stream().unwrap();
    let memory = device.allocate(100).unwrap();
    let pinned = device.allocate_pinned(100).unwrap();
    assert!(device.copy_pageable(&stream, &[0; 101], &memory, 0).is_err());
    assert!(device.copy_pinned(&stream, &pinned, 101, &memory, 0).is_err());
    assert!(device.copy_pinned(&stream, &pinned, 100, &memory, u64::MAX).is_err());
    assert!(device.read_back(&stream, &memory, 1, &mut [0; 100]).is_err());
}

fn hashes_len(leaves: &[Leaf]) -> usize {
    leaves.len() * HASH_BYTES
}

/// The committed PTX is what `leaf_sha256.sh` makes, where nvcc is at hand. A
/// different release of nvcc only has to accept the source.
#[test]
fn the_ptx_is_made_from_the_source() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/offload/kernels/leaf_sha256.sh");
    if !std::path::Path::new(script).exists() || Command::new("nvcc").arg("--version").output().is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("leaf_sha256.ptx");
    let status = Command::new(script).arg(&out).status().unwrap();
    assert!(status.success());
    let made = std::fs::read_to_string(out).unwrap();
    let release = |ptx: &str| ptx.lines().find(|l| l.contains("release")).map(str::to_string);
    if release(&made) == release(LEAF_SHA256_PTX) {
        assert!(made == LEAF_SHA256_PTX, "run src/offload/kernels/leaf_sha256.sh");
    }
}
