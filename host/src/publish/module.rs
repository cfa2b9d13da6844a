//! Modules in registries.
//!
//! The layout is that of the CNCF Wasm OCI artefact: a config of
//! `application/vnd.wasm.config.v0+json` and one `application/wasm` layer, so
//! that other tools for wasm artefacts can show and copy it. A module's
//! identity is the SHA-256 of the layer, whatever the manifest around it says.
//!
//! Everything in config and manifest comes from the module itself, so the same
//! module is the same manifest whoever pushes it, and when. (The config's
//! `created`, which readers of that format require, is the epoch.)

use serde_json::json;
use weightmill_guest::abi::limits;

use super::client::{At, Registry};
use super::manifest::{Descriptor, MANIFEST, Manifest};
use super::reference::Reference;
use super::trust::{MODULE_PREDICATE, ModulePredicate};
use crate::attest::{PAYLOAD_TYPE, SigningKey, Statement, Subject, sign};
use crate::canonical::to_canonical;
use crate::digest::{BlobDigest, ModuleDigest};
use crate::error::{Code, Error, Result};
use crate::progress::Progress;
use crate::sandbox::Module;
use crate::store::RemoteModule;

/// The config of a wasm artefact.
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
/// A wasm layer.
const LAYER: &str = "application/wasm";
/// What a signature of a module is as an artefact.
pub const MODULE_SIGNATURE: &str = "application/vnd.weightmill.module.signature.v1";
/// The form of signatures and attestations.
pub const ENVELOPE: &str = "application/vnd.dsse.envelope.v1+json";

/// A module that was pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushedModule {
    /// The manifest.
    pub manifest: BlobDigest,
    /// The module.
    pub module: ModuleDigest,
    /// The signature's manifest, if it was signed.
    pub signature: Option<BlobDigest>,
}

/// A module that was pulled: verified, sound, and not judged yet.
pub struct PulledModule {
    /// What is known of it now.
    pub remote: RemoteModule,
    /// The module.
    pub module: Module,
    /// Why its signatures could not be read, if so: none are known then.
    pub unread: Option<Error>,
}

/// Pushes a module under a tag, and signs it if there is a key.
///
/// # Errors
/// `network_error`, `registry_refused`, `registry_timeout`, `interrupted`.
pub fn push_module(
    registry: &Registry,
    tag: &str,
    module: &Module,
    key: Option<&SigningKey>,
    progress: &dyn Progress,
) -> Result<PushedModule> {
    let (config, manifest) = documents(module)?;
    registry.guarded(progress, || {
        let layer = &manifest.layers[0];
        registry.push_blob(&layer.digest, layer.size, &module.bytes(), None, progress)?;
        registry.push_blob(&manifest.config.digest, manifest.config.size, &config.as_slice(), None, progress)?;
        let digest = registry.put_manifest(&At::Tag(tag.to_owned()), &manifest, progress)?;
        let subject = Descriptor::new(MANIFEST, digest, manifest.to_bytes()?.len() as u64);
        let signature = match key {
            Some(key) => {
                let envelope = module_signature(module, key)?;
                Some(registry.attach(&subject, MODULE_SIGNATURE, ENVELOPE, &envelope, progress)?)
            }
            None => None,
        };
        Ok(PushedModule { manifest: digest, module: module.digest(), signature })
    })
}

fn documents(module: &Module) -> Result<(Vec<u8>, Manifest)> {
    let digest = BlobDigest::from_bytes(*module.digest().as_bytes());
    let config = to_canonical(&json!({
        "created": "1970-01-01T00:00:00Z",
        "architecture": "wasm",
        "os": "wasip1",
        "layerDigests": [format!("sha256:{digest}")],
    }))?;
    let metadata = module.metadata();
    let layer = Descriptor::new(LAYER, digest, module.bytes().len() as u64)
        .annotated("org.opencontainers.image.title", format!("{}.wasm", metadata.name));
    let mut manifest = Manifest::new(None, Descriptor::of(CONFIG, &config), vec![layer]);
    let fields = [
        ("org.opencontainers.image.title", &metadata.name),
        ("org.opencontainers.image.version", &metadata.version),
        ("org.opencontainers.image.description", &metadata.summary),
        ("org.opencontainers.image.source", &metadata.source),
        ("org.opencontainers.image.licenses", &metadata.licence),
    ];
    let annotations = fields.into_iter().filter(|(_, value)| !value.is_empty());
    manifest.annotations = annotations.map(|(name, value)| (name.to_owned(), value.clone())).collect();
    manifest.annotations.insert("dev.weightmill.abi".into(), metadata.abi.to_string());
    Ok((config, manifest))
}

/// A signed statement about a module.
///
/// # Errors
/// `bad_params` if its metadata has no canonical form.
pub fn module_signature(module: &Module, key: &SigningKey) -> Result<Vec<u8>> {
    let metadata = module.metadata();
    let predicate = ModulePredicate { name: metadata.name.clone(), version: metadata.version.clone() };
    let subject = Subject::sha256(format!("{}.wasm", metadata.name), module.digest());
    let statement = Statement::new(vec![subject], MODULE_PREDICATE, predicate);
    sign(PAYLOAD_TYPE, &statement.to_bytes()?, key).to_json()
}

/// Pulls the module of a manifest, checks it against the static rules, and
/// takes along the signatures that are attached to it. Whether any are needed is
/// for the caller to say, so a pull does not fail for want of them.
///
/// # Errors
/// `module_not_found` if there is none; `digest_mismatch`; what is wrong with
/// the module; `network_error`, `registry_refused`, `registry_timeout`,
/// `interrupted`.
pub fn pull_module(registry: &Registry, manifest: &BlobDigest, progress: &dyn Progress) -> Result<PulledModule> {
    registry.guarded(progress, || {
        let from = registry.repository().at(*manifest);
        let fetched = registry.manifest(&At::Digest(*manifest), progress)?.ok_or_else(|| missing(&from))?;
        let layer = wasm_layer(&Manifest::parse(&fetched.bytes, &from.to_string())?, &from)?;
        let bytes = registry.small_blob(&layer.digest, limits::MODULE_BYTES as u64, progress)?;
        let module = Module::parse(bytes).map_err(|e| e.context(&from))?;
        let (signatures, unread) = match signatures(registry, manifest, progress) {
            Ok(signatures) => (signatures, None),
            Err(e) if e.code() == Code::Interrupted => return Err(e),
            Err(e) => (Vec::new(), Some(e)),
        };
        let remote = RemoteModule {
            repository: registry.repository().to_string(),
            manifest: *manifest,
            module: module.digest(),
            signatures,
        };
        Ok(PulledModule { remote, module, unread })
    })
}

/// The signatures that are attached to a module's manifest now.
///
/// # Errors
/// `network_error`, `registry_refused`, `registry_timeout`, `interrupted`.
pub fn signatures(registry: &Registry, manifest: &BlobDigest, progress: &dyn Progress) -> Result<Vec<String>> {
    let found = registry.attached(manifest, MODULE_SIGNATURE, progress)?;
    Ok(found.into_iter().filter_map(|bytes| String::from_utf8(bytes).ok()).collect())
}

fn wasm_layer(manifest: &Manifest, from: &Reference) -> Result<Descriptor> {
    let refuse = |what: String| {
        Error::new(Code::ModuleNotFound, format!("{from} is no wasm artefact: {what}")).hint(
            "expected one layer of application/wasm, as `weightmill module push` and other tools for wasm make it",
        )
    };
    match manifest.layers.as_slice() {
        [layer] if layer.media_type == LAYER && layer.size <= limits::MODULE_BYTES as u64 => Ok(layer.clone()),
        [layer] if layer.media_type == LAYER => Err(Error::new(
            Code::ModuleTooLarge,
            format!("{from} has {} bytes, more than {}", layer.size, limits::MODULE_BYTES),
        )),
        [layer] => Err(refuse(format!("its layer is of '{}'", layer.media_type.escape_debug()))),
        layers => Err(refuse(format!("it has {} layers", layers.len()))),
    }
}

/// The error for a module that its registry does not have.
pub fn missing(reference: &Reference) -> Error {
    Error::new(Code::ModuleNotFound, format!("the registry has no module {reference}"))
        .hint("check the repository and the tag; a private repository may also answer so to strangers")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::SHIPPED;

    #[test]
    fn documents_depend_on_the_module_alone() {
        let module = Module::parse(SHIPPED.iter().find(|m| m.name == "cast").unwrap().bytes).unwrap();
        let (config, manifest) = documents(&module).unwrap();
        let bytes = manifest.to_bytes().unwrap();
        assert_eq!(documents(&module).unwrap().1.to_bytes().unwrap(), bytes);
        assert_eq!(Manifest::parse(&bytes, "here").unwrap(), manifest);
        assert_eq!(manifest.config.digest, BlobDigest::of(&config));
        assert_eq!(manifest.layers[0].digest.as_bytes(), module.digest().as_bytes());
        assert_eq!(manifest.annotations["org.opencontainers.image.title"], "cast");
        let from = Reference::parse("oci://r.io/a:v").unwrap();
        assert_eq!(wasm_layer(&manifest, &from).unwrap(), manifest.layers[0]);
    }

    #[test]
    fn other_artefacts_are_no_modules() {
        let from = Reference::parse("oci://r.io/a:v").unwrap();
        let layer = |media_type: &str, size| Descriptor::new(media_type, BlobDigest::of(b"x"), size);
        let config = Descriptor::of(CONFIG, b"{}");
        for (layers, code) in [
            (vec![], Code::ModuleNotFound),
            (vec![layer("application/x-tar", 1)], Code::ModuleNotFound),
            (vec![layer(LAYER, 1), layer(LAYER, 1)], Code::ModuleNotFound),
            (vec![layer(LAYER, 1 << 40)], Code::ModuleTooLarge),
        ] {
            let manifest = Manifest::new(None, config.clone(), layers);
            assert_eq!(wasm_layer(&manifest, &from).unwrap_err().code(), code);
        }
    }
}
