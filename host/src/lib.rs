//! A WebAssembly-sandboxed loader transform host.
//!
//! ```text
//! checkpoint ─┐
//! recipe ─────┼─► key ─► store ──hit──────────────────► entry ─► lease ─► register ─► stream ─► GPU
//! module.wasm ┘            └─miss─► plan ─► execute ─► publish ─┘    └ pread ─► pinned ring ──┘
//! ```
//!
//! A model author's transform is a wasm module that plans from metadata only
//! and computes tiles in a sandbox. Its output is a pure function of its
//! inputs, so the result is found by a key that is known before any tensor is
//! read ([`plan::action`]), kept in a content-addressed [`store`], and streamed
//! to a device by the [`offload`] core.
//!
//! | module | what it knows |
//! | --- | --- |
//! | [`checkpoint`] | safetensors files: headers, digests of tensors, `pread` |
//! | [`recipe`] | which tensors become which; names only |
//! | [`modules`] | where modules come from |
//! | [`plan`] | what a module answers, checked; the action |
//! | [`sandbox`] | the engines that run modules |
//! | [`execute`] | carrying plans out, and the way from a recipe to an entry |
//! | [`store`] | entries, blobs, leases, publishing |
//! | [`offload`] | devices, registration, streaming |
//! | [`attest`] | signed statements about entries |
//! | [`lineage`] | which source bytes, modules and parameters made a tensor |
//! | [`publish`] | modules and entries in OCI registries; whom to trust |
//! | [`load`] | results as blocks to stream |
//! | [`bench`] | measurements against a baseline in the same run |
#![cfg_attr(windows, allow(unused))]

#[cfg(windows)]
compile_error!("weightmill runs on Linux; on macOS for authoring. Windows is not supported: use WSL 2");

pub mod attest;
pub mod bench;
pub mod canonical;
pub mod checkpoint;
pub mod cli;
pub mod digest;
pub mod error;
pub mod execute;
pub mod lineage;
pub mod load;
pub mod mapping;
pub mod modules;
pub mod offload;
pub mod plan;
pub mod progress;
pub mod publish;
pub mod recipe;
pub mod sandbox;
pub mod store;
pub mod tensor;
