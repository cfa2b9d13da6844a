//! Where modules come from: shipped with the program, a file beside the
//! recipe, the store, or a registry.

mod shipped;

pub use shipped::{SHIPPED, Shipped};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use weightmill_guest::abi::limits;

use crate::digest::ModuleDigest;
use crate::error::{Code, Error, Result, nearest};
use crate::recipe::ModuleRef;
use crate::sandbox::Module;
use crate::store::Store;

/// Finds modules that are elsewhere, and says which modules of elsewhere may
/// run.
pub trait Remotes: Send + Sync {
    /// The module of an `oci://` reference in a recipe in `folder`, if it may
    /// run.
    ///
    /// # Errors
    /// `module_not_trusted`, `module_not_found`; what is wrong with the module
    /// or the network.
    fn module(&self, reference: &str, folder: &Path) -> Result<Module>;

    /// Whether a module of the store may run.
    ///
    /// # Errors
    /// `module_not_trusted`.
    fn allow_stored(&self, digest: &ModuleDigest) -> Result<()>;
}

/// Finds modules and keeps them parsed.
pub struct Library {
    store: Option<Store>,
    remotes: Option<Box<dyn Remotes>>,
    parsed: Mutex<BTreeMap<String, Arc<Module>>>,
}

impl Library {
    /// A library over the shipped modules, files, and `store` if there is one.
    pub fn new(store: Option<Store>) -> Self {
        Library { store, remotes: None, parsed: Mutex::default() }
    }

    /// The same, with modules from elsewhere.
    #[must_use]
    pub fn with_remotes(self, remotes: Box<dyn Remotes>) -> Self {
        Library { remotes: Some(remotes), ..self }
    }

    /// The module that `reference` names. Paths are relative to `folder`.
    ///
    /// # Errors
    /// `module_not_found`, or what is wrong with the module.
    pub fn load(&self, reference: &ModuleRef, folder: &Path) -> Result<Arc<Module>> {
        let id = format!("{reference:?}");
        if let Some(module) = self.parsed.lock().unwrap_or_else(PoisonError::into_inner).get(&id) {
            return Ok(module.clone());
        }
        let module = Arc::new(match reference {
            ModuleRef::Shipped(name) => self.shipped(name)?,
            ModuleRef::Path(path) => self.file(&folder.join(path))?,
            ModuleRef::Stored(digest) => self.stored(digest)?,
            ModuleRef::Oci(reference) => match &self.remotes {
                Some(remotes) => remotes.module(reference, folder)?,
                None => {
                    return Err(Error::new(Code::ModuleNotFound, format!("the module {reference} is in a registry"))
                        .hint("pull it with `weightmill module pull`, then refer to it as sha256:<digest>"));
                }
            },
        });
        self.parsed.lock().unwrap_or_else(PoisonError::into_inner).insert(id, module.clone());
        Ok(module)
    }

    /// The module with a digest, wherever it is: among those that were loaded,
    /// shipped, or in the store. `None` if it is not at hand.
    ///
    /// # Errors
    /// What reading the store says.
    pub fn by_digest(&self, digest: &ModuleDigest) -> Result<Option<Arc<Module>>> {
        let parsed = self.parsed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = parsed.values().find(|module| module.digest() == *digest) {
            return Ok(Some(module.clone()));
        }
        drop(parsed);
        let bytes = match (SHIPPED.iter().find(|s| ModuleDigest::of(s.bytes) == *digest), &self.store) {
            (Some(shipped), _) => Some(shipped.bytes.to_vec()),
            (None, Some(store)) => store.module(digest, &crate::progress::Silent)?,
            (None, None) => None,
        };
        let Some(bytes) = bytes else { return Ok(None) };
        let module = Arc::new(Module::parse(bytes)?);
        let id = format!("{:?}", ModuleRef::Stored(*digest));
        self.parsed.lock().unwrap_or_else(PoisonError::into_inner).insert(id, module.clone());
        Ok(Some(module))
    }

    fn shipped(&self, name: &str) -> Result<Module> {
        let Some(shipped) = SHIPPED.iter().find(|s| s.name == name) else {
            let near = nearest(name, SHIPPED.iter().map(|s| s.name));
            let hint = match near {
                Some(near) => format!("did you mean {near}? `weightmill module ls` lists all"),
                None => "`weightmill module ls` lists the shipped modules; a file is written ./name.wasm".to_string(),
            };
            return Err(Error::new(Code::ModuleNotFound, format!("there is no shipped module '{name}'")).hint(hint));
        };
        Module::parse(shipped.bytes)
    }

    fn file(&self, path: &Path) -> Result<Module> {
        read_module(path).and_then(Module::parse).map_err(|e| e.context(path.display()))
    }

    fn stored(&self, digest: &ModuleDigest) -> Result<Module> {
        if let Some(remotes) = &self.remotes {
            remotes.allow_stored(digest)?;
        }
        let bytes = match &self.store {
            Some(store) => store.module(digest, &crate::progress::Silent)?,
            None => None,
        };
        let Some(bytes) = bytes else {
            return Err(Error::new(Code::ModuleNotFound, format!("the module sha256:{digest} is not in the store"))
                .hint("`weightmill module ls` lists what is there"));
        };
        Module::parse(bytes)
    }
}

/// Reads a module file of bounded size.
///
/// # Errors
/// `module_not_found`, `module_too_large`.
pub fn read_module(path: &Path) -> Result<Vec<u8>> {
    let missing = |e: std::io::Error| {
        Error::new(Code::ModuleNotFound, format!("the module {} cannot be read: {e}", path.display()))
            .hint("a path in a recipe is relative to the recipe's folder")
    };
    let meta = std::fs::metadata(path).map_err(missing)?;
    if !meta.is_file() {
        return Err(Error::new(Code::ModuleNotFound, format!("{} is no regular file", path.display())));
    }
    if meta.len() > limits::MODULE_BYTES as u64 {
        return Err(Error::new(
            Code::ModuleTooLarge,
            format!("{} has {} bytes, more than {}", path.display(), meta.len(), limits::MODULE_BYTES),
        ));
    }
    std::fs::read(path).map_err(missing)
}

/// How a person wrote a module on the command line: a shipped name, a path, or
/// `sha256:<hex>`.
///
/// # Errors
/// `module_not_found` if it is none of these.
pub fn parse_argument(text: &str) -> Result<ModuleRef> {
    if let Some(hex) = text.strip_prefix("sha256:") {
        let digest =
            hex.parse().map_err(|e| Error::new(Code::ModuleNotFound, format!("'{text}' is no module: {e}")))?;
        return Ok(ModuleRef::Stored(digest));
    }
    if SHIPPED.iter().any(|s| s.name == text) {
        return Ok(ModuleRef::Shipped(text.to_string()));
    }
    if text.ends_with(".wasm") || text.contains('/') {
        return Ok(ModuleRef::Path(PathBuf::from(text)));
    }
    Ok(ModuleRef::Shipped(text.to_string()))
}
