//! Every golden case that goes well, on V8: other engine, other executor, and
//! both written from the ABI's specification alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use weightmill::checkpoint::Checkpoint;
use weightmill::digest::{leaf_hashes, tensor_digest};
use weightmill::recipe::Recipe;
use weightmill::sandbox::EngineName;
use weightmill_tests::execution::Host;
use weightmill_tests::golden::{Row, rows, with_one_nan};
use weightmill_tests::v8::{Answer, V8};

/// Tile sizes, each with an order.
const SETTINGS: [(u64, Option<u64>); 3] = [(1 << 20, None), (4096, Some(7)), (16, Some(8))];

#[test]
fn golden_cases_give_the_same_digests_on_v8() {
    compare("tests/golden/cases", 150);
}

#[test]
fn recipes_for_real_models_give_the_same_digests_on_v8() {
    compare("tests/models/cases", 40);
}

fn compare(folder: &str, rows_min: usize) {
    let Some(v8) = V8::find() else { return };
    let host = Host::new(EngineName::Wasmi);
    let rows: Vec<Row> = rows(folder).into_iter().filter(|row| row.expected.is_ok()).collect();
    assert!(rows.len() >= rows_min, "{} rows go well", rows.len());
    let mut jobs = Vec::new();
    for row in &rows {
        let recipe = Recipe::load(&row.recipe).unwrap();
        let checkpoint = Arc::new(Checkpoint::open(&row.checkpoint).unwrap());
        for (tile_bytes, seed) in SETTINGS {
            let outline = host.outline(&recipe, &checkpoint, row.tp, tile_bytes).unwrap();
            jobs.push((row, v8.job(&outline, tile_bytes, seed).unwrap(), outline.resolution.aliases.clone()));
        }
    }
    let documents: Vec<_> = jobs.iter().map(|(_, job, _)| job.clone()).collect();
    let mut faults = Vec::new();
    let mut with_nans = Vec::new();
    for ((row, _, aliases), answer) in jobs.iter().zip(v8.run(&documents)) {
        let expected = expected(row);
        let exact = answer.as_ref().is_ok_and(|table| {
            table.iter().all(|(name, got)| expected.get(name).is_some_and(|want| want.digest == got.digest))
        });
        let aliases = aliases.iter().map(|(alias, of)| (alias.to_string(), of.to_string()));
        match difference(answer, aliases, &expected) {
            Some(difference) => faults.push(format!("{}: {difference}", row.place())),
            None if !exact => with_nans.push(row.place()),
            None => {}
        }
    }
    assert!(faults.is_empty(), "{} of {} jobs differ:\n{}", faults.len(), jobs.len(), faults.join("\n"));
    with_nans.dedup();
    println!("{} rows agree; equal only up to the bits of NaNs: {with_nans:?}", rows.len());
}

/// A tensor that must come out.
struct Expected {
    kind: (String, Vec<u64>),
    digest: String,
    digest_with_one_nan: String,
    has_nan: bool,
}

fn expected(row: &Row) -> BTreeMap<String, Expected> {
    let bytes = std::fs::read(row.expected.as_ref().unwrap()).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let of = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = serde_json::to_value(view.dtype()).unwrap().as_str().unwrap().to_string();
        let digest = |bytes: &[u8]| tensor_digest(bytes.len() as u64, &leaf_hashes(bytes)).to_string();
        let one_nan = with_one_nan(&dtype, view.data());
        let expected = Expected {
            kind: (dtype, view.shape().iter().map(|&extent| extent as u64).collect()),
            digest: digest(view.data()),
            digest_with_one_nan: digest(&one_nan.0),
            has_nan: one_nan.1,
        };
        (name, expected)
    };
    file.tensors().into_iter().map(of).collect()
}

/// Bit for bit where no NaN is expected; else up to the NaNs' bits.
fn difference(
    answer: Answer,
    aliases: impl Iterator<Item = (String, String)>,
    expected: &BTreeMap<String, Expected>,
) -> Option<String> {
    let mut table = match answer {
        Ok(table) => table,
        Err(error) => return Some(error),
    };
    for (alias, of) in aliases {
        let Some(row) = table.get(&of).cloned() else {
            return Some(format!("{alias} is tied to {of}, which is missing"));
        };
        table.insert(alias, row);
    }
    if !table.keys().eq(expected.keys()) {
        return Some(format!("tensors {:?}, expected {:?}", table.keys(), expected.keys()));
    }
    table.into_iter().find_map(|(name, got)| {
        let want = &expected[&name];
        if (&got.dtype, &got.shape) != (&want.kind.0, &want.kind.1) {
            return Some(format!("{name} is {} {:?}, expected {:?}", got.dtype, got.shape, want.kind));
        }
        let same = match want.has_nan {
            false => got.digest == want.digest,
            true => got.digest_with_one_nan == want.digest_with_one_nan,
        };
        (!same).then(|| format!("{name} has {}, expected {}", got.digest, want.digest))
    })
}
