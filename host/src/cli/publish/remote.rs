//! `weightmill build --remote`: the registry is asked before anything is made.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::push::{Along, push, source_of};
use super::{pull_document, repository, sign};
use crate::attest::SigningKey;
use crate::cli::args::{DemandArgs, RegistryArgs};
use crate::cli::output::Style;
use crate::cli::session::Session;
use crate::digest::{ActionKey, ContentDigest};
use crate::error::{Code, Error, Result};
use crate::execute::build::{Built, Entry, Outcome, RemoteEntries};
use crate::progress::Progress;
use crate::publish::client::Registry;
use crate::publish::entry::{Demand, pull_entry};
use crate::publish::reference::Repository;
use crate::publish::source::SourceName;
use crate::store::Store;

/// Where a build may find its entry, and put it.
#[derive(clap::Args)]
pub(in crate::cli) struct BuildRemoteArgs {
    /// Ask this repository for the entry before building it: oci://registry/repository
    #[arg(long, value_name = "REPOSITORY", value_parser = repository, help_heading = "Registries")]
    remote: Option<Repository>,
    /// Push the entry to --remote, unless it came from there. Implies --check-source
    #[arg(long, requires = "remote", help_heading = "Registries")]
    pub(in crate::cli) push: bool,
    /// Sign what is pushed with this ed25519 key (PKCS#8 PEM)
    #[arg(long, value_name = "FILE", requires = "push", help_heading = "Registries")]
    sign: Option<PathBuf>,
    /// The checkpoint's name, for nodes without it: NAME@COMMIT [default: what a hub's cache folder says]
    #[arg(long, value_name = "NAME@COMMIT", requires = "push", value_parser = SourceName::parse, help_heading = "Registries")]
    source: Option<SourceName>,
    #[command(flatten)]
    demand: DemandArgs,
}

/// The repository that a build asks and pushes to.
pub(in crate::cli) struct Remote<'a> {
    args: &'a BuildRemoteArgs,
    repository: &'a Repository,
    registry: &'a RegistryArgs,
    demand: Demand,
    key: Option<SigningKey>,
    pool: &'a rayon::ThreadPool,
    progress: &'a dyn Progress,
    report: Mutex<serde_json::Value>,
}

impl<'a> Remote<'a> {
    /// `None` if no repository is named.
    pub(in crate::cli) fn new(
        args: &'a BuildRemoteArgs,
        registry: &'a RegistryArgs,
        session: &Session,
        pool: &'a rayon::ThreadPool,
        progress: &'a dyn Progress,
    ) -> Result<Option<Self>> {
        let Some(repository) = &args.remote else { return Ok(None) };
        let mut demand = args.demand.demand()?;
        demand.labels = session.labels();
        Ok(Some(Remote {
            args,
            repository,
            registry,
            demand,
            key: sign::key(args.sign.as_deref())?,
            pool,
            progress,
            report: Mutex::new(serde_json::Value::Null),
        }))
    }

    fn note(&self, report: serde_json::Value) {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }

    /// What came of asking.
    pub(in crate::cli) fn report(&self) -> serde_json::Value {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Checks that the result has the content that the user asked for.
    pub(in crate::cli) fn check(&self, content: &ContentDigest) -> Result<()> {
        match self.demand.content {
            Some(wanted) if wanted != *content => Err(Error::new(
                Code::IdentityCollision,
                format!("the result has the content {content}, --content says {wanted}"),
            )
            .hint("one of the two builds was wrong, or the checkpoint or the recipe is another one")),
            _ => Ok(()),
        }
    }

    /// Pushes what was built, if that is wanted.
    pub(in crate::cli) fn push(
        &self,
        session: &Session,
        store: Option<&Store>,
        built: &Built,
    ) -> Result<Option<serde_json::Value>> {
        if !self.args.push || matches!(built.outcome, Outcome::Pulled) {
            return Ok(None);
        }
        let (Some(store), Entry::Stored(lease)) = (store, &built.entry) else {
            return Err(Error::new(Code::IoError, "nothing was pushed: the result is in memory only")
                .hint("--mode required says what is wrong with the store"));
        };
        // What is pushed, and signed, is what was built here.
        let builders = store.provenance(&lease.document().key)?;
        if !builders.is_empty() && builders.iter().all(|builder| builder["pulled_from"].is_string()) {
            eprintln!("not pushed: the entry was not built here, it came from elsewhere before");
            return Ok(None);
        }
        // Without a name of the source there is nothing to be found by.
        let source = match (&self.args.source, source_of(session, None)) {
            (Some(source), _) => Some(source.clone()),
            (None, found) => found.ok(),
        };
        let reference = match source {
            Some(source) => Some((session.sought(source)?, session)),
            None => None,
        };
        let along = Along { reference, key: self.key.as_ref(), attestations: Vec::new(), mount_from: None };
        push(self.repository, self.registry, store, lease, &along, self.progress).map(|(_, document)| Some(document))
    }

    fn failed(&self, error: &Error) {
        let refused = matches!(error.code(), Code::EntryNotTrusted | Code::DigestMismatch);
        self.note(serde_json::json!({
            "repository": self.repository.to_string(),
            "outcome": if refused { "refused" } else { "failed" },
            "code": error.code().as_str(),
            "message": error.message(),
            "hint": error.hint_text(),
        }));
        let style = Style::stderr();
        eprintln!("{}{} [{}]", style.red("the registry's entry is not used: "), error.message(), error.code());
        if let Some(hint) = error.hint_text() {
            eprintln!("{}{hint}", style.green(" hint: "));
        }
    }
}

impl RemoteEntries for Remote<'_> {
    fn fetch(&self, store: &Store, key: &ActionKey) -> Result<bool> {
        let pulled = Registry::open(self.repository, &self.registry.options())
            .and_then(|registry| pull_entry(store, &registry, key, &self.demand, self.pool, self.progress));
        match pulled {
            Ok(Some(pulled)) => {
                self.note(pull_document(self.repository, &pulled));
                Ok(true)
            }
            Ok(None) => {
                self.note(serde_json::json!({ "repository": self.repository.to_string(), "outcome": "absent" }));
                Ok(false)
            }
            Err(error) => {
                // The checkpoint is here, so the entry can be made all the same.
                let elsewhere = [
                    Code::NetworkError,
                    Code::RegistryRefused,
                    Code::RegistryTimeout,
                    Code::DigestMismatch,
                    Code::EntryNotTrusted,
                    Code::CorruptBlob,
                ];
                if !elsewhere.contains(&error.code()) {
                    return Err(error);
                }
                self.failed(&error);
                Ok(false)
            }
        }
    }
}
