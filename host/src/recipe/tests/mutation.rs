//! Recipes that were damaged at random: an answer or an error, never a panic.

use std::collections::BTreeSet;

use serde_json::json;

use super::*;

const CORPUS: &[&str] = &[
    r#"recipe = 1
name = "gpt-neox"
[[step]]
module = "qkv-regroup"
inputs = { qkv = "h.{i}.qkv.weight" }
outputs = { qkv = "h.{i}.w.{i}" }
params = { groups = "$config.heads", q_per_group = 1, head_dim = "$config.hidden / $config.heads * 2 ?? 3" }
[[step]]
module = "cast"
inputs = { w = "{path...}", "s?" = "s" }
outputs = { w = "{path...}" }
where = { dtype = ["F32", "BF16"], not = ["*norm*", "*.rope.inv_freq"], ndim = [1, 2] }
optional = true
params = { dtype = "BF16", x = [1.5, { y = true }], z = "$$a" }
[names]
drop = ["*.inv_freq"]
rename = [["^h\\.(.*)$", "model.$1"], ["(?P<n>o)", "${n}$n$$"]]
unmatched = "keep"
[blocks]
patterns = ["model.{i}.", "{p...}."]
[layout]
max_shard = "4GiB"
[guards]
sequence_parallel = "ulysses:2"
"#,
    r#"recipe = 1
name = "moe"
[[step]]
module = "oci://r.io/a:v1"
inputs = { w1 = "e.{*e}.w1", w2 = "e.{*e}.w2" }
outputs = { w = "e.w" }
count = "$config.heads"
sparse = true
keep_inputs = true
tp = false
[[step]]
module = "./m.wasm"
inputs = { a = "e.{i}.w1", b = "e.w" }
outputs = { a = "x.{i}" }
each = "a"
[[tie]]
alias = "head"
of = "x.0"
"#,
];

/// xorshift64*: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % bound
    }
}

/// Pieces that mean something to the parsers.
const PIECES: &[&str] = &[
    "{",
    "}",
    "{i}",
    "{*e}",
    "{p...}",
    "$",
    "$$",
    "$config.",
    "??",
    "*",
    "/",
    "\"",
    "'",
    "\n",
    "[",
    "]",
    "[[step]]\n",
    "=",
    ".",
    "0",
    "9007199254740992",
    "-1",
    "é",
    "\u{0}",
    "nan",
    "true",
    "1979-05-27",
    "rest",
    "${",
    "(",
    ")",
    "\\",
    ",",
    "#",
    "?",
    "each = \"a\"\n",
];

fn damage(text: &str, random: &mut Random) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for _ in 0..=random.below(4) {
        let at = random.below(chars.len().max(1)).min(chars.len());
        let end = (at + random.below(8)).min(chars.len());
        match random.below(4) {
            0 => drop(chars.drain(at..end)),
            1 => drop(chars.splice(at..at, PIECES[random.below(PIECES.len())].chars())),
            2 => drop(chars.splice(at..end, PIECES[random.below(PIECES.len())].chars())),
            _ => {
                let copy: Vec<char> = chars[at..end].to_vec();
                let to = random.below(chars.len() + 1);
                drop(chars.splice(to..to, copy));
            }
        }
    }
    chars.into_iter().collect()
}

#[test]
fn damaged_recipes_never_panic() {
    let tensors = sources(&[
        "h.0.qkv.weight",
        "h.1.qkv.weight:F32",
        "h.0.norm:F32:1",
        "s",
        "e.0.w1",
        "e.1.w1",
        "e.0.w2",
        "e.1.w2",
        "a.rope.inv_freq:F32:1",
    ]);
    let config = json!({"heads": 2, "hidden": 8});
    for recipe in CORPUS {
        let recipe = Recipe::parse(recipe, Path::new("r.toml")).unwrap();
        resolve(&recipe, &tensors, Some(&config), &mut Flat::default()).unwrap();
    }
    let mut codes = BTreeSet::new();
    let mut whole = 0;
    for seed in 1..=6000_u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let text = damage(CORPUS[random.below(CORPUS.len())], &mut random);
        let caught = std::panic::catch_unwind(|| {
            let recipe = Recipe::parse(&text, Path::new("r.toml"))?;
            resolve(&recipe, &tensors, Some(&config), &mut Flat::default())
        });
        match caught {
            Ok(Ok(resolution)) => {
                whole += 1;
                let in_blocks: usize = resolution.blocks.iter().map(|block| block.tensors.len()).sum();
                assert_eq!(in_blocks, resolution.tensors.len(), "seed {seed}: every tensor is in one block");
                assert!(resolution.aliases.values().all(|of| resolution.tensors.contains_key(of)), "seed {seed}");
            }
            Ok(Err(error)) => {
                assert!(error.location().is_some(), "seed {seed}: {error} has no place in\n{text}");
                codes.insert(error.code().as_str());
            }
            Err(_) => panic!("seed {seed} panicked on\n{text}"),
        }
    }
    assert!(whole > 100, "{whole} recipes survived");
    assert!(codes.len() >= 6, "the damage reaches deep: {codes:?}");
}
