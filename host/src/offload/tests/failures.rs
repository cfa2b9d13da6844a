//! What streaming does when something fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::model::Model;
use crate::error::{Code, Error, Result};
use crate::offload::*;
use crate::progress::Progress;

type Faulty = FaultyDevice<HostDevice>;

fn faulty(faults: Faults) -> Arc<Faulty> {
    Arc::new(FaultyDevice::new(HostDevice::default(), faults))
}

fn small() -> StreamOptions {
    StreamOptions { staging_bytes: 64 << 10, chunk_bytes: 8 << 10, threads: 3, ..Default::default() }
}

/// Small registrations, so that there are many.
fn many() -> StreamOptions {
    StreamOptions { registration_bytes: 8 << 10, ..small() }
}

fn registered(calls: &[Called]) -> Vec<u64> {
    calls.iter().filter_map(|c| if let Called::Register(at) = c { Some(*at) } else { None }).collect()
}

fn unregistered(calls: &[Called]) -> Vec<u64> {
    calls.iter().filter_map(|c| if let Called::Unregister(at) = c { Some(*at) } else { None }).collect()
}

fn reversed(mut list: Vec<u64>) -> Vec<u64> {
    list.reverse();
    list
}

#[test]
fn the_budget_is_checked_before_the_driver_is_asked() {
    let model = Model::new(3, 40_000);
    let device = faulty(Faults::default());
    let options = StreamOptions { registration: Registration::Require, pin_limit_bytes: Some(100_000), ..many() };
    let error = Streamer::open(device.clone(), model.blocks(), options.clone()).err().unwrap();
    assert_eq!(error.code(), Code::PinLimitExceeded);
    assert!(device.calls().is_empty());
    let options = StreamOptions { registration: Registration::Auto, ..options };
    let mut streamer = Streamer::open(device.clone(), model.blocks(), options).unwrap();
    streamer.pass(|block| model.check(block)).unwrap();
    let report = streamer.report();
    assert_eq!(report.rung, Rung::C);
    assert!(report.passed_over[0].contains("pin limit"), "{report:?}");
    assert!(report.pinned_bytes <= 100_000);
    assert!(registered(&device.calls()).is_empty());
}

#[test]
fn a_refused_registration_is_rolled_back_in_reverse_and_the_next_rung_taken() {
    let model = Model::new(3, 40_000);
    for at in 0..12 {
        for (when, required) in [
            (RegisterWhen::AtOpen, false),
            (RegisterWhen::AsNeeded, false),
            (RegisterWhen::AtOpen, true),
            (RegisterWhen::AsNeeded, true),
        ] {
            let device = faulty(Faults { register: Some(at), ..Default::default() });
            let registration = if required { Registration::Require } else { Registration::Auto };
            let options = StreamOptions { registration, register_when: when, ..many() };
            let outcome = Streamer::open(device.clone(), model.blocks(), options).and_then(|mut s| {
                s.pass(|block| model.check(block))?;
                Ok(s.report())
            });
            let calls = device.calls();
            assert_eq!(registered(&calls).len() as u64, at);
            assert_eq!(unregistered(&calls), reversed(registered(&calls)), "k = {at}, {when:?}");
            assert_eq!(device.inner().registered_bytes(), 0);
            match outcome {
                Ok(report) => {
                    assert!(!required);
                    assert_eq!(report.rung, Rung::C);
                    assert!(report.passed_over[0].contains("as it was told to"), "{report:?}");
                }
                Err(error) => {
                    assert!(required);
                    assert_eq!(error.code(), Code::RegistrationFailed);
                }
            }
        }
    }
}

#[test]
fn a_failed_rollback_is_fatal_and_keeps_the_mapping() {
    let model = Model::new(3, 40_000);
    for when in [RegisterWhen::AtOpen, RegisterWhen::AsNeeded] {
        let device = faulty(Faults { register: Some(6), unregister: vec![2], ..Default::default() });
        let fatal = Arc::new(Mutex::new(Vec::<Error>::new()));
        let hook = fatal.clone();
        let fatal_hook: Fatal = Arc::new(move |e: &Error| hook.lock().unwrap().push(e.clone()));
        let options = StreamOptions { fatal: fatal_hook, register_when: when, ..many() };
        let outcome = Streamer::open(device.clone(), model.blocks(), options).and_then(|mut s| s.pass(|_| Ok(())));
        assert_eq!(outcome.unwrap_err().code(), Code::RegistrationFailed);
        let seen = fatal.lock().unwrap();
        assert!(seen.len() == 1 && seen[0].message().contains("could not be rolled back"), "{seen:?}");
        assert_eq!(device.inner().registered_bytes(), 8 << 10, "one range stays");
        assert!(!device.inner().has_dangling_registration(), "and stays mapped");
    }
}

#[test]
fn a_failed_close_keeps_the_range_for_a_retry() {
    let model = Model::new(3, 20_000);
    let device = faulty(Faults { unregister: vec![1, 4], ..Default::default() });
    let mut streamer = Streamer::open(device.clone(), model.blocks(), many()).unwrap();
    streamer.pass(|block| model.check(block)).unwrap();
    assert_eq!(streamer.close().unwrap_err().code(), Code::RegistrationFailed);
    assert_eq!(device.inner().registered_bytes(), 16 << 10);
    assert!(!device.inner().has_dangling_registration());
    streamer.close().unwrap();
    assert_eq!(device.inner().registered_bytes(), 0);
    streamer.close().unwrap();
}

#[test]
fn a_drop_that_cannot_unregister_keeps_the_mapping() {
    let model = Model::new(2, 20_000);
    let device = faulty(Faults { unregister: (0..100).collect(), ..Default::default() });
    drop(Streamer::open(device.clone(), model.blocks(), many()).unwrap());
    assert!(device.inner().registered_bytes() > 0);
    assert!(!device.inner().has_dangling_registration());
}

#[test]
fn teardown_waits_for_the_device_then_unregisters_also_after_a_panic() {
    let model = Model::new(4, 20_000);
    let device = faulty(Faults::default());
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let mut streamer = Streamer::open(device.clone(), model.blocks(), many()).unwrap();
        streamer.pass(|block| {
            assert!(block.index() < 2, "the consumer panics");
            model.check(block)
        })
    }));
    assert!(outcome.is_err());
    let calls = device.calls();
    let first_unregister = calls.iter().position(|c| matches!(c, Called::Unregister(_))).unwrap();
    assert_eq!(calls[first_unregister - 3..first_unregister], [Called::Synchronize; 3], "copy, verify, compute");
    assert_eq!(unregistered(&calls), reversed(registered(&calls)));
    assert_eq!(device.inner().registered_bytes(), 0);
}

#[test]
fn a_consumer_that_panics_can_go_on_afterwards() {
    let model = Model::new(4, 20_000);
    let mut streamer = Streamer::open(faulty(Faults::default()), model.blocks(), small()).unwrap();
    for _ in 0..3 {
        let panicked = catch_unwind(AssertUnwindSafe(|| streamer.pass(|b| panic!("in block {}", b.index()))));
        assert!(panicked.is_err());
    }
    streamer.pass(|block| model.check(block)).unwrap();
}

#[test]
fn a_registration_that_hangs_does_not_hang_the_process() {
    let model = Model::new(3, 40_000);
    for (when, at) in
        [(RegisterWhen::AtOpen, 0), (RegisterWhen::AtOpen, 5), (RegisterWhen::AsNeeded, 0), (RegisterWhen::AsNeeded, 5)]
    {
        let device = faulty(Faults { hang: Some(at), ..Default::default() });
        let options = StreamOptions { register_when: when, registration_timeout: Duration::from_millis(100), ..many() };
        let start = Instant::now();
        let error = match Streamer::open(device.clone(), model.blocks(), options) {
            Err(error) => error,
            Ok(mut streamer) => {
                let error = streamer.pass(|_| Ok(())).unwrap_err();
                assert_eq!(streamer.close().unwrap_err().code(), Code::RegistrationHung);
                assert_eq!(streamer.close().unwrap_err().code(), Code::RegistrationHung);
                error
            }
        };
        assert!(start.elapsed() < Duration::from_secs(10));
        assert_eq!(error.code(), Code::RegistrationHung, "{error}");
        let calls = device.calls();
        let abandoned = calls.iter().position(|c| *c == Called::Abandon).expect("the device is abandoned");
        assert_eq!(calls.len(), abandoned + 1, "nothing is waited for or taken back after that: {calls:?}");
        assert_eq!(registered(&calls).len() as u64, at);
        assert!(!device.inner().has_dangling_registration(), "what is registered stays mapped");
        device.release();
    }
}

#[test]
fn another_process_that_registers_is_waited_for_but_not_for_ever() {
    let model = Model::new(2, 20_000);
    let path = model.folder.path().join("lock");
    let holder = std::fs::File::create(&path).unwrap();
    holder.lock().unwrap();
    let options = |registration| StreamOptions {
        registration,
        node_lock: Some(NodeLock { path: path.clone(), timeout: Duration::from_millis(50) }),
        ..small()
    };
    let open = |registration| Streamer::open(faulty(Faults::default()), model.blocks(), options(registration));
    assert_eq!(open(Registration::Require).err().unwrap().code(), Code::LockTimeout);
    assert_eq!(open(Registration::Auto).unwrap().report().rung, Rung::C);
    holder.unlock().unwrap();
    assert_eq!(open(Registration::Require).unwrap().report().rung, Rung::A);
}

#[test]
fn failing_copies_and_events_reach_the_consumer() {
    let model = Model::new(5, 30_000);
    for registration in [Registration::Auto, Registration::Off] {
        for at in 0..8 {
            for faults in [
                Faults { copy: Some(at), ..Default::default() },
                Faults { record: Some(at), ..Default::default() },
                Faults { synchronize: Some(at), ..Default::default() },
            ] {
                let device = faulty(faults.clone());
                let options = StreamOptions { registration, ..small() };
                let outcome = Streamer::open(device.clone(), model.blocks(), options).and_then(|mut s| {
                    s.pass(|block| model.check(block))?;
                    s.pass(|block| model.check(block))
                });
                assert!(outcome.is_err(), "{faults:?}");
                assert_eq!(device.inner().registered_bytes(), 0, "{faults:?}");
            }
        }
    }
}

#[test]
fn a_failed_streamer_stays_failed_and_closes() {
    let model = Model::new(5, 30_000);
    let device = faulty(Faults { copy: Some(2), ..Default::default() });
    let mut streamer = Streamer::open(device.clone(), model.blocks(), small()).unwrap();
    let first = streamer.pass(|_| Ok(())).unwrap_err();
    assert!(first.message().contains("a copy failed"), "{first}");
    assert_eq!(streamer.pass(|_| Ok(())).unwrap_err(), first);
    streamer.close().unwrap();
    assert_eq!(device.inner().registered_bytes(), 0);
}

#[test]
fn where_pinned_memory_runs_out_streaming_goes_on_with_less() {
    let model = Model::new(6, 60_000);
    for (pinned, rung) in [(0, Rung::D), (1, Rung::C), (4, Rung::C)] {
        let device = faulty(Faults { pinned: Some(pinned), ..Default::default() });
        let options = StreamOptions { registration: Registration::Off, ..small() };
        let mut streamer = Streamer::open(device, model.blocks(), options).unwrap();
        for _ in 0..4 {
            streamer.pass(|block| model.check(block)).unwrap();
        }
        let report = streamer.report();
        assert_eq!(report.rung, rung);
        assert!(report.pinned_bytes <= pinned * (8 << 10));
    }
}

#[test]
fn a_flipped_bit_is_caught_wherever_it_flips() {
    let model = Model::new(4, 70_000);
    let verify = StreamOptions { verify_on_device: true, ..small() };
    let staged = StreamOptions { registration: Registration::Off, threads: 1, ..verify.clone() };
    let flip_copied = |k| Faults { flip_copied: Some(k), ..Default::default() };
    let cases = [
        (flip_copied(2), verify.clone(), "block 'layer.2', tensor 'a', bytes 0..16384"),
        (flip_copied(9), staged.clone(), "block 'layer.1', tensor 'a', bytes 0..16384"),
        (Faults { flip_staged: Some(8), ..Default::default() }, staged.clone(), "block 'layer.0', tensor 'b'"),
    ];
    for (faults, options, where_) in cases {
        let device = faulty(faults.clone());
        let mut streamer = Streamer::open(device, model.blocks(), options).unwrap();
        let handed_out = AtomicU64::new(0);
        let error = streamer
            .pass(|block| {
                handed_out.fetch_add(1, Ordering::Relaxed);
                model.check(block)
            })
            .unwrap_err();
        assert_eq!(error.code(), Code::CorruptBlob, "{faults:?}");
        assert!(error.message().contains(where_), "{faults:?}: {error}");
        assert_eq!(streamer.pass(|_| Ok(())).unwrap_err(), error, "the streamer is done for");
    }
    for options in [
        verify,
        staged,
        StreamOptions { pin_limit_bytes: Some(0), staging_bytes: 0, verify_on_device: true, ..small() },
    ] {
        let model = Model::new(4, 70_000);
        model.flip(3, 60_000);
        let mut streamer = Streamer::open(faulty(Faults::default()), model.blocks(), options).unwrap();
        let mut handed_out = Vec::new();
        let error = streamer
            .pass(|block| {
                handed_out.push(block.index());
                Ok(())
            })
            .unwrap_err();
        assert_eq!(handed_out, [0, 1, 2], "the bad block is not handed out");
        assert!(error.message().contains("block 'layer.3', tensor 'b'"), "{error}");
    }
}

#[test]
fn copying_back_catches_what_is_not_the_file() {
    let model = Model::new(4, 70_000);
    let device = faulty(Faults { flip_copied: Some(2), ..Default::default() });
    let options = StreamOptions { check_copy_back: true, ..small() };
    let mut streamer = Streamer::open(device, model.blocks(), options).unwrap();
    let error = streamer.pass(|_| Ok(())).unwrap_err();
    assert_eq!(error.code(), Code::CorruptBlob);
    assert!(error.message().contains("block 'layer.2', tensor 'a', byte 0"), "{error}");
}

#[test]
fn a_file_that_is_cut_short_is_an_error() {
    let model = Model::new(3, 70_000);
    let blocks = model.blocks();
    std::fs::File::options().write(true).open(model.path(1)).unwrap().set_len(50_000).unwrap();
    let error = Streamer::open(faulty(Faults::default()), blocks, small()).err().unwrap();
    assert_eq!(error.code(), Code::CorruptBlob);

    let model = Model::new(3, 70_000);
    for registration in [Registration::Auto, Registration::Off] {
        let mut streamer =
            Streamer::open(faulty(Faults::default()), model.blocks(), StreamOptions { registration, ..small() })
                .unwrap();
        streamer.pass(|block| model.check(block)).unwrap();
        let file = std::fs::File::options().write(true).open(model.path(1)).unwrap();
        file.set_len(50_000).unwrap();
        let mut failed = false;
        for _ in 0..2 {
            failed |= streamer.pass(|block| block.wait()).is_err();
        }
        assert!(failed, "{registration:?}");
        std::fs::write(model.path(1), [vec![0xEE; 4096], model.bytes[1].clone()].concat()).unwrap();
    }
}

struct Panicking;
impl Pack for Panicking {
    fn pack(&self, offset: u64, _: &mut [u8]) -> Result<()> {
        panic!("at {offset}")
    }
}

#[test]
fn a_source_that_panics_is_an_error() {
    let block = BlockSpec {
        name: "p".into(),
        segments: vec![Segment { content: Content::Packed(Arc::new(Panicking)), len: 100_000 }],
        tensors: vec![],
    };
    for staging_bytes in [small().staging_bytes, 0] {
        let options = StreamOptions { staging_bytes, ..small() };
        let mut streamer = Streamer::open(faulty(Faults::default()), vec![block.clone()], options).unwrap();
        let error = streamer.pass(|_| Ok(())).unwrap_err();
        assert!(error.message().contains("panicked"), "{error}");
    }
}

/// Cancels after so many bytes of a stage.
struct StopAfter {
    stage: &'static str,
    left: Mutex<Option<u64>>,
    bytes: u64,
}

impl Progress for StopAfter {
    fn stage(&self, what: &str, _: u64) {
        *self.left.lock().unwrap() = (what == self.stage).then_some(self.bytes);
    }
    fn advance(&self, bytes: u64) {
        let mut left = self.left.lock().unwrap();
        *left = left.map(|left| left.saturating_sub(bytes));
    }
    fn cancelled(&self) -> bool {
        *self.left.lock().unwrap() == Some(0)
    }
}

#[test]
fn a_cancelled_stream_stops_and_cleans_up() {
    let model = Model::new(20, 30_000);
    for stage in ["register", "stream"] {
        let device = faulty(Faults::default());
        let progress = StopAfter { stage, left: Mutex::default(), bytes: 100_000 };
        let options = StreamOptions { progress: Some(Arc::new(progress)), ..many() };
        let outcome = Streamer::open(device.clone(), model.blocks(), options)
            .and_then(|mut streamer| streamer.pass(|block| model.check(block)));
        assert_eq!(outcome.unwrap_err().code(), Code::Interrupted, "{stage}");
        let calls = device.calls();
        assert!(registered(&calls).len() > 10);
        assert_eq!(unregistered(&calls), reversed(registered(&calls)));
        assert_eq!(device.inner().registered_bytes(), 0);
    }
}

#[test]
fn any_seeded_fault_gives_the_right_bytes_or_an_error() {
    let model = Model::new(5, 30_000);
    for seed in 0..150 {
        let faults = Faults::seeded(seed);
        let device = faulty(faults.clone());
        let options = StreamOptions {
            verify_on_device: true,
            registration: if seed % 2 == 0 { Registration::Auto } else { Registration::Off },
            register_when: if seed % 4 < 2 { RegisterWhen::AtOpen } else { RegisterWhen::AsNeeded },
            prefetch_next_pass: seed % 3 == 0,
            ..many()
        };
        let outcome = Streamer::open(device.clone(), model.blocks(), options).and_then(|mut s| {
            for _ in 0..3 {
                // A wrong byte in the consumer's hands panics here.
                s.pass(|block| model.check(block))?;
            }
            s.close()
        });
        if let Err(error) = &outcome {
            let known = [Code::IoError, Code::CorruptBlob, Code::RegistrationFailed, Code::InsufficientMemory];
            assert!(known.contains(&error.code()), "seed {seed}, {faults:?}: {error}");
        }
        assert_eq!(device.inner().registered_bytes(), 0, "seed {seed}, {faults:?}");
    }
}
