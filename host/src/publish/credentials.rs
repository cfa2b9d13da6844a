//! Credentials as people have them.
//!
//! Looked for in this order: docker's `config.json` (in `$DOCKER_CONFIG` or
//! `~/.docker`) with its credential helpers, then podman's `auth.json` (in
//! `$REGISTRY_AUTH_FILE` or `$XDG_RUNTIME_DIR/containers`). None is anonymous.
//! A helper is another program, so it is waited for only so long.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use docker_credential::{CredentialRetrievalError, DockerCredential};

use super::reference::Repository;
use crate::error::{Code, Error, Result};
use crate::plan::printable;

/// The longest wait for a credential helper.
const HELPER_TIMEOUT: Duration = Duration::from_secs(60);

/// How a registry is told who asks.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// Not at all.
    Anonymous,
    /// By name and password.
    Basic {
        /// Name.
        user: String,
        /// Password, or a token in its place.
        password: String,
    },
    /// By a token that is exchanged for short-lived ones.
    Identity(String),
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Credentials::Anonymous => "anonymous",
            Credentials::Basic { .. } => "basic",
            Credentials::Identity(_) => "identity token",
        })
    }
}

impl Credentials {
    /// The credentials that this user has for a repository's registry.
    ///
    /// # Errors
    /// `registry_refused` if there are some and they cannot be had: a helper
    /// that fails, a file that is malformed.
    pub fn find(repository: &Repository) -> Result<Self> {
        let name = repository.credential_name().to_owned();
        let (send, receive) = mpsc::channel();
        // The thread is left behind if a helper hangs; the command ends soon.
        std::thread::spawn(move || {
            let _ = send.send(look_up(&name));
        });
        match receive.recv_timeout(HELPER_TIMEOUT) {
            Ok(found) => found.map_err(|what| {
                Error::new(
                    Code::RegistryRefused,
                    format!("the credentials for {} cannot be had: {what}", repository.registry),
                )
                .hint("look at ~/.docker/config.json, run the credential helper that it names by hand, or log in again")
            }),
            Err(_) => Err(Error::new(
                Code::RegistryTimeout,
                format!(
                    "the credential helper for {} gave nothing within {} s",
                    repository.registry,
                    HELPER_TIMEOUT.as_secs()
                ),
            )
            .hint("run the docker-credential helper by hand to see what it waits for")),
        }
    }
}

fn look_up(name: &str) -> Result<Credentials, String> {
    for find in [docker_credential::get_credential, docker_credential::get_podman_credential] {
        match find(name) {
            Ok(DockerCredential::IdentityToken(token)) => return Ok(Credentials::Identity(token)),
            Ok(DockerCredential::UsernamePassword(user, password)) => {
                return Ok(Credentials::Basic { user, password });
            }
            Err(CredentialRetrievalError::ConfigReadError) if malformed().is_some() => {
                let file = malformed().unwrap_or_default();
                return Err(format!("{} is no JSON document", file.display()));
            }
            Err(e) if absent(&e) => {}
            Err(e) => return Err(shown(&e)),
        }
    }
    Ok(Credentials::Anonymous)
}

/// Docker's configuration, if it is there and cannot be parsed: the crate
/// tells that no differently from a missing one.
fn malformed() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("DOCKER_CONFIG").or_else(|| variable("HOME").map(|home| home.join(".docker")))?;
    let file = folder.join("config.json");
    let text = std::fs::read(&file).ok()?;
    serde_json::from_slice::<serde_json::Value>(&text).is_err().then_some(file)
}

/// What can be said of an error. What a helper wrote may hold the secret.
fn shown(error: &CredentialRetrievalError) -> String {
    match error {
        CredentialRetrievalError::HelperFailure { helper, .. } => format!(
            "the credential helper '{}' failed (its exit status is not 0); what it wrote is not shown, since it may hold a secret",
            printable(helper)
        ),
        CredentialRetrievalError::HelperCommunicationError => {
            "the credential helper that is named there cannot be run, or ended too soon".into()
        }
        CredentialRetrievalError::MalformedHelperResponse => {
            "the credential helper that is named there gave no credentials that can be read".into()
        }
        CredentialRetrievalError::CredentialDecodingError => "an 'auth' there is no base64 of name:password".into(),
        CredentialRetrievalError::CredentialMismatchError => {
            "an 'auth' there is not of the name and password beside it".into()
        }
        CredentialRetrievalError::NoCredentialConfigured
        | CredentialRetrievalError::ConfigNotFound
        | CredentialRetrievalError::ConfigReadError => "there are none".into(),
    }
}

/// Whether there simply are no credentials. That a helper knows none for a
/// registry is said in words only, the same ones by all helpers.
fn absent(error: &CredentialRetrievalError) -> bool {
    match error {
        CredentialRetrievalError::NoCredentialConfigured
        | CredentialRetrievalError::ConfigNotFound
        | CredentialRetrievalError::ConfigReadError => true,
        CredentialRetrievalError::HelperFailure { stdout, stderr, .. } => {
            [stdout, stderr].iter().any(|text| text.contains("credentials not found"))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_helper_wrote_is_not_shown() {
        let failure = |stdout: &str, stderr: &str| CredentialRetrievalError::HelperFailure {
            helper: "docker-credential-x".into(),
            stdout: stdout.into(),
            stderr: stderr.into(),
        };
        let failed = failure("{\"Secret\":\"hunter2\"}", "hunter2 is locked");
        assert!(!absent(&failed));
        let text = shown(&failed);
        assert!(text.contains("'docker-credential-x'") && !text.contains("hunter2"), "{text}");
        assert!(absent(&failure("credentials not found in native keychain", "")));
    }
}
