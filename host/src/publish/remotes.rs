//! The modules that recipes name by `oci://` references.
//!
//! ```text
//! oci://r/n:tag ──weightmill.lock, else the registry──► manifest ──the store's record, else pull──► module
//!                                                                       │
//!                                                            trust.toml ┴─► may it run?
//! ```
//!
//! A lock file says which manifest a tag meant, and only that: which module a
//! manifest is, and from which repository, is known from pulling it. So what a
//! lock file claims about a module is compared, never believed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;

use super::client::{Registry, RegistryOptions};
use super::lock::{LockFile, Locked};
use super::module::{self, pull_module};
use super::reference::Reference;
use super::trust::{Grounds, Trust};
use crate::digest::{BlobDigest, ModuleDigest};
use crate::error::{Code, Error, Result};
use crate::modules::Remotes;
use crate::progress::Progress;
use crate::sandbox::Module;
use crate::store::{RemoteModule, Store};

/// Finds remote modules: in the store, else in their registries.
pub struct RemoteModules {
    store: Option<Store>,
    options: RegistryOptions,
    locked: bool,
    trust: Mutex<Option<Trust>>,
    progress: Box<dyn Progress + Send>,
    /// Why a manifest's signatures could not be read.
    unread: Mutex<BTreeMap<BlobDigest, String>>,
    /// One at a time reads and writes the lock file.
    writing: Mutex<()>,
}

/// What a reference came to.
pub struct Resolved {
    /// The module.
    pub module: Module,
    /// The manifest.
    pub manifest: BlobDigest,
    /// Why it may run.
    pub grounds: Grounds,
    /// Whether the registry was asked.
    pub asked: bool,
}

impl RemoteModules {
    /// Over a store, if there is one. `locked` forbids to resolve a tag that
    /// the lock file does not have. `progress` may end what a recipe's
    /// resolution waits for.
    pub fn new(
        store: Option<Store>,
        options: RegistryOptions,
        locked: bool,
        progress: Box<dyn Progress + Send>,
    ) -> Self {
        RemoteModules {
            store,
            options,
            locked,
            trust: Mutex::default(),
            progress,
            unread: Mutex::default(),
            writing: Mutex::default(),
        }
    }

    fn trust(&self) -> Result<Trust> {
        let mut trust = self.trust.lock().unwrap_or_else(PoisonError::into_inner);
        match &*trust {
            Some(trust) => Ok(trust.clone()),
            None => Ok(trust.insert(Trust::load()?).clone()),
        }
    }

    /// The module of a reference in a recipe in `folder`.
    ///
    /// # Errors
    /// `module_not_trusted`, `module_not_found`, `digest_mismatch`, what is
    /// wrong with the module; `network_error`, `registry_refused`,
    /// `registry_timeout`; `recipe_invalid` for the lock file.
    pub fn resolve(&self, reference: &Reference, folder: &Path, progress: &dyn Progress) -> Result<Resolved> {
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut asked = false;
        loop {
            if let Some(resolved) = self.try_resolve(reference, folder, &mut asked, progress)? {
                return Ok(resolved);
            }
        }
    }

    /// `None` if another process was the first to record what the reference
    /// means, and found something else.
    fn try_resolve(
        &self,
        reference: &Reference,
        folder: &Path,
        asked: &mut bool,
        progress: &dyn Progress,
    ) -> Result<Option<Resolved>> {
        let lock = LockFile::load(folder)?;
        let known = lock.get(reference);
        let manifest = match (reference.digest, known) {
            (Some(digest), _) => digest,
            (None, Some(locked)) => locked.manifest,
            (None, None) if self.locked => return Err(not_locked(reference, &lock)),
            (None, None) => {
                *asked = true;
                self.look_up(reference, progress)?
            }
        };
        let (mut remote, module, pulled) = self.take(reference, &manifest, progress)?;
        *asked |= pulled;
        if let Some(locked) = known.filter(|locked| locked.module != remote.module) {
            return Err(Error::new(
                Code::DigestMismatch,
                format!(
                    "{} says that {reference} is the module sha256:{}, its manifest has sha256:{}",
                    lock.path().display(),
                    locked.module,
                    remote.module
                ),
            )
            .hint("the lock file was altered: restore it, or run `weightmill module update`"));
        }
        let trust = self.trust()?;
        let grounds = match self.judge(reference, &remote) {
            Err(refused) if !pulled && trust.has_module_keys() => {
                // It may have been signed since.
                self.refresh(reference, &mut remote, progress).map_err(|e| unsigned(refused, e.message()))?;
                trust.judge_module(reference, &remote)?
            }
            judged => judged?,
        };
        if known.is_none() && !self.locked {
            let found = Locked { manifest, module: remote.module };
            match LockFile::record(folder, reference, found, progress) {
                Ok(recorded) if recorded != found => return Ok(None),
                // What is pinned in the recipe means the same without a lock.
                Err(_) if reference.digest.is_some() => {}
                recorded => drop(recorded?),
            }
        }
        Ok(Some(Resolved { module, manifest, grounds, asked: *asked }))
    }

    /// What a tag points to now.
    ///
    /// # Errors
    /// `module_not_found`; `network_error`, `registry_refused`,
    /// `registry_timeout`, `interrupted`.
    pub fn look_up(&self, reference: &Reference, progress: &dyn Progress) -> Result<BlobDigest> {
        let Some(tag) = &reference.tag else {
            return Err(Error::new(Code::BadParams, format!("the reference {reference} needs a tag or a digest")));
        };
        let registry = Registry::open(&reference.repository, &self.options)?;
        registry.guarded(progress, || registry.resolve(tag, progress))?.ok_or_else(|| module::missing(reference))
    }

    /// The module of a manifest: from the store, else from the registry, and
    /// then it is kept.
    fn take(
        &self,
        reference: &Reference,
        manifest: &BlobDigest,
        progress: &dyn Progress,
    ) -> Result<(RemoteModule, Module, bool)> {
        let repository = reference.repository.to_string();
        if let Some(store) = &self.store
            && let Some(remote) = store.remote_module(&repository, manifest)
            && let Some(bytes) = store.module(&remote.module, progress)?
        {
            return Ok((remote, Module::parse(bytes)?, false));
        }
        let (remote, module) = self.pull(reference, manifest, progress)?;
        Ok((remote, module, true))
    }

    /// Pulls the module of a manifest, whatever is known of it, and keeps it.
    ///
    /// # Errors
    /// Like [`pull_module`], and what the store says.
    pub fn pull(
        &self,
        reference: &Reference,
        manifest: &BlobDigest,
        progress: &dyn Progress,
    ) -> Result<(RemoteModule, Module)> {
        let registry = Registry::open(&reference.repository, &self.options)?;
        let mut pulled = pull_module(&registry, manifest, progress)?;
        if let Some(why) = &pulled.unread {
            // Those that were read at another time are as good as ever.
            let kept = self.store.as_ref().and_then(|store| store.remote_module(&pulled.remote.repository, manifest));
            pulled.remote.signatures = kept.map(|kept| kept.signatures).unwrap_or_default();
            let mut unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner);
            unread.insert(*manifest, why.message().to_owned());
        }
        if let Some(store) = &self.store {
            store.put_module(pulled.module.bytes(), progress)?;
            store.put_remote_module(&pulled.remote)?;
        }
        Ok((pulled.remote, pulled.module))
    }

    fn refresh(&self, reference: &Reference, remote: &mut RemoteModule, progress: &dyn Progress) -> Result<()> {
        let registry = Registry::open(&reference.repository, &self.options)?;
        remote.signatures = registry.guarded(progress, || module::signatures(&registry, &remote.manifest, progress))?;
        match &self.store {
            Some(store) => store.put_remote_module(remote),
            None => Ok(()),
        }
    }

    /// Whether a pulled module may run, as a recipe with this reference would
    /// find out.
    ///
    /// # Errors
    /// `module_not_trusted`, saying what to add.
    pub fn judge(&self, reference: &Reference, remote: &RemoteModule) -> Result<Grounds> {
        let unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner).get(&remote.manifest).cloned();
        self.trust()?.judge_module(reference, remote).map_err(|refused| match unread {
            Some(why) => unsigned(refused, &why),
            None => refused,
        })
    }
}

impl Remotes for RemoteModules {
    fn module(&self, reference: &str, folder: &Path) -> Result<Module> {
        Ok(self.resolve(&Reference::parse(reference)?, folder, &*self.progress)?.module)
    }

    fn allow_stored(&self, digest: &ModuleDigest) -> Result<()> {
        self.trust()?.judge_stored(digest).map(drop)
    }
}

/// A refusal where signatures might have said otherwise.
fn unsigned(refused: Error, why: &str) -> Error {
    let message = format!("{} (its signatures could not be read: {why})", refused.message());
    let error = Error::new(refused.code(), message);
    match refused.hint_text() {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

fn not_locked(reference: &Reference, lock: &LockFile) -> Error {
    Error::new(
        Code::ModuleNotFound,
        format!("{} does not say what {reference} is, and --locked forbids to ask", lock.path().display()),
    )
    .hint("run it once without --locked, or `weightmill module update`, and commit the lock file")
}
