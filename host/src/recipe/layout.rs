//! How blocks are cut into shards, and sizes as people write them.

use toml::de::DeValue;

use super::fields::{self, Fields, Item};
use super::source::{Source, Spot};
use crate::canonical::MAX_INTEGER;
use crate::error::Result;

/// The `[layout]` of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layout {
    /// A block with more bytes becomes several shards; a tensor is never split.
    pub max_shard_bytes: u64,
}

impl Default for Layout {
    fn default() -> Self {
        Layout { max_shard_bytes: 4 << 30 }
    }
}

impl Layout {
    pub(super) fn read(source: &Source, item: &Item<'_>) -> Result<Self> {
        let fields = Fields::open_item(source, "[layout]", item, &["max_shard"])?;
        let Some(item) = fields.get("max_shard") else {
            return Ok(Layout::default());
        };
        let bytes = match item.get_ref() {
            DeValue::String(text) => parse_size(text),
            DeValue::Integer(_) => Some(fields::natural(source, "max_shard", item)?),
            _ => return Err(fields::wrong_type(source, "max_shard", "a size", item)),
        };
        match bytes {
            Some(max_shard_bytes) if max_shard_bytes > 0 => Ok(Layout { max_shard_bytes }),
            _ => Err(source
                .invalid(Spot::of(item), "'max_shard' is no size of 1 to 2^53-1 bytes")
                .hint("write \"4GiB\", \"512MiB\", \"2GB\" or a number of bytes")),
        }
    }
}

/// Reads a size in bytes: a decimal integer and, if need be, a unit: `B`,
/// `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024) or `kB`, `KB`, `MB`, `GB`, `TB`
/// (powers of 1000). `None` if it is none, or beyond 2⁵³−1.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim_start() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(scale).filter(|bytes| *bytes <= MAX_INTEGER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_and_decimal_units() {
        for (text, want) in [
            ("4GiB", Some(4 << 30)),
            ("512MiB", Some(512 << 20)),
            ("1 KiB", Some(1024)),
            ("2TiB", Some(2 << 40)),
            ("3GB", Some(3_000_000_000)),
            ("7kB", Some(7000)),
            ("12", Some(12)),
            ("12B", Some(12)),
            ("0", Some(0)),
            ("", None),
            ("GiB", None),
            ("1.5GiB", None),
            ("-1", None),
            ("4gib", None),
            ("4G", None),
            ("9007199254740992", None),
            ("99999999TiB", None),
            ("99999999999999999999", None),
            ("é", None),
        ] {
            assert_eq!(parse_size(text), want, "{text:?}");
        }
    }
}
