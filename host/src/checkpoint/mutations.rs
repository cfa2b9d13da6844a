//! Damaged bytes: every truncation, and mutations from a seed
//! (`WEIGHTMILL_SEED`, printed when something fails).

use std::time::{Duration, Instant};

use super::hostile::{self, file, tensor};
use super::{Checkpoint, header, parse_index};
use crate::error::{Code, Error, Result};

#[test]
fn every_truncation_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let rows = [tensor("a", "F32", "[2,1]", 0, 8), tensor("e", "U8", "[0]", 8, 8), tensor("é", "F4", "[2]", 8, 9)];
    let whole = file(&format!("{{\"__metadata__\":{{\"k\":\"v\"}},{}}}   ", rows.join(",")), 9);
    for len in 0..=whole.len() {
        // The pure functions for every length, the file where it is cut at an edge.
        let parsed = parse_whole(&whole[..len]);
        assert_eq!(parsed.is_ok(), len == whole.len(), "{len}");
    }
    for len in [0, 1, 7, 8, 9, whole.len() - 9, whole.len() - 1, whole.len()] {
        std::fs::write(&path, &whole[..len]).unwrap();
        let code = Checkpoint::open(&path).err().map(|e| e.code());
        assert_eq!(code, (len < whole.len()).then_some(Code::CheckpointInvalid), "{len}");
    }
}

fn parse_whole(bytes: &[u8]) -> Result<header::Header> {
    let short = || Error::new(Code::CheckpointInvalid, "short");
    let (prefix, rest) = bytes.split_first_chunk().ok_or_else(short)?;
    let len = header::header_len(bytes.len() as u64, *prefix)?;
    header::parse(bytes.len() as u64, &rest[..len])
}

/// A seeded generator (splitmix64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        const TOKENS: &[&str] = &[
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "\\",
            "\\u0000",
            "0",
            "-1",
            "1e3",
            "9007199254740993",
            "[0]",
            "null",
            "\"a\"",
            "\"__pad__.0\":",
            "\"shape\":",
            "\"U8\"",
            " ",
            "é",
            "18446744073709551615",
        ];
        let at = self.below(bytes.len() + 1);
        let until = (at + self.below(12)).min(bytes.len());
        match self.below(6) {
            0 if at < bytes.len() => bytes[at] = self.below(256) as u8,
            1 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            2 => drop(bytes.drain(at..until)),
            3 => {
                let again = bytes[at..until].to_vec();
                let to = self.below(bytes.len() + 1);
                bytes.splice(to..to, again);
            }
            4 => drop(bytes.splice(at..at, TOKENS[self.below(TOKENS.len())].bytes())),
            _ => bytes.truncate(at.max(bytes.len() / 2)),
        }
    }
}

#[test]
fn mutated_bytes_give_typed_errors_or_what_the_stock_reader_sees() {
    let seed = std::env::var("WEIGHTMILL_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20_250_101);
    let mut random = Random(seed);
    let seeds: Vec<Vec<u8>> = hostile::cases()
        .into_iter()
        .flat_map(|case| case.files)
        .filter(|(name, bytes)| name.ends_with(".safetensors") && bytes.len() < 4096)
        .map(|(_, bytes)| bytes)
        .collect();
    let began = Instant::now();
    let mut accepted = 0;
    for turn in 0..60_000 {
        let mut bytes = seeds[random.below(seeds.len())].clone();
        for _ in 0..=random.below(3) {
            random.mutate(&mut bytes);
        }
        // Every other time the length is made right again, to get further in.
        if turn % 2 == 0 && bytes.len() >= 8 {
            let data_len = random.below(12).min(bytes.len() - 8);
            let header_len = (bytes.len() - 8 - data_len) as u64;
            bytes[..8].copy_from_slice(&header_len.to_le_bytes());
        }
        match parse_whole(&bytes) {
            Ok(header) => {
                accepted += 1;
                let stock = safetensors::SafeTensors::deserialize(&bytes);
                let stock = stock.unwrap_or_else(|e| panic!("seed {seed} turn {turn}: only the stock reader says {e}"));
                for (name, place) in &header.tensors {
                    let range = place.offset as usize..(place.offset + place.tensor.len_bytes()) as usize;
                    assert_eq!(stock.tensor(name.as_str()).unwrap().data(), &bytes[range], "seed {seed} turn {turn}");
                }
            }
            Err(e) => {
                let input = matches!(e.code(), Code::CheckpointInvalid | Code::BadTensorName);
                assert!(input && e.message().len() < 2000, "seed {seed} turn {turn}: {e}");
            }
        }
        let _ = parse_index(&bytes);
    }
    assert!(accepted > 100, "the mutations reach what is valid: {accepted}");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}
