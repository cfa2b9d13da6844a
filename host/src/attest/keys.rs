//! Ed25519 keys as PEM files.
//!
//! Private keys are PKCS#8, public ones SubjectPublicKeyInfo: what `openssl
//! genpkey -algorithm ed25519 -out key.pem` and `openssl pkey -in key.pem
//! -pubout -out key.pub` write. A key's id is the SHA-256 of its public half's
//! DER, so `openssl pkey -in key.pem -pubout -outform DER | sha256sum` prints
//! it.

use std::fmt;
use std::path::Path;

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, DecodePublicKey, EncodePublicKey};
use ed25519_dalek::{Signature, Signer};

use crate::digest::KeyId;
use crate::error::{Code, Error, Result};

/// Bytes of a signature.
pub const SIGNATURE_BYTES: usize = 64;

const NEW_KEY: &str = "`openssl genpkey -algorithm ed25519 -out key.pem` writes a key";
const NEW_PUBLIC: &str = "`openssl pkey -in key.pem -pubout -out key.pub` writes the public half of a key";

/// A private key. It is wiped from memory when dropped.
pub struct SigningKey(ed25519_dalek::SigningKey);

/// A public key, of which signatures are accepted.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey(ed25519_dalek::VerifyingKey);

impl SigningKey {
    /// The key in a PEM file.
    ///
    /// # Errors
    /// `attestation_invalid` if it is not an unencrypted ed25519 key in
    /// PKCS#8.
    pub fn load(path: &Path) -> Result<Self> {
        SigningKey::from_pem(&text_of(path)?).map_err(|e| e.context(path.display()))
    }

    /// The key in a PEM text.
    ///
    /// # Errors
    /// Like [`SigningKey::load`].
    pub fn from_pem(pem: &str) -> Result<Self> {
        let refuse = |what: &str| {
            Err(Error::new(
                Code::AttestationInvalid,
                format!("expected an ed25519 private key (PKCS#8 PEM), found {what}"),
            )
            .hint(NEW_KEY))
        };
        match label(pem) {
            Some("PRIVATE KEY") => {}
            Some("ENCRYPTED PRIVATE KEY") => {
                return refuse("an encrypted one").map_err(|e| {
                    e.hint("`openssl pkey -in encrypted.pem -out key.pem` decrypts it; keep the result out of reach")
                });
            }
            Some(other) => return refuse(&format!("a PEM of '{}'", printable(other))),
            None => return refuse("no PEM"),
        }
        match ed25519_dalek::SigningKey::from_pkcs8_pem(pem.trim_ascii_start()) {
            Ok(key) => Ok(SigningKey(key)),
            Err(e) => refuse(&format!("another kind of key, or a damaged one ({e})")),
        }
    }

    /// The key with a secret of 32 bytes, as RFC 8032 has it.
    pub fn from_secret(secret: &[u8; 32]) -> Self {
        SigningKey(ed25519_dalek::SigningKey::from_bytes(secret))
    }

    /// The public half.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }

    /// Signs bytes as they are (RFC 8032, no prehash). Use
    /// [`sign`](super::sign) for an envelope.
    pub fn sign(&self, message: &[u8]) -> [u8; SIGNATURE_BYTES] {
        self.0.sign(message).to_bytes()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public().id())
    }
}

impl PublicKey {
    /// The key in a PEM file.
    ///
    /// # Errors
    /// `attestation_invalid` if it is not an ed25519 public key, or a weak one.
    pub fn load(path: &Path) -> Result<Self> {
        PublicKey::from_pem(&text_of(path)?).map_err(|e| e.context(path.display()))
    }

    /// The key in a PEM text.
    ///
    /// # Errors
    /// Like [`PublicKey::load`].
    pub fn from_pem(pem: &str) -> Result<Self> {
        let refuse = |what: &str| {
            Err(Error::new(Code::AttestationInvalid, format!("expected an ed25519 public key (PEM), found {what}"))
                .hint(NEW_PUBLIC))
        };
        match label(pem) {
            Some("PUBLIC KEY") => {}
            Some(other) => return refuse(&format!("a PEM of '{}'", printable(other))),
            None => return refuse("no PEM"),
        }
        match ed25519_dalek::VerifyingKey::from_public_key_pem(pem.trim_ascii_start()) {
            Ok(key) if key.is_weak() => refuse("a weak key, under which anything can be signed"),
            Ok(key) => Ok(PublicKey(key)),
            Err(e) => refuse(&format!("another kind of key, or a damaged one ({e})")),
        }
    }

    /// The PEM text.
    ///
    /// # Errors
    /// None that is known: an ed25519 key always has this form.
    pub fn to_pem(&self) -> Result<String> {
        self.0.to_public_key_pem(LineEnding::LF).map_err(|e| Error::io("writing a public key", e))
    }

    /// SHA-256 of the key's DER.
    pub fn id(&self) -> KeyId {
        /// SubjectPublicKeyInfo of an ed25519 key, up to the key's 32 bytes
        /// (RFC 8410, section 4).
        const PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
        KeyId::of(&[PREFIX.as_slice(), self.0.as_bytes()].concat())
    }

    /// Whether `signature` is this key's over `message`. Checked strictly: of
    /// two verifiers never only one accepts.
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        Signature::from_slice(signature).is_ok_and(|signature| self.0.verify_strict(message, &signature).is_ok())
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.id())
    }
}

fn text_of(path: &Path) -> Result<String> {
    String::from_utf8(super::read_file(path)?)
        .map_err(|_| Error::new(Code::AttestationInvalid, format!("{} is no PEM file", path.display())).hint(NEW_KEY))
}

/// What the first line of a PEM says that it is.
fn label(pem: &str) -> Option<&str> {
    pem.trim_ascii_start().lines().next()?.trim_ascii_end().strip_prefix("-----BEGIN ")?.strip_suffix("-----")
}

fn printable(text: &str) -> String {
    text.chars().take(40).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 8410, section 10.3 and 10.1.
    const PRIVATE: &str = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";

    #[test]
    fn the_examples_of_the_standard_are_read() {
        let key = SigningKey::from_pem(PRIVATE).unwrap();
        let public = PublicKey::from_pem(&format!("\n{PUBLIC}")).unwrap();
        assert_eq!(key.public(), public);
        assert_eq!(public.to_pem().unwrap(), PUBLIC);
        let signature = key.sign(b"hello");
        assert!(public.verifies(b"hello", &signature));
        assert!(!public.verifies(b"hellO", &signature));
        assert!(!public.verifies(b"hello", &signature[..63]));
    }

    #[test]
    fn the_id_is_the_hash_of_the_der() {
        let public = PublicKey::from_pem(PUBLIC).unwrap();
        let der = public.0.to_public_key_der().unwrap();
        assert_eq!(public.id(), KeyId::of(der.as_bytes()));
    }

    #[test]
    fn other_files_are_refused_and_named() {
        let private = |pem: &str| SigningKey::from_pem(pem).unwrap_err();
        let public = |pem: &str| PublicKey::from_pem(pem).unwrap_err();
        for (error, part) in [
            (private(PUBLIC), "PUBLIC KEY"),
            (public(PRIVATE), "PRIVATE KEY"),
            (private(""), "no PEM"),
            (private("-----BEGIN ENCRYPTED PRIVATE KEY-----\n"), "encrypted"),
            (private(&PRIVATE.replace("MC4C", "MC4D")), "damaged"),
            // A P-256 key.
            (
                public(
                    "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEEVs/o5+uQbTjL3chynL4wXgUg2R9\nq9UU8I5mEovUf86QZ7kOBIjJwqnzD1omageEHWwHdBO6B+dFabmdT9POxg==\n-----END PUBLIC KEY-----\n",
                ),
                "another kind",
            ),
            // The neutral element.
            (
                public(
                    "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAAQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n-----END PUBLIC KEY-----\n",
                ),
                "weak",
            ),
        ] {
            assert_eq!(error.code(), Code::AttestationInvalid);
            assert!(error.message().contains(part), "{error}");
        }
    }
}
