//! Who asks: nobody, a name and password, or a token.
//!
//! A registry that wants to know answers 401 with a challenge. `Basic` is
//! answered with the user's credentials. `Bearer` names a realm that gives
//! tokens for a scope: it is asked with the credentials, if there are any, and
//! the token is used until the registry does not take it any more.
//!
//! Credentials are read when the first challenge comes, so an anonymous pull
//! runs no helper. They go to the registry and to the realm that it names, over
//! TLS unless the registry itself is asked in plain HTTP.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64ct::{Base64, Encoding};
use serde::Deserialize;
use ureq::Agent;
use ureq::http::{Request, header};

use super::exchange::{Answer, Failure, from_transport};
use crate::error::{Code, Error, Result};
use crate::plan::printable;
use crate::publish::credentials::Credentials;
use crate::publish::reference::Repository;

/// The longest token document.
const TOKEN_LIMIT_BYTES: u64 = 1 << 20;

/// What a request needs the right to do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    /// Read.
    Pull,
    /// Read and write.
    Push,
    /// Write, and read in another repository of the registry.
    Mount(String),
}

/// The authorisation for one repository.
pub(super) struct Auth {
    repository: Repository,
    plain: bool,
    timeout: Duration,
    credentials: Mutex<Option<Credentials>>,
    /// `Authorization` values that were taken.
    known: Mutex<BTreeMap<Scope, String>>,
}

/// A challenge's scheme and parameters.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    scheme: String,
    parameters: BTreeMap<String, String>,
}

impl Auth {
    pub(super) fn new(repository: &Repository, plain: bool, timeout: Duration) -> Self {
        Auth { repository: repository.clone(), plain, timeout, credentials: Mutex::default(), known: Mutex::default() }
    }

    /// The value that was last taken for a scope.
    pub(super) fn known(&self, scope: &Scope) -> Option<String> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(scope).cloned()
    }

    /// Answers the challenges of a 401; `None` if there is nothing to answer
    /// with. `again` says that a value was known and was not taken.
    pub(super) fn answer(
        &self,
        challenges: &[String],
        scope: &Scope,
        agent: &Agent,
        again: bool,
    ) -> Result<Option<String>, Failure> {
        let challenges: Vec<Challenge> = challenges.iter().flat_map(|text| parse(text)).collect();
        let find = |scheme: &str| challenges.iter().find(|c| c.scheme.eq_ignore_ascii_case(scheme));
        let value = if let Some(challenge) = find("bearer") {
            Some(format!("Bearer {}", self.token(challenge, scope, agent)?))
        } else if find("basic").is_some() && !again {
            match self.credentials()? {
                Credentials::Basic { user, password } => Some(basic(&user, &password)),
                _ => None,
            }
        } else {
            None
        };
        if let Some(value) = &value {
            self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(scope.clone(), value.clone());
        }
        Ok(value)
    }

    fn credentials(&self) -> Result<Credentials> {
        let mut known = self.credentials.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            Some(credentials) => Ok(credentials.clone()),
            None => Ok(known.insert(Credentials::find(&self.repository)?).clone()),
        }
    }

    fn token(&self, challenge: &Challenge, scope: &Scope, agent: &Agent) -> Result<String, Failure> {
        let refuse = |what: String| {
            Failure::from(
                Error::new(Code::RegistryRefused, format!("{} {what}", self.repository))
                    .hint(format!("log in with `docker login {}`", self.repository.registry)),
            )
        };
        let Some(realm) = challenge.parameters.get("realm") else {
            return Err(refuse("asks for a token and does not say where one is to be had".into()));
        };
        if !(realm.starts_with("https://") || self.plain && realm.starts_with("http://")) {
            return Err(refuse(format!("asks for a token from '{}', which is not https", printable(realm))));
        }
        let mut scopes: Vec<String> = match challenge.parameters.get("scope") {
            Some(wanted) => wanted.split(' ').map(str::to_owned).collect(),
            None => vec![self.default_scope(scope)],
        };
        if let Scope::Mount(from) = scope {
            scopes.push(format!("repository:{from}:pull"));
        }
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        if let Some(service) = challenge.parameters.get("service") {
            pairs.push(("service", service));
        }
        let sent = match self.credentials()? {
            Credentials::Identity(token) => {
                let joined = scopes.join(" ");
                pairs.extend([
                    ("grant_type", "refresh_token"),
                    ("refresh_token", token.as_str()),
                    ("client_id", "weightmill"),
                    ("scope", joined.as_str()),
                ]);
                agent.post(realm).send_form(pairs)
            }
            credentials => {
                pairs.extend(scopes.iter().map(|scope| ("scope", scope.as_str())));
                let request =
                    pairs.iter().fold(agent.get(realm), |request, (name, value)| request.query(*name, *value));
                match credentials {
                    Credentials::Basic { user, password } => {
                        request.header(header::AUTHORIZATION, basic(&user, &password)).call()
                    }
                    _ => request.call(),
                }
            }
        };
        let sent = sent.map_err(|e| from_transport(e, &format!("asking {realm} for a token")))?;
        let answer = Answer::of(sent, self.timeout);
        if answer.status != 200 {
            let refused = refuse(format!("is not for this account: {realm} answered {}", answer.status));
            return Err(Failure { status: Some(answer.status), ..refused });
        }
        #[derive(Deserialize)]
        struct Token {
            token: Option<String>,
            access_token: Option<String>,
        }
        let text = answer.whole(TOKEN_LIMIT_BYTES, &format!("the token of {realm}"))?;
        let token: Option<Token> = serde_json::from_slice(&text).ok();
        let token = token.and_then(|token| token.token.or(token.access_token)).filter(|token| is_token(token));
        token.ok_or_else(|| refuse(format!("is not answered for: {realm} gave no token")))
    }

    fn default_scope(&self, scope: &Scope) -> String {
        let actions = if *scope == Scope::Pull { "pull" } else { "pull,push" };
        format!("repository:{}:{actions}", self.repository.api_name())
    }
}

fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", Base64::encode_string(format!("{user}:{password}").as_bytes()))
}

/// Whether a text can stand in a header.
fn is_token(text: &str) -> bool {
    !text.is_empty() && Request::builder().header(header::AUTHORIZATION, text).body(()).is_ok()
}

/// The challenges of one header: `Bearer realm="…",service="…", Basic realm="…"`.
fn parse(text: &str) -> Vec<Challenge> {
    let mut found: Vec<Challenge> = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c == ',' || c.is_whitespace()).unwrap_or(rest.len());
        let word = &rest[..end];
        rest = rest[end..].trim_start();
        if let Some(value) = rest.strip_prefix('=') {
            let (value, after) = parameter(value.trim_start());
            if let Some(challenge) = found.last_mut() {
                challenge.parameters.insert(word.to_ascii_lowercase(), value);
            }
            rest = after;
        } else if !word.is_empty() {
            found.push(Challenge { scheme: word.to_owned(), parameters: BTreeMap::new() });
        }
        rest = rest.trim_start_matches(|c: char| c == ',' || c.is_whitespace());
    }
    found
}

/// A parameter's value, quoted or not, and what comes after it.
fn parameter(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(|c: char| c == ',' || c.is_whitespace()).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut escaped = false;
    for (at, c) in quoted.char_indices() {
        match c {
            _ if escaped => {
                value.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => return (value, &quoted[at + 1..]),
            _ => value.push(c),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn challenge(scheme: &str, parameters: &[(&str, &str)]) -> Challenge {
        let parameters = parameters.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Challenge { scheme: scheme.into(), parameters }
    }

    #[test]
    fn challenges_are_read() {
        assert_eq!(
            parse(r#"Bearer realm="https://a/token",service="r.io",scope="repository:a/b:pull,push""#),
            [challenge(
                "Bearer",
                &[("realm", "https://a/token"), ("service", "r.io"), ("scope", "repository:a/b:pull,push")]
            )]
        );
        assert_eq!(
            parse(r#"Basic realm="x \" y" , Bearer realm=z"#),
            [challenge("Basic", &[("realm", "x \" y")]), challenge("Bearer", &[("realm", "z")])]
        );
        assert_eq!(parse("Negotiate"), [challenge("Negotiate", &[])]);
    }

    #[test]
    fn malformed_challenges_end() {
        for text in ["", ",,,", "=", "a=", "\"", "Bearer realm=\"", "Bearer =\"x\"", "Bearer realm=\"\\", "é=\"ü\" , ö"]
        {
            let _ = parse(text);
        }
    }
}
