//! DSSE: a payload with its type and signatures, as one JSON document.
//!
//! What is signed is not the payload but its *pre-authentication encoding*
//! ([`pae`]), which the type is part of: a signature cannot be carried over to
//! a payload of another type. A key id in an envelope is a hint that anybody
//! can write; only keys that the caller trusts verify anything.

use std::fmt;

use base64ct::{Base64, Base64Unpadded, Base64Url, Base64UrlUnpadded, Encoding};
use serde::{Deserialize, Serialize};

use super::keys::{PublicKey, SigningKey};
use crate::digest::KeyId;
use crate::error::{Code, Error, Result};

/// The payload type of in-toto statements.
pub const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

/// The most signatures that an envelope may have.
const SIGNATURES: usize = 64;

/// A signed payload. That it could be read says nothing about its signatures:
/// [`verify`] does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    payload_type: String,
    payload: Vec<u8>,
    signatures: Vec<Signed>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Signed {
    /// A hint, as it stands in the document.
    keyid: Option<String>,
    signature: Vec<u8>,
}

/// A payload that trusted keys have signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified<'a> {
    /// Its type.
    pub payload_type: &'a str,
    /// The bytes that were signed.
    pub payload: &'a [u8],
    /// The trusted keys that signed it, each once, in the order in which they
    /// were given; at least one.
    pub signers: Vec<KeyId>,
}

/// Why no trusted key vouches for an envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Untrusted {
    /// No key is trusted.
    NoTrustedKey,
    /// The envelope has no signature.
    NotSigned,
    /// It is signed, but not by a trusted key. The ids are what the envelope
    /// says, and only a hint.
    OtherKeys(Vec<String>),
    /// A signature names a trusted key and is not that key's: the payload or
    /// the signature was changed.
    BadSignature(KeyId),
}

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Untrusted::NoTrustedKey => f.write_str("no key is trusted"),
            Untrusted::NotSigned => f.write_str("it is not signed"),
            Untrusted::OtherKeys(ids) if ids.is_empty() => f.write_str("no trusted key signed it"),
            Untrusted::OtherKeys(ids) => write!(f, "no trusted key signed it, but {}", ids.join(", ")),
            Untrusted::BadSignature(id) => {
                write!(f, "the signature of the key {id} does not fit: the payload or the signature was changed")
            }
        }
    }
}

impl Untrusted {
    /// As an error of `code`, usually `entry_not_trusted` or
    /// `module_not_trusted`.
    pub fn into_error(self, code: Code) -> Error {
        let hint = match self {
            Untrusted::NoTrustedKey => "name the public key of whoever signs, as a PEM file",
            Untrusted::NotSigned => "ask for a signed one",
            Untrusted::OtherKeys(_) => "check that the trusted key is that of whoever should have signed it",
            Untrusted::BadSignature(_) => "fetch it again; if this comes back, somebody has changed it",
        };
        Error::new(code, self.to_string()).hint(hint)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    payload_type: String,
    payload: String,
    signatures: Vec<SignatureDocument>,
}

#[derive(Serialize, Deserialize)]
struct SignatureDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    keyid: Option<String>,
    sig: String,
}

/// Signs `payload` as being of `payload_type`.
pub fn sign(payload_type: &str, payload: &[u8], key: &SigningKey) -> Envelope {
    let mut envelope =
        Envelope { payload_type: payload_type.to_string(), payload: payload.to_vec(), signatures: Vec::new() };
    envelope.add_signature(key);
    envelope
}

/// Checks that at least one of the `trusted` keys has signed an envelope, and
/// gives its payload.
///
/// # Errors
/// Why none has; [`Untrusted::into_error`] makes an [`Error`] of it.
pub fn verify<'a>(envelope: &'a Envelope, trusted: &[PublicKey]) -> Result<Verified<'a>, Untrusted> {
    if trusted.is_empty() {
        return Err(Untrusted::NoTrustedKey);
    }
    if envelope.signatures.is_empty() {
        return Err(Untrusted::NotSigned);
    }
    let message = pae(&envelope.payload_type, &envelope.payload);
    let mut signers: Vec<KeyId> = Vec::new();
    for key in trusted {
        let id = key.id();
        if !signers.contains(&id) && envelope.signatures.iter().any(|s| key.verifies(&message, &s.signature)) {
            signers.push(id);
        }
    }
    if !signers.is_empty() {
        return Ok(Verified { payload_type: &envelope.payload_type, payload: &envelope.payload, signers });
    }
    let named = |id: KeyId| envelope.signatures.iter().any(|s| s.keyid.as_deref() == Some(&id.to_string()));
    match trusted.iter().map(PublicKey::id).find(|id| named(*id)) {
        Some(id) => Err(Untrusted::BadSignature(id)),
        None => Err(Untrusted::OtherKeys(envelope.key_hints())),
    }
}

/// The bytes that a signature is over: `DSSEv1 SP length SP type SP length SP
/// payload`, lengths in decimal.
pub fn pae(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut message = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    message.extend_from_slice(payload);
    message
}

impl Envelope {
    /// The envelope in a JSON document, or in a Sigstore bundle.
    ///
    /// # Errors
    /// `attestation_invalid`.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Bundle {
            dsse_envelope: Document,
        }
        let bad = |what: String| {
            Error::new(Code::AttestationInvalid, format!("this is no DSSE envelope: {what}"))
                .hint("`weightmill attest --key` writes one")
        };
        let document = match serde_json::from_slice::<Bundle>(bytes) {
            Ok(bundle) => bundle.dsse_envelope,
            Err(_) => serde_json::from_slice::<Document>(bytes).map_err(|e| bad(e.to_string()))?,
        };
        if document.signatures.len() > SIGNATURES {
            return Err(bad(format!("it has {} signatures, more than {SIGNATURES}", document.signatures.len())));
        }
        let payload = decode(&document.payload).ok_or_else(|| bad("its payload is not base64".into()))?;
        let signatures = document.signatures.into_iter().map(|s| {
            let signature = decode(&s.sig).ok_or_else(|| bad("a signature is not base64".into()))?;
            Ok(Signed { keyid: s.keyid.filter(|id| !id.is_empty()), signature })
        });
        Ok(Envelope { payload_type: document.payload_type, payload, signatures: signatures.collect::<Result<_>>()? })
    }

    /// The JSON document, on one line.
    ///
    /// # Errors
    /// None that is known.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        let signatures = self.signatures.iter();
        let document = Document {
            payload_type: self.payload_type.clone(),
            payload: Base64::encode_string(&self.payload),
            signatures: signatures
                .map(|s| SignatureDocument { keyid: s.keyid.clone(), sig: Base64::encode_string(&s.signature) })
                .collect(),
        };
        let mut bytes = serde_json::to_vec(&document).map_err(|e| Error::io("writing an envelope", e))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Adds the signature of another key.
    pub fn add_signature(&mut self, key: &SigningKey) {
        let signature = key.sign(&pae(&self.payload_type, &self.payload)).to_vec();
        self.signatures.push(Signed { keyid: Some(key.public().id().to_string()), signature });
    }

    /// The payload's type. **Nothing has been verified.**
    pub fn unverified_payload_type(&self) -> &str {
        &self.payload_type
    }

    /// The payload. **Nothing has been verified.**
    pub fn unverified_payload(&self) -> &[u8] {
        &self.payload
    }

    /// The key ids that the envelope names, printable. They are hints.
    pub fn key_hints(&self) -> Vec<String> {
        let shown = |id: &String| id.chars().take(80).flat_map(char::escape_debug).collect();
        self.signatures.iter().filter_map(|s| s.keyid.as_ref()).map(shown).collect()
    }
}

/// Base64 in any of its usual forms, as DSSE wants it read.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let forms = [Base64::decode_vec, Base64Url::decode_vec, Base64Unpadded::decode_vec, Base64UrlUnpadded::decode_vec];
    forms.iter().find_map(|decode| decode(text).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_secret(&[seed; 32])
    }

    #[test]
    fn the_encoding_is_that_of_the_protocol() {
        // The protocol's own example.
        assert_eq!(
            pae("http://example.com/HelloWorld", b"hello world"),
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        );
    }

    #[test]
    fn what_is_signed_verifies_after_a_round_trip() {
        let mut envelope = sign(PAYLOAD_TYPE, b"{\"a\":1}", &key(1));
        envelope.add_signature(&key(2));
        let read = Envelope::parse(&envelope.to_json().unwrap()).unwrap();
        assert_eq!(read, envelope);
        let trusted = [key(3).public(), key(2).public(), key(1).public(), key(2).public()];
        let verified = verify(&read, &trusted).unwrap();
        assert_eq!((verified.payload, verified.payload_type), (b"{\"a\":1}".as_slice(), PAYLOAD_TYPE));
        assert_eq!(verified.signers, [key(2).public().id(), key(1).public().id()]);
    }

    #[test]
    fn any_change_is_found() {
        let envelope = sign(PAYLOAD_TYPE, b"payload", &key(1));
        let trusted = [key(1).public()];
        let bad = Err(Untrusted::BadSignature(key(1).public().id()));
        for i in 0..7 {
            let mut changed = envelope.clone();
            changed.payload[i] ^= 1;
            assert_eq!(verify(&changed, &trusted), bad, "payload byte {i}");
        }
        for i in 0..64 {
            let mut changed = envelope.clone();
            changed.signatures[0].signature[i] ^= 1;
            assert_eq!(verify(&changed, &trusted), bad, "signature byte {i}");
        }
        let mut changed = envelope.clone();
        changed.payload_type.push('x');
        assert_eq!(verify(&changed, &trusted), bad, "the type is signed too");
        let mut changed = envelope.clone();
        changed.signatures[0].signature.pop();
        assert_eq!(verify(&changed, &trusted), bad);
    }

    #[test]
    fn only_trusted_keys_count_and_hints_do_not() {
        let envelope = sign(PAYLOAD_TYPE, b"payload", &key(1));
        let id = |seed| key(seed).public().id().to_string();
        assert_eq!(verify(&envelope, &[]), Err(Untrusted::NoTrustedKey));
        assert_eq!(verify(&envelope, &[key(2).public()]), Err(Untrusted::OtherKeys(vec![id(1)])));
        // A wrong hint neither helps nor hurts.
        let mut hinted = envelope.clone();
        hinted.signatures[0].keyid = Some(id(2));
        assert!(verify(&hinted, &[key(1).public()]).is_ok());
        assert_eq!(verify(&hinted, &[key(2).public()]), Err(Untrusted::BadSignature(key(2).public().id())));
        hinted.signatures[0].keyid = None;
        assert!(verify(&hinted, &[key(1).public()]).is_ok());
        hinted.signatures.clear();
        assert_eq!(verify(&hinted, &[key(1).public()]), Err(Untrusted::NotSigned));
        let error = Untrusted::NotSigned.into_error(Code::ModuleNotTrusted);
        assert_eq!(error.code(), Code::ModuleNotTrusted);
    }

    #[test]
    fn other_spellings_are_read_and_other_documents_refused() {
        let envelope = sign("t", &[0xfb, 0xff, 0xfe, 0xff], &key(1));
        let json = String::from_utf8(envelope.to_json().unwrap()).unwrap();
        assert!(json.contains("+//+/w=="), "{json}");
        for spelling in ["-__-_w==", "-__-_w", "+//+/w"] {
            let other = json.replace("+//+/w==", spelling);
            assert_eq!(Envelope::parse(other.as_bytes()).unwrap().payload, envelope.payload, "{spelling}");
        }
        let bundle =
            format!("{{\"mediaType\":\"application/vnd.dev.sigstore.bundle.v0.3+json\",\"dsseEnvelope\":{json}}}");
        assert_eq!(Envelope::parse(bundle.as_bytes()).unwrap(), envelope);
        let many = format!(
            "{{\"payloadType\":\"t\",\"payload\":\"\",\"signatures\":[{}]}}",
            vec!["{\"sig\":\"\"}"; 65].join(",")
        );
        for bad in ["", "{}", "[]", &json.replace("+//", "***"), &many] {
            assert_eq!(Envelope::parse(bad.as_bytes()).unwrap_err().code(), Code::AttestationInvalid, "{bad}");
        }
    }
}
