//! Registering and unregistering ranges, in order, under a watchdog.
//!
//! All calls are made by one thread, because the driver serialises them under
//! a lock of its own anyway; whoever asks for one waits with a time limit. If
//! a call does not return, that thread is given up together with everything
//! the driver may hold: the device is abandoned, the mappings are leaked, and
//! every later request answers `registration_hung` at once.
//!
//! Invariants: `registered` holds the jobs that the device has registered, in
//! that order, and they are taken back in reverse. A mapping is unmapped only
//! after all its ranges are unregistered; where that fails, it stays mapped.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Code, Error, Result};
use crate::mapping::FileMap;

use super::device::{Access, Device};
use super::options::{RegisterWhen, StreamOptions};
use super::ranges::PageRange;
use super::trace::Track;

/// One registration.
#[derive(Clone)]
pub(super) struct Job {
    pub(super) map: Arc<FileMap>,
    pub(super) range: PageRange,
    pub(super) access: Access,
}

enum Call {
    Register(usize),
    Unregister(usize),
}

/// The registrations of a streamer.
pub(super) struct Registrar<D: Device> {
    device: Arc<D>,
    jobs: Arc<[Job]>,
    options: StreamOptions,
    registered: Vec<usize>,
    next: usize,
    calls: Option<Sender<Call>>,
    answers: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
    spent: Duration,
    hung: Option<Error>,
}

impl<D: Device> Registrar<D> {
    pub(super) fn new(device: Arc<D>, jobs: Vec<Job>, options: &StreamOptions) -> Result<Self> {
        let jobs: Arc<[Job]> = jobs.into();
        let (calls, to_make) = channel();
        let (done, answers) = channel();
        let (callee, list) = (device.clone(), jobs.clone());
        let thread = std::thread::Builder::new()
            .name("registrar".into())
            .spawn(move || {
                for call in to_make {
                    let job = |i: usize| &list[i];
                    let answer = match call {
                        Call::Register(i) => callee.register(&job(i).map, job(i).range, job(i).access),
                        Call::Unregister(i) => callee.unregister(&job(i).map, job(i).range),
                    };
                    if done.send(answer).is_err() {
                        break;
                    }
                }
            })
            .map_err(|e| Error::io("starting the registering thread", e))?;
        Ok(Registrar {
            device,
            jobs,
            options: options.clone(),
            registered: Vec::new(),
            next: 0,
            calls: Some(calls),
            answers,
            thread: Some(thread),
            spent: Duration::ZERO,
            hung: None,
        })
    }

    pub(super) fn job_count(&self) -> usize {
        self.jobs.len()
    }

    pub(super) fn registered_bytes(&self) -> u64 {
        self.registered.iter().map(|i| self.jobs[*i].range.len()).sum()
    }

    pub(super) fn spent_ms(&self) -> f64 {
        self.spent.as_secs_f64() * 1e3
    }

    /// The error of a call that hung, if one did.
    pub(super) fn hung(&self) -> Option<&Error> {
        self.hung.as_ref()
    }

    /// Registers the first `count` jobs that are not registered yet.
    ///
    /// # Errors
    /// The first failure; the jobs before it stay registered.
    pub(super) fn ensure(&mut self, count: usize) -> Result<()> {
        if self.next >= count {
            return Ok(());
        }
        let _serialised = match &self.options.node_lock {
            Some(lock) => Some(lock.take("registering memory")?),
            None => None,
        };
        let progress = self.options.progress.clone().filter(|_| self.options.register_when == RegisterWhen::AtOpen);
        if let Some(progress) = &progress {
            progress.stage("register", self.jobs[self.next..count].iter().map(|j| j.range.len()).sum());
        }
        while self.next < count {
            self.options.cancelled()?;
            let start = Instant::now();
            let job = self.jobs[self.next].clone();
            let answer = self.call(Call::Register(self.next));
            self.spent += start.elapsed();
            if let Some(trace) = &self.options.trace {
                trace.host(Track::Registration, &name_of(&job), start, job.range.len());
            }
            answer
                .map_err(|e| e.context(format_args!("registering range {} of {}", self.next + 1, self.jobs.len())))?;
            self.registered.push(self.next);
            self.next += 1;
            if let Some(progress) = &progress {
                progress.advance(job.range.len());
            }
        }
        Ok(())
    }

    /// Takes everything back, last first, after a registration failed. What
    /// cannot be taken back is fatal: the driver's view of this memory is
    /// unknown, and going on could unmap pages under a device.
    ///
    /// # Errors
    /// Only where the fatal hook returns, or a call hangs.
    pub(super) fn roll_back(&mut self) -> Result<()> {
        match self.close() {
            Err(e) if e.code() != Code::RegistrationHung => {
                let fatal = e.context("a failed registration could not be rolled back, so memory stays pinned");
                (self.options.fatal)(&fatal);
                self.leak();
                Err(fatal)
            }
            other => other,
        }
    }

    /// Takes everything back, last first. Ranges that fail are kept for a
    /// retry; with nothing left this does nothing.
    ///
    /// # Errors
    /// The first failure, after all others were tried.
    pub(super) fn close(&mut self) -> Result<()> {
        if let Some(error) = &self.hung {
            return Err(error.clone());
        }
        self.next = self.jobs.len();
        let mut first = Ok(());
        let mut kept = Vec::new();
        while let Some(index) = self.registered.pop() {
            let start = Instant::now();
            let answer = self.call(Call::Unregister(index));
            if let Some(trace) = &self.options.trace {
                let job = &self.jobs[index];
                trace.host(Track::Registration, &format!("release {}", name_of(job)), start, job.range.len());
            }
            if let Err(error) = answer {
                kept.push(index);
                first = first.and(Err(error));
            }
            if self.hung.is_some() {
                break;
            }
        }
        self.registered.extend(kept.into_iter().rev());
        first
    }

    /// Makes one call, and gives up on it after the time limit.
    fn call(&mut self, call: Call) -> Result<()> {
        if let Some(error) = &self.hung {
            return Err(error.clone());
        }
        let (verb, index) = match call {
            Call::Register(i) => ("registering", i),
            Call::Unregister(i) => ("unregistering", i),
        };
        let job = self.jobs[index].clone();
        if let Some(calls) = &self.calls {
            calls.send(call).ok();
        }
        let error = match self.answers.recv_timeout(self.options.registration_timeout) {
            Ok(answer) => return answer,
            Err(RecvTimeoutError::Disconnected) => {
                Error::new(Code::RegistrationFailed, format!("the thread {verb} {} has ended", name_of(&job)))
            }
            Err(RecvTimeoutError::Timeout) => Error::new(
                Code::RegistrationHung,
                format!("{verb} {} did not return within {:?}", name_of(&job), self.options.registration_timeout),
            )
            .hint("the range stays mapped and the process ends without cleaning up; use --registration off"),
        };
        self.hung = Some(error.clone());
        self.device.abandon();
        std::mem::forget(job.map);
        self.leak();
        Err(error)
    }

    /// Keeps every mapping of a registered range for the life of the process.
    fn leak(&mut self) {
        for index in self.registered.drain(..) {
            std::mem::forget(self.jobs[index].map.clone());
        }
    }
}

impl<D: Device> Drop for Registrar<D> {
    fn drop(&mut self) {
        if self.hung.is_none() {
            self.close().ok();
        }
        // What could not be unregistered must not be unmapped.
        self.leak();
        self.calls = None;
        // A thread that is stuck in the driver is not waited for.
        if let (None, Some(thread)) = (&self.hung, self.thread.take()) {
            thread.join().ok();
        }
    }
}

fn name_of(job: &Job) -> String {
    format!("{}, bytes {}..{}", job.map.path().display(), job.range.start(), job.range.end())
}
