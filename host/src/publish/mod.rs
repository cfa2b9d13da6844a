//! Publishing: modules and entries travel through OCI registries.
//!
//! ```text
//! module ─push──► registry ─pull─► store ─┐
//! entry  ─push──► registry ─pull─► store  ├─ trust.toml: may it run, may it be used?
//! entry  ─export► folder  ─import► store ─┘
//! ```
//!
//! | module | what it knows |
//! | --- | --- |
//! | [`reference`] | `oci://registry/repository:tag@sha256:…` |
//! | [`credentials`] | what `docker login` keeps |
//! | [`client`] | the registry's API: requests, retries, time-outs |
//! | [`manifest`] | manifests, descriptors, indexes |
//! | [`module`] | modules as wasm artefacts |
//! | [`entry`] | entries: document, shards, leaf lists, action |
//! | [`source`] | entries by recipe and source, without the checkpoint |
//! | [`layout`] | entries in a folder |
//! | [`lock`] | what tags in recipes meant |
//! | [`trust`] | whom the user trusts |
//! | [`remotes`] | the modules that recipes name: lock, store, registry, trust |
//!
//! A registry, a mirror, a peer between, a folder on a stick: nothing of them is
//! believed. Bytes are what their digests say, and which digests count is said
//! by the recipe and by the user's own `trust.toml`.

pub mod client;
pub mod credentials;
pub mod entry;
pub mod layout;
pub mod lock;
pub mod manifest;
pub mod module;
pub mod reference;
pub mod remotes;
pub mod source;
mod transfer;
pub mod trust;
