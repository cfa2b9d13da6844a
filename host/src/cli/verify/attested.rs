//! What another host says about an entry: `weightmill verify --attestation`.

use std::path::{Path, PathBuf};

use crate::attest::{self, EntryStatement, Envelope, PAYLOAD_TYPE, PublicKey, Untrusted};
use crate::cli::output::{self, Style};
use crate::digest::KeyId;
use crate::error::{Code, Error, Result};

/// The arguments about an attestation.
#[derive(clap::Args)]
pub(super) struct AttestationArgs {
    /// Compare with this statement or DSSE envelope, as `weightmill attest` writes it; without
    /// --entry, the entry that it is about
    #[arg(long, value_name = "FILE", conflicts_with = "all")]
    pub(super) attestation: Option<PathBuf>,
    /// Demand that this ed25519 key (PEM) has signed it; of several, one is enough
    #[arg(long = "trusted-key", value_name = "FILE", requires = "attestation")]
    trusted_keys: Vec<PathBuf>,
    /// The signature of a plain statement's bytes, if it is a file of its own: 64 bytes, or base64
    #[arg(long, value_name = "FILE", requires_all = ["attestation", "trusted_keys"])]
    signature: Option<PathBuf>,
}

/// An attestation that was read, and verified as far as keys are trusted.
pub(super) struct Attested {
    pub(super) statement: EntryStatement,
    /// The trusted keys that signed it.
    signers: Vec<KeyId>,
    /// Whether there is a signature.
    signed: bool,
}

impl AttestationArgs {
    /// Reads the attestation, if one is named.
    ///
    /// # Errors
    /// `attestation_invalid`; `entry_not_trusted` if keys are trusted and none
    /// has signed it.
    pub(super) fn load(&self) -> Result<Option<Attested>> {
        let Some(path) = &self.attestation else { return Ok(None) };
        let keys = self.trusted_keys.iter().map(|path| PublicKey::load(path)).collect::<Result<Vec<_>>>()?;
        let bytes = attest::read_file(path)?;
        let attested = match (Envelope::parse(&bytes), &self.signature) {
            (Ok(envelope), None) => of_envelope(&envelope, &keys),
            (Ok(_), Some(_)) => Err(Error::new(Code::AttestationInvalid, "an envelope carries its signatures itself")
                .hint("--signature is for a plain statement")),
            (Err(_), signature) if is_statement(&bytes) => of_statement(&bytes, signature.as_deref(), &keys),
            (Err(error), _) => Err(error.hint("`weightmill attest` writes statements and envelopes")),
        };
        attested.map(Some).map_err(|e| e.context(path.display()))
    }
}

/// Whether this is meant as a statement, be it a good one or not.
fn is_statement(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(bytes).is_ok_and(|value| value.get("_type").is_some())
}

fn of_envelope(envelope: &Envelope, keys: &[PublicKey]) -> Result<Attested> {
    let (payload, payload_type, signers) = if keys.is_empty() {
        (envelope.unverified_payload(), envelope.unverified_payload_type(), Vec::new())
    } else {
        let verified = attest::verify(envelope, keys).map_err(|why| why.into_error(Code::EntryNotTrusted))?;
        (verified.payload, verified.payload_type, verified.signers)
    };
    if payload_type != PAYLOAD_TYPE {
        let message = format!("expected a payload '{PAYLOAD_TYPE}', found '{}'", payload_type.escape_debug());
        return Err(Error::new(Code::AttestationInvalid, message).hint("`weightmill attest --key` writes an envelope"));
    }
    Ok(Attested { statement: EntryStatement::read(payload)?, signers, signed: true })
}

fn of_statement(bytes: &[u8], signature: Option<&Path>, keys: &[PublicKey]) -> Result<Attested> {
    let not_trusted = |why: Untrusted| Err(why.into_error(Code::EntryNotTrusted));
    let signers: Vec<KeyId> = match (signature, keys) {
        (None, []) => Vec::new(),
        (None, _) => return not_trusted(Untrusted::NotSigned),
        (Some(path), keys) => {
            let signature = attest::read_signature(path)?;
            keys.iter().filter(|key| key.verifies(bytes, &signature)).map(PublicKey::id).collect()
        }
    };
    if signature.is_some() && signers.is_empty() {
        return not_trusted(Untrusted::OtherKeys(Vec::new()));
    }
    Ok(Attested { statement: EntryStatement::read(bytes)?, signers, signed: signature.is_some() })
}

impl Attested {
    /// The member `attestation` of the report.
    pub(super) fn document(&self) -> serde_json::Value {
        let predicate = &self.statement.predicate;
        serde_json::json!({
            "key": predicate.key,
            "content_digest": predicate.content_digest,
            "signature": self.standing(),
            "signed_by": self.signers,
            "modules": predicate.modules,
            "builds": predicate.builds,
        })
    }

    /// `trusted`, `unchecked` or `none`.
    fn standing(&self) -> &'static str {
        match (self.signers.is_empty(), self.signed) {
            (false, _) => "trusted",
            (true, true) => "unchecked",
            (true, false) => "none",
        }
    }

    /// The lines for people.
    pub(super) fn print(&self) {
        let signed = match self.signers.as_slice() {
            [] if self.signed => Style::stdout().red("its signature was not checked: no --trusted-key"),
            [] => "it is not signed".to_string(),
            keys => {
                let keys: Vec<String> = keys.iter().map(KeyId::to_string).collect();
                format!("signed by {}", keys.join(", "))
            }
        };
        output::line(format!("the attestation is true of entry {}; {signed}", self.statement.predicate.key.short()));
        for built in &self.statement.predicate.builds {
            let field = |name: &str| crate::plan::printable(built[name].as_str().unwrap_or("?"));
            output::line(format!(
                "  attested build: {} with {} {} on {} ({})",
                field("program"),
                field("engine"),
                field("engine_version"),
                field("host"),
                field("host_triple")
            ));
        }
    }
}
