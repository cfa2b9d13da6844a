//! One request and its answer; what is tried again, and when.
//!
//! Tried again, with pauses that double from half a second to thirty (or as
//! long as `Retry-After` says): connections that fail or break, 408, 429 and
//! 5xx. A silence is tried once more only: each costs a whole time-out.
//! Everything that is sent here can be sent twice.

use std::io::Read;
use std::time::{Duration, Instant};

use serde::Deserialize;
use ureq::http::{HeaderMap, Method, Request, Response, header};
use ureq::{Body, SendBody};

use super::auth::Scope;
use super::redirect::Trail;
use super::{Registry, RegistryOptions, interrupted};
use crate::error::{Code, Error, Result};
use crate::plan::printable;
use crate::progress::Progress;
use crate::publish::reference::Repository;

/// The first pause; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause that is chosen here.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause that a registry may ask for.
const LONGEST_ASKED_PAUSE: Duration = Duration::from_secs(120);
/// What is read of an error's text.
const ERROR_LIMIT_BYTES: u64 = 64 << 10;
/// A transfer may be silent for a time-out, but not trickle for ever: within
/// each time-out so many bytes must come.
const TRICKLE_BYTES: u64 = 64 << 10;
/// A document may take two time-outs, and a second more for so many bytes.
const DOCUMENT_BYTES_PER_SECOND: u64 = 64 << 10;

/// A request.
pub(super) struct Ask<'a> {
    pub(super) method: Method,
    pub(super) url: String,
    pub(super) scope: Scope,
    pub(super) accept: Option<&'static str>,
    /// The first byte that is wanted.
    pub(super) from: u64,
    /// `Content-Range` of what is sent.
    pub(super) content_range: Option<String>,
    pub(super) content_type: Option<&'a str>,
    pub(super) payload: Payload<'a>,
    /// Whether an answer may lead elsewhere.
    follows: bool,
}

/// What goes with a request.
pub(super) enum Payload<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// Makes a reader of so many bytes, once for each attempt.
    Stream(u64, &'a dyn Fn() -> Box<dyn Read + 'a>),
}

impl Ask<'_> {
    pub(super) fn new(method: Method, url: String, scope: Scope) -> Self {
        Ask {
            method,
            url,
            scope,
            accept: None,
            from: 0,
            content_range: None,
            content_type: None,
            payload: Payload::Nothing,
            follows: false,
        }
    }

    /// Asks for a blob, which may be kept elsewhere.
    pub(super) fn for_blob(method: Method, url: String, scope: Scope) -> Self {
        Ask { follows: matches!(method, Method::GET | Method::HEAD), ..Ask::new(method, url, scope) }
    }
}

/// An answer: a success, or 404.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    body: Body,
    timeout: Duration,
}

/// An error, and whether trying again may help.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) again: Again,
    /// Whether much was done all the same: then the retries begin anew.
    pub(crate) progressed: bool,
    /// The status of an answer that says no.
    pub(crate) status: Option<u16>,
}

/// Whether trying again may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// No.
    Never,
    /// Yes; the registry may have said after how long.
    After(Option<Duration>),
    /// It was silent.
    Silence,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::new(error, Again::Never)
    }
}

impl Failure {
    pub(super) fn new(error: Error, again: Again) -> Self {
        Failure { error, again, progressed: false, status: None }
    }

    /// Whether the registry does not let this user do what was asked.
    pub(super) fn is_denial(&self) -> bool {
        matches!(self.status, Some(401 | 403))
    }

    /// A failure while bytes were received.
    pub(crate) fn of_read(error: std::io::Error, doing: &str) -> Self {
        from_transport(error.into(), doing)
    }

    /// Bytes that ended too soon.
    pub(crate) fn short(doing: &str, missing_bytes: u64) -> Self {
        let message = format!("{doing}: the registry ended the connection {missing_bytes} bytes before the end");
        Failure::new(Error::new(Code::NetworkError, message).hint(NETWORK_HINT), Again::After(None))
    }
}

const NETWORK_HINT: &str = "check the network and the registry, then run it again: what has arrived is kept";

impl Registry {
    /// Sends a request, again where that may help.
    pub(super) fn exchange(&self, ask: &Ask<'_>, progress: &dyn Progress) -> Result<Answer> {
        self.retried(progress, || self.once(ask))
    }

    /// Sends a request, twice if the registry wants to know who asks, and
    /// where a blob is to be had if that is elsewhere.
    pub(super) fn once(&self, ask: &Ask<'_>) -> Result<Answer, Failure> {
        let mut trail = Trail::new(&ask.url)?;
        let known = self.auth.known(&ask.scope);
        let (mut authorization, mut challenged) = (known.clone(), false);
        loop {
            let home = trail.is_home();
            let answer = self.send(ask, trail.url(), authorization.as_deref().filter(|_| home))?;
            if answer.status == 401 && home && !challenged {
                challenged = true;
                let challenges = answer.challenges();
                // Reads the rest, so that the connection can be used again.
                let refused = answer.refusal(&self.repository);
                match self.auth.answer(&challenges, &ask.scope, &self.agent, known.is_some())? {
                    Some(value) => authorization = Some(value),
                    None => return Err(refused),
                }
            } else if !ask.follows || !trail.follow(&answer)? {
                return self.judge(answer, ask).map_err(|failure| if home { failure } else { beyond(failure, &trail) });
            }
        }
    }

    fn send(&self, ask: &Ask<'_>, url: &str, authorization: Option<&str>) -> Result<Answer, Failure> {
        let mut request = Request::builder().method(ask.method.clone()).uri(url);
        if let Some(value) = authorization {
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some(accept) = ask.accept {
            request = request.header(header::ACCEPT, accept);
        }
        if ask.from > 0 {
            request = request.header(header::RANGE, format!("bytes={}-", ask.from));
        }
        if let Some(range) = &ask.content_range {
            request = request.header(header::CONTENT_RANGE, range);
        }
        if let Some(content_type) = ask.content_type {
            request = request.header(header::CONTENT_TYPE, content_type);
        }
        let doing = || format!("{} {url}", ask.method);
        let invalid = |e: ureq::http::Error| {
            Failure::from(Error::new(Code::RegistryRefused, format!("{}: the address is malformed: {e}", doing())))
        };
        let sent = match &ask.payload {
            Payload::Nothing if matches!(ask.method, Method::POST | Method::PUT | Method::PATCH) => {
                self.agent.run(request.header(header::CONTENT_LENGTH, 0).body(&[][..]).map_err(invalid)?)
            }
            Payload::Nothing => self.agent.run(request.body(()).map_err(invalid)?),
            Payload::Bytes(bytes) => {
                self.agent.run(request.header(header::CONTENT_LENGTH, bytes.len()).body(*bytes).map_err(invalid)?)
            }
            Payload::Stream(len, open) => {
                let mut reader = open();
                let body = SendBody::from_reader(&mut *reader);
                self.agent.run(request.header(header::CONTENT_LENGTH, *len).body(body).map_err(invalid)?)
            }
        };
        Ok(Answer::of(sent.map_err(|e| from_transport(e, &doing()))?, self.options.timeout))
    }

    fn judge(&self, answer: Answer, ask: &Ask<'_>) -> Result<Answer, Failure> {
        let wanted_range = ask.from > 0 && answer.status == 416;
        match answer.status {
            200..300 | 404 => Ok(answer),
            status if wanted_range => {
                let message = format!(
                    "the registry of {} has less than {} bytes of what it should have",
                    self.repository, ask.from
                );
                let error = Error::new(Code::RegistryRefused, message);
                Err(Failure { status: Some(status), ..Failure::from(error) })
            }
            _ => Err(answer.refusal(&self.repository)),
        }
    }
}

/// A refusal by a host that the registry led to: logging in helps nothing.
fn beyond(failure: Failure, trail: &Trail) -> Failure {
    let error = failure.error.context(format!("redirected to {}", trail.host()));
    Failure { error: error.hint("the storage that the registry leads to refuses: try again later"), ..failure }
}

/// Runs `attempt` as the module's text says.
pub(super) fn retried<T>(
    options: &RegistryOptions,
    progress: &dyn Progress,
    mut attempt: impl FnMut() -> Result<T, Failure>,
) -> Result<T> {
    let mut pause = FIRST_PAUSE;
    let mut silences = 0;
    let mut tries = 0;
    loop {
        if progress.cancelled() {
            return Err(interrupted());
        }
        let failure = match attempt() {
            Ok(done) => return Ok(done),
            Err(_) if progress.cancelled() => return Err(interrupted()),
            Err(failure) => failure,
        };
        if failure.progressed {
            (tries, silences, pause) = (0, 0, FIRST_PAUSE);
        }
        let wait = match failure.again {
            Again::Never => return Err(failure.error),
            Again::Silence if silences > 0 => return Err(failure.error),
            Again::Silence => {
                silences += 1;
                Duration::ZERO
            }
            Again::After(asked) => asked.unwrap_or(pause),
        };
        if tries >= options.retries || wait > LONGEST_ASKED_PAUSE {
            let count = tries + 1;
            return Err(if count > 1 { failure.error.context(format!("tried {count} times")) } else { failure.error });
        }
        tries += 1;
        pause = (pause * 2).min(LONGEST_PAUSE);
        sleep(wait, progress);
    }
}

fn sleep(time: Duration, progress: &dyn Progress) {
    let start = Instant::now();
    while !progress.cancelled() {
        let left = time.saturating_sub(start.elapsed());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}

/// What a transport's failure means.
pub(super) fn from_transport(error: ureq::Error, doing: &str) -> Failure {
    let network =
        |again| Failure::new(Error::new(Code::NetworkError, format!("{doing}: {error}")).hint(NETWORK_HINT), again);
    let silence = |detail: &str| {
        let message = format!("{doing}: the registry was silent for too long{detail}");
        let error = Error::new(Code::RegistryTimeout, message)
            .hint("check the registry, or allow it more time with --registry-timeout");
        Failure::new(error, Again::Silence)
    };
    match &error {
        ureq::Error::Timeout(_) => silence(&format!(" ({error})")),
        ureq::Error::Io(e) if matches!(e.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock) => {
            silence("")
        }
        ureq::Error::Io(e) if is_certificate(e) => network(Again::Never),
        ureq::Error::Io(_) | ureq::Error::ConnectionFailed | ureq::Error::BodyStalled => network(Again::After(None)),
        ureq::Error::Protocol(_) => network(Again::After(None)),
        ureq::Error::HostNotFound => Error::new(Code::NetworkError, format!("{doing}: there is no such host"))
            .hint("check the registry's name, and the name service")
            .into(),
        ureq::Error::RequireHttpsOnly(_) => {
            Error::new(Code::NetworkError, format!("{doing}: the registry leads to plain HTTP, which is refused"))
                .hint("use --plain-http if this network can be trusted")
                .into()
        }
        _ => network(Again::Never),
    }
}

fn is_certificate(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidData
}

impl Answer {
    pub(super) fn of(response: Response<Body>, timeout: Duration) -> Self {
        let (parts, body) = response.into_parts();
        Answer { status: parts.status.as_u16(), headers: parts.headers, body, timeout }
    }

    /// The answer unless it is 404.
    pub(super) fn or_missing(self, repository: &Repository) -> Result<Answer> {
        if self.status == 404 { Err(self.refusal(repository).error) } else { Ok(self) }
    }

    /// A whole document, of which there is at most `limit_bytes`.
    pub(super) fn whole(self, limit_bytes: u64, what: &str) -> Result<Vec<u8>, Failure> {
        let doing = format!("reading {what}");
        let expected = self.length();
        let mut bytes = Vec::new();
        let mut reader = self.untrickled(true).take(limit_bytes + 1);
        reader.read_to_end(&mut bytes).map_err(|e| Failure::of_read(e, &doing))?;
        if bytes.len() as u64 > limit_bytes {
            return Err(Error::new(
                Code::RegistryRefused,
                format!("{what} has more than {limit_bytes} bytes: the registry gives something else"),
            )
            .into());
        }
        match expected {
            Some(expected) if expected > bytes.len() as u64 => {
                Err(Failure::short(&doing, expected - bytes.len() as u64))
            }
            _ => Ok(bytes),
        }
    }

    fn length(&self) -> Option<u64> {
        self.headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
    }

    /// The first byte of a partial answer.
    pub(super) fn range_start(&self) -> Option<u64> {
        let range = self.headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
        range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
    }

    /// A header's text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub(super) fn into_reader(self) -> Box<dyn Read + Send> {
        Box::new(self.untrickled(false))
    }

    fn untrickled(self, document: bool) -> Untrickled<impl Read + Send + use<>> {
        let reader = self.body.into_with_config().limit(u64::MAX).reader();
        Untrickled::new(reader, self.timeout, document)
    }

    fn challenges(&self) -> Vec<String> {
        let values = self.headers.get_all(header::WWW_AUTHENTICATE).iter();
        values.filter_map(|value| value.to_str().ok().map(str::to_owned)).collect()
    }

    /// Why the registry says no.
    pub(super) fn refusal(self, repository: &Repository) -> Failure {
        #[derive(Deserialize)]
        struct Envelope {
            errors: Vec<Entry>,
        }
        #[derive(Deserialize)]
        struct Entry {
            #[serde(default)]
            code: String,
            #[serde(default)]
            message: String,
        }
        let status = self.status;
        let after = self.header("retry-after").and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let mut text = Vec::new();
        let _ = self.untrickled(true).take(ERROR_LIMIT_BYTES).read_to_end(&mut text);
        let said = match serde_json::from_slice::<Envelope>(&text) {
            Ok(envelope) => envelope
                .errors
                .iter()
                .map(|e| format!("{} {}", e.code, e.message).trim().to_owned())
                .collect::<Vec<_>>()
                .join("; "),
            Err(_) => String::from_utf8_lossy(&text).trim().chars().take(200).collect(),
        };
        let said = if said.is_empty() { String::new() } else { format!(": {}", printable(&said)) };
        let error = Error::new(Code::RegistryRefused, format!("{repository} answered {status}{said}"));
        let host = &repository.registry;
        let (error, again) = match status {
            401 => (
                error.hint(format!(
                    "log in with `docker login {host}`; what it keeps in ~/.docker/config.json is used here"
                )),
                Again::Never,
            ),
            403 => (error.hint(format!("the account that is logged in to {host} may not do this here")), Again::Never),
            404 => (error.hint("check the name of the repository and the tag"), Again::Never),
            300..=399 => (error.hint("it leads elsewhere, which is followed for blobs only"), Again::Never),
            429 => (error.hint("the registry wants fewer requests: wait, or lower --connections"), Again::After(after)),
            408 | 500 | 502 | 503 | 504 => {
                (error.hint("the registry has a problem of its own: try again later"), Again::After(after))
            }
            _ => (error, Again::Never),
        };
        Failure { status: Some(status), ..Failure::new(error, again) }
    }
}

/// A reader that gives up when bytes only trickle, or a document does not come
/// to its end.
struct Untrickled<R> {
    reader: R,
    timeout: Duration,
    document: bool,
    start: Instant,
    total_bytes: u64,
    /// When the current time-out began, and what came since.
    since: Instant,
    bytes: u64,
}

impl<R> Untrickled<R> {
    fn new(reader: R, timeout: Duration, document: bool) -> Self {
        let start = Instant::now();
        Untrickled { reader, timeout, document, start, total_bytes: 0, since: start, bytes: 0 }
    }
}

/// Whether a document of which so much has come should have ended.
fn is_overdue(elapsed: Duration, timeout: Duration, bytes: u64) -> bool {
    elapsed > timeout.saturating_mul(2) + Duration::from_secs(bytes / DOCUMENT_BYTES_PER_SECOND)
}

impl<R: Read> Read for Untrickled<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.bytes += read as u64;
        self.total_bytes += read as u64;
        if self.document && read > 0 && is_overdue(self.start.elapsed(), self.timeout, self.total_bytes) {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        if self.since.elapsed() > self.timeout {
            if self.bytes < TRICKLE_BYTES && read > 0 {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
            self.since = Instant::now();
            self.bytes = 0;
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_end_or_are_given_up() {
        let (minute, second) = (Duration::from_secs(60), Duration::from_secs(1));
        // A byte just before each time-out is silence, for all that.
        assert!(!is_overdue(2 * minute, minute, 2));
        assert!(is_overdue(2 * minute + second, minute, 3));
        // A slow line brings a large document all the same.
        assert!(!is_overdue(2 * minute + 200 * second, minute, 16 << 20));
        assert!(is_overdue(2 * minute + 257 * second, minute, 16 << 20));
    }

    #[test]
    fn trickles_are_noticed() {
        let read = |document, bytes: &[u8]| {
            let mut reader = Untrickled::new(bytes, Duration::ZERO, document);
            let start = Instant::now();
            while start.elapsed().is_zero() {}
            reader.read_to_end(&mut Vec::new()).map_err(|e| e.kind())
        };
        for document in [false, true] {
            assert_eq!(read(document, b"x"), Err(std::io::ErrorKind::TimedOut));
            assert_eq!(read(document, b""), Ok(0));
        }
    }
}
