//! What streaming does when nothing fails.

use std::sync::Arc;
use std::time::Duration;

use super::model::Model;
use crate::error::Code;
use crate::offload::*;

fn small() -> StreamOptions {
    StreamOptions {
        staging_bytes: 64 << 10,
        chunk_bytes: 8 << 10,
        threads: 3,
        verify_on_device: true,
        ..Default::default()
    }
}

/// Every way of getting bytes to the device: options and the rung they give.
fn ways(tmpfs: &std::path::Path) -> Vec<(&'static str, HostDevice, StreamOptions, Rung)> {
    let only_writable = || HostDevice::new(&[Access::ReadWrite]);
    let tmpfs_root = Some(tmpfs.to_path_buf());
    vec![
        ("A", HostDevice::default(), small(), Rung::A),
        ("A in pieces", HostDevice::default(), StreamOptions { registration_bytes: 12 << 10, ..small() }, Rung::A),
        (
            "A as needed",
            HostDevice::default(),
            StreamOptions { register_when: RegisterWhen::AsNeeded, ..small() },
            Rung::A,
        ),
        ("B", only_writable(), StreamOptions { tmpfs_root, ..small() }, Rung::B),
        ("C", HostDevice::default(), StreamOptions { registration: Registration::Off, ..small() }, Rung::C),
        ("C, no device support", HostDevice::new(&[]), small(), Rung::C),
        (
            "C, nothing registered",
            HostDevice::default(),
            StreamOptions { pin_limit_bytes: Some(0), ..small() },
            Rung::C,
        ),
        ("D", HostDevice::new(&[]), StreamOptions { staging_bytes: 0, ..small() }, Rung::D),
        ("D, small staging", HostDevice::new(&[]), StreamOptions { staging_bytes: (16 << 10) - 1, ..small() }, Rung::D),
        ("more slots", HostDevice::default(), StreamOptions { slots: 5, ..small() }, Rung::A),
        ("prefetch", HostDevice::default(), StreamOptions { prefetch_next_pass: true, ..small() }, Rung::A),
        (
            "prefetch, staged",
            HostDevice::new(&[]),
            StreamOptions { prefetch_next_pass: true, slots: 3, ..small() },
            Rung::C,
        ),
        ("copy back", HostDevice::default(), StreamOptions { check_copy_back: true, ..small() }, Rung::A),
        (
            "residents",
            HostDevice::default(),
            StreamOptions { resident: 3, prefetch_next_pass: true, ..small() },
            Rung::A,
        ),
        ("all resident", HostDevice::default(), small().load_all(), Rung::A),
    ]
}

#[test]
fn twenty_passes_are_byte_identical_on_every_rung() {
    let Ok(tmpfs) = tempfile::tempdir_in("/dev/shm") else { return };
    let model = Model::new(7, 50_000);
    for (name, device, options, rung) in ways(tmpfs.path()) {
        let device = Arc::new(device);
        let mut streamer =
            Streamer::open(device.clone(), model.blocks(), options).unwrap_or_else(|e| panic!("{name}: {e}"));
        for pass in 0..20 {
            let mut order = Vec::new();
            let report = streamer.pass(|block| {
                order.push(block.index());
                model.check(block)
            });
            let report = report.unwrap_or_else(|e| panic!("{name}, pass {pass}: {e}"));
            assert_eq!(order, [0, 1, 2, 3, 4, 5, 6], "{name}");
            assert_eq!(report.blocks, 7);
        }
        let report = streamer.report();
        assert_eq!(report.rung, rung, "{name}: {report:?}");
        assert_eq!(report.registered_bytes > 0, matches!(rung, Rung::A | Rung::B), "{name}");
        assert_eq!(report.pinned_bytes > 0, rung == Rung::C, "{name}");
        assert_eq!(device.registered_bytes(), report.registered_bytes, "{name}");
        streamer.close().unwrap();
        streamer.close().unwrap();
        assert_eq!(device.registered_bytes(), 0, "{name}");
        assert_eq!(streamer.begin().err().unwrap().code(), Code::BadParams, "{name}");
    }
}

#[test]
fn without_a_consumer_that_waits_copies_still_keep_to_the_slots() {
    // Nothing waits on the host here: only events keep the order.
    let model = Model::new(9, 30_000);
    for slots in [2, 3] {
        let options = StreamOptions { slots, prefetch_next_pass: true, verify_on_device: false, ..small() };
        let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).unwrap();
        for _ in 0..10 {
            let report = streamer.pass(|_| Ok(())).unwrap();
            assert_eq!(report.bytes, model.bytes.iter().map(|b| b.len() as u64).sum::<u64>());
        }
        streamer.pass(|block| model.check(block)).unwrap();
    }
}

#[test]
fn one_copy_a_block_when_registered() {
    let model = Model::new(4, 50_000);
    let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), small()).unwrap();
    let report = streamer.pass(|_| Ok(())).unwrap();
    assert_eq!((report.blocks, report.copies), (4, 4));
    let options = StreamOptions { registration: Registration::Off, ..small() };
    let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).unwrap();
    let report = streamer.pass(|_| Ok(())).unwrap();
    assert_eq!(report.copies, model.bytes.iter().map(|b| b.len().div_ceil(8 << 10) as u64).sum::<u64>());
}

#[test]
fn packed_blocks_are_computed_into_the_ring() {
    let model = Model::new(5, 40_000);
    for (rung, staging_bytes) in [(Rung::C, small().staging_bytes), (Rung::D, 0)] {
        let options = StreamOptions { staging_bytes, registration: Registration::Off, ..small() };
        let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.packed_blocks(), options).unwrap();
        for _ in 0..3 {
            streamer.pass(|block| model.check(block)).unwrap();
        }
        assert_eq!(streamer.report().rung, rung);
    }
}

#[test]
fn blocks_of_one_file_share_its_registration() {
    let model = Model::new(1, 200_000);
    let whole = &model.blocks()[0];
    let Content::File { file, path, offset } = &whole.segments[0].content else { panic!() };
    let blocks: Vec<BlockSpec> = [(0, 70_001), (70_001, 60_000), (130_001, 69_999)]
        .iter()
        .map(|(from, len)| BlockSpec {
            name: format!("{from}"),
            segments: vec![Segment {
                content: Content::File { file: file.clone(), path: path.clone(), offset: offset + from },
                len: *len,
            }],
            tensors: vec![],
        })
        .collect();
    let device = Arc::new(HostDevice::default());
    let mut streamer =
        Streamer::open(device.clone(), blocks, StreamOptions { registration_bytes: 64 << 10, ..small() }).unwrap();
    assert_eq!(device.registered_bytes(), 200_704, "4096..204096, in whole pages");
    let mut from = 0;
    let report = streamer
        .pass(|block| {
            let mut found = vec![0; block.len_bytes() as usize];
            block.read(0, &mut found)?;
            assert!(found == model.bytes[0][from..from + found.len()]);
            from += found.len();
            Ok(())
        })
        .unwrap();
    assert_eq!(from, 200_000);
    assert!(report.copies > 3, "copies do not span registrations");
}

#[test]
fn a_block_can_have_several_segments() {
    let model = Model::new(2, 10_000);
    let mut blocks = model.blocks();
    let packed = model.packed_blocks();
    blocks[0].segments.push(packed[1].segments[0].clone());
    blocks.truncate(1);
    let mut streamer = Streamer::open(Arc::new(HostDevice::default()), blocks, small()).unwrap();
    streamer
        .pass(|block| {
            assert_eq!(block.len_bytes(), 10_240 + 10_100);
            let mut found = vec![0; block.len_bytes() as usize];
            block.read(0, &mut found)?;
            assert!(found[..10_000] == model.bytes[0][..] && found[10_240..] == model.bytes[1][..]);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_held_block_is_never_overwritten() {
    let model = Model::new(8, 20_000);
    let options = StreamOptions { slots: 3, prefetch_next_pass: true, ..small() };
    let streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).unwrap();
    let mut pass = streamer.begin().unwrap();
    let first = pass.next().unwrap().unwrap();
    for _ in 1..8 {
        let next = pass.next().unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(5));
        model.check(&next).unwrap();
        drop(next);
        model.check(&first).unwrap();
    }
    assert!(pass.next().unwrap().is_none());
    std::thread::sleep(Duration::from_millis(20));
    model.check(&first).unwrap();
}

#[test]
fn blocks_are_dropped_in_any_order_and_holding_all_slots_is_an_error() {
    let model = Model::new(6, 20_000);
    let streamer =
        Streamer::open(Arc::new(HostDevice::default()), model.blocks(), StreamOptions { slots: 3, ..small() }).unwrap();
    for _ in 0..3 {
        let mut pass = streamer.begin().unwrap();
        let mut held: Vec<_> = (0..3).map(|_| pass.next().unwrap().unwrap()).collect();
        let error = pass.next().err().unwrap();
        assert!(error.message().contains("all 3 slots are held"), "{error}");
        held.swap_remove(0);
        held.push(pass.next().unwrap().unwrap());
        held.swap_remove(1);
        held.push(pass.next().unwrap().unwrap());
        held.iter().for_each(|b| model.check(b).unwrap());
        assert!(streamer.begin().is_err(), "one pass at a time");
        drop(pass);
        held.iter().for_each(|b| model.check(b).unwrap());
    }
}

#[test]
fn a_forgotten_block_costs_its_slot_and_nothing_hangs() {
    let model = Model::new(6, 20_000);
    let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), small()).unwrap();
    let mut pass = streamer.begin().unwrap();
    std::mem::forget(pass.next().unwrap());
    model.check(&pass.next().unwrap().unwrap()).unwrap();
    drop(pass);
    streamer.pass(|block| model.check(block)).unwrap();
    let mut pass = streamer.begin().unwrap();
    std::mem::forget(pass.next().unwrap());
    assert!(pass.next().is_err());
    drop(pass);
    streamer.close().unwrap();
}

#[test]
fn a_consumer_that_stops_early_can_begin_again() {
    let model = Model::new(7, 20_000);
    for resident in [0, 2, 7] {
        for prefetch_next_pass in [false, true] {
            let options = StreamOptions { resident, prefetch_next_pass, slots: 3, ..small() };
            let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).unwrap();
            for stop in [0, 1, 3, 6, 7, 2] {
                let mut pass = streamer.begin().unwrap();
                for index in 0..stop {
                    let block = pass.next().unwrap().unwrap();
                    assert_eq!(block.index(), index);
                    model.check(&block).unwrap();
                }
                drop(pass);
            }
            streamer.pass(|block| model.check(block)).unwrap();
        }
    }
}

#[test]
fn load_all_keeps_every_block_and_gives_up_its_registrations() {
    let model = Model::new(5, 60_000);
    let device = Arc::new(HostDevice::default());
    let mut streamer = Streamer::open(device.clone(), model.blocks(), small().load_all()).unwrap();
    assert!(streamer.resident_block(0).is_none());
    assert_eq!(device.registered_bytes(), 0, "registered as needed");
    let report = streamer.load_all().unwrap();
    assert_eq!((report.blocks, report.copies), (5, 5));
    assert_eq!(device.registered_bytes(), 0);
    let blocks: Vec<_> = (0..5).map(|i| streamer.resident_block(i).unwrap()).collect();
    blocks.iter().for_each(|b| model.check(b).unwrap());
    let b = blocks[3].tensor("b").unwrap();
    assert_eq!((b.address - blocks[3].address()) % 256, 0);
    assert_eq!(blocks[3].tensors().len(), 2);
    drop(blocks);
    let mut rotating = Streamer::open(device, model.blocks(), small()).unwrap();
    assert_eq!(rotating.load_all().unwrap_err().code(), Code::BadParams);
}

#[test]
fn with_many_threads_a_single_pass_is_staged() {
    let model = Model::new(5, 60_000);
    let rung = |options: StreamOptions| {
        let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).unwrap();
        streamer.load_all().unwrap();
        (0..5).for_each(|i| model.check(&streamer.resident_block(i).unwrap()).unwrap());
        streamer.report().rung
    };
    let many = StreamOptions { threads: 8, ..small().load_all() };
    assert_eq!(rung(many.clone()), Rung::C);
    assert_eq!(rung(StreamOptions { threads: 7, ..many.clone() }), Rung::A);
    assert_eq!(rung(StreamOptions { registration: Registration::Require, ..many.clone() }), Rung::A);
    assert_eq!(rung(StreamOptions { pin_limit_bytes: Some(10), ..many }), Rung::C);

    let rotating = |single_pass| {
        let options = StreamOptions { threads: 8, single_pass, ..small() };
        let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).unwrap();
        streamer.pass(|_| Ok(())).unwrap();
        streamer.report().rung
    };
    assert_eq!((rotating(true), rotating(false)), (Rung::C, Rung::A));
}

#[test]
fn a_trace_has_every_kind_of_span() {
    let model = Model::new(4, 40_000);
    for registration in [Registration::Auto, Registration::Off] {
        let trace = Arc::new(Trace::default());
        let options = StreamOptions { trace: Some(trace.clone()), registration, ..small() };
        let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).unwrap();
        streamer.pass(|_| Ok(())).unwrap();
        streamer.close().unwrap();
        for track in [Track::Copy, Track::Verify, Track::Consumer] {
            assert_eq!(trace.count(track), 4, "{track:?}");
        }
        let registered = registration == Registration::Auto;
        assert_eq!(trace.count(Track::Registration) > 0, registered);
        assert_eq!(trace.count(Track::Staging) > 0, !registered);
    }
}

#[test]
fn views_and_options_that_make_no_sense_are_refused() {
    let model = Model::new(2, 10_000);
    let open = |options| Streamer::open(Arc::new(HostDevice::default()), model.blocks(), options).err().unwrap().code();
    assert_eq!(open(StreamOptions { slots: 1, ..small() }), Code::BadParams);
    assert_eq!(open(StreamOptions { chunk_bytes: 5000, ..small() }), Code::BadParams);
    assert_eq!(open(StreamOptions { registration_bytes: 2 << 30, ..small() }), Code::BadParams);
    let mut blocks = model.blocks();
    blocks[1].tensors[0].leaf_hashes = None;
    let error = Streamer::open(Arc::new(HostDevice::default()), blocks, small()).err().unwrap();
    assert!(error.message().contains("layer.1") && error.message().contains("'a'"), "{error}");
    let mut streamer = Streamer::open(Arc::new(HostDevice::default()), model.blocks(), small()).unwrap();
    let error = streamer.pass(|block| block.read(9_000, &mut [0; 1_001])).unwrap_err();
    assert_eq!(error.code(), Code::BadParams);
}

#[test]
fn no_blocks_are_no_work() {
    let mut streamer = Streamer::open(Arc::new(HostDevice::default()), vec![], small()).unwrap();
    assert_eq!(streamer.pass(|_| Ok(())).unwrap().blocks, 0);
    let empty = BlockSpec { name: "e".into(), segments: vec![], tensors: vec![] };
    let mut streamer = Streamer::open(Arc::new(HostDevice::default()), vec![empty], small()).unwrap();
    assert_eq!(streamer.pass(|_| Ok(())).unwrap().blocks, 1);
}
