//! A time line of registration, copies, verification and consumer, in the
//! Chrome trace format that Perfetto and `chrome://tracing` open.

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

use crate::error::{Error, Result};

/// The rows of the time line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Track {
    /// Registering and unregistering.
    Registration,
    /// Filling staging buffers.
    Staging,
    /// Copies to the device.
    Copy,
    /// Hashing on the device.
    Verify,
    /// What the consumer does with a block.
    Consumer,
}

impl Track {
    const ALL: [Track; 5] = [Track::Registration, Track::Staging, Track::Copy, Track::Verify, Track::Consumer];

    fn name(self) -> &'static str {
        match self {
            Track::Registration => "registration",
            Track::Staging => "staging",
            Track::Copy => "copy",
            Track::Verify => "verify",
            Track::Consumer => "consumer",
        }
    }
}

#[derive(Clone, Debug)]
struct Span {
    track: Track,
    name: String,
    start_us: f64,
    duration_us: f64,
    bytes: u64,
}

/// Collects spans from any thread.
#[derive(Debug)]
pub struct Trace {
    origin: Instant,
    spans: Mutex<Vec<Span>>,
}

impl Default for Trace {
    fn default() -> Self {
        Trace { origin: Instant::now(), spans: Mutex::default() }
    }
}

#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    ph: &'static str,
    pid: u32,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Args<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args<'a> {
    Bytes { bytes: u64 },
    Name { name: &'a str },
}

impl Trace {
    /// A span that the host timed, from `start` until now.
    pub fn host(&self, track: Track, name: &str, start: Instant, bytes: u64) {
        self.add(track, name, self.at_us(start), start.elapsed().as_secs_f64() * 1e6, bytes);
    }

    /// A span in microseconds since the trace's origin.
    pub(super) fn add(&self, track: Track, name: &str, start_us: f64, duration_us: f64, bytes: u64) {
        let span = Span { track, name: name.to_string(), start_us, duration_us, bytes };
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// Microseconds from the trace's origin to `instant`.
    pub(super) fn at_us(&self, instant: Instant) -> f64 {
        instant.saturating_duration_since(self.origin).as_secs_f64() * 1e6
    }

    /// The trace as JSON.
    ///
    /// # Errors
    /// `io_error`.
    pub fn to_json(&self) -> Result<String> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let rows = Track::ALL.iter().enumerate().map(|(tid, track)| Event {
            name: "thread_name",
            ph: "M",
            pid: 1,
            tid,
            ts: None,
            dur: None,
            args: Args::Name { name: track.name() },
        });
        let events: Vec<Event<'_>> = rows
            .chain(spans.iter().map(|s| Event {
                name: &s.name,
                ph: "X",
                pid: 1,
                tid: Track::ALL.iter().position(|t| *t == s.track).unwrap_or(0),
                ts: Some(s.start_us),
                dur: Some(s.duration_us),
                args: Args::Bytes { bytes: s.bytes },
            }))
            .collect();
        serde_json::to_string(&serde_json::json!({ "displayTimeUnit": "ms", "traceEvents": events }))
            .map_err(|e| Error::io("writing a trace as JSON", e))
    }

    /// Writes the trace to a file.
    ///
    /// # Errors
    /// `io_error`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let json = self.to_json()?;
        let failed = |e| Error::io(format_args!("writing the trace {}", path.display()), e);
        std::fs::File::create(path).and_then(|mut f| f.write_all(json.as_bytes())).map_err(failed)
    }

    #[cfg(test)]
    pub(super) fn count(&self, track: Track) -> usize {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|s| s.track == track).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_names_its_rows_and_spans() {
        let trace = Trace::default();
        trace.host(Track::Copy, "block 1", Instant::now(), 7);
        let json: serde_json::Value = serde_json::from_str(&trace.to_json().unwrap()).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 6);
        assert_eq!(events[2]["args"]["name"], "copy");
        assert_eq!((events[5]["name"].as_str(), events[5]["tid"].as_u64()), (Some("block 1"), Some(2)));
        assert_eq!(events[5]["args"]["bytes"], 7);
    }
}
