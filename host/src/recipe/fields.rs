//! Typed reading of TOML tables: every mistake is a `recipe_invalid` with a
//! place, and an unknown field names the nearest known one.

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::source::{Source, Spot};
use crate::canonical::MAX_INTEGER;
use crate::error::{Error, Result, nearest};

/// A value of the document and its place.
pub(super) type Item<'t> = Spanned<DeValue<'t>>;

/// A table whose fields are all known.
pub(super) struct Fields<'t> {
    source: &'t Source,
    /// What the table is, for messages: "a step".
    what: &'static str,
    spot: Spot,
    items: BTreeMap<&'t str, &'t Item<'t>>,
}

impl<'t> Fields<'t> {
    pub(super) fn open(
        source: &'t Source,
        what: &'static str,
        spot: Spot,
        table: &'t DeTable<'t>,
        known: &[&str],
    ) -> Result<Self> {
        let mut items = BTreeMap::new();
        for (key, item) in table.iter() {
            let name: &str = key.get_ref();
            if !known.contains(&name) {
                let error = source.invalid(Spot::of(key), format!("{what} has no field '{}'", shown(name)));
                return Err(match nearest(name, known.iter().copied()) {
                    Some(near) => error.hint(format!("did you mean '{near}'?")),
                    None => error.hint(format!("known fields: {}", known.join(", "))),
                });
            }
            items.insert(name, item);
        }
        Ok(Fields { source, what, spot, items })
    }

    /// Opens a value that must be a table.
    pub(super) fn open_item(
        source: &'t Source,
        what: &'static str,
        item: &'t Item<'t>,
        known: &[&str],
    ) -> Result<Self> {
        match item.get_ref() {
            DeValue::Table(table) => Fields::open(source, what, Spot::of(item), table, known),
            _ => Err(wrong_type(source, what, "a table", item)),
        }
    }

    pub(super) fn get(&self, field: &str) -> Option<&'t Item<'t>> {
        self.items.get(field).copied()
    }

    pub(super) fn require(&self, field: &str) -> Result<&'t Item<'t>> {
        self.get(field)
            .ok_or_else(|| self.source.invalid(self.spot, format!("{} lacks the field '{field}'", self.what)))
    }

    /// A boolean, if it is there.
    pub(super) fn boolean(&self, field: &str) -> Result<Option<bool>> {
        match self.get(field).map(|item| (item, item.get_ref())) {
            None => Ok(None),
            Some((_, DeValue::Boolean(value))) => Ok(Some(*value)),
            Some((item, _)) => Err(wrong_type(self.source, field, "a boolean", item)),
        }
    }
}

/// A string.
pub(super) fn string<'t>(source: &Source, what: &str, item: &'t Item<'t>) -> Result<&'t str> {
    match item.get_ref() {
        DeValue::String(text) => Ok(text),
        _ => Err(wrong_type(source, what, "a string", item)),
    }
}

/// An array of anything.
pub(super) fn array<'t>(source: &Source, what: &str, item: &'t Item<'t>) -> Result<&'t [Item<'t>]> {
    match item.get_ref() {
        DeValue::Array(items) => Ok(items),
        _ => Err(wrong_type(source, what, "an array", item)),
    }
}

/// A table of anything.
pub(super) fn table<'t>(source: &Source, what: &str, item: &'t Item<'t>) -> Result<&'t DeTable<'t>> {
    match item.get_ref() {
        DeValue::Table(table) => Ok(table),
        _ => Err(wrong_type(source, what, "a table", item)),
    }
}

/// An array of strings.
pub(super) fn strings<'t>(source: &Source, what: &str, item: &'t Item<'t>) -> Result<Vec<&'t str>> {
    array(source, what, item)?.iter().map(|item| string(source, what, item)).collect()
}

/// An integer within ±(2⁵³−1).
pub(super) fn integer(source: &Source, what: &str, item: &Item<'_>) -> Result<i64> {
    match item.get_ref() {
        DeValue::Integer(value) => exact(value).ok_or_else(|| beyond(source, what, item)),
        _ => Err(wrong_type(source, what, "an integer", item)),
    }
}

/// An integer from 0 to 2⁵³−1.
pub(super) fn natural(source: &Source, what: &str, item: &Item<'_>) -> Result<u64> {
    let value = integer(source, what, item)?;
    u64::try_from(value)
        .map_err(|_| source.invalid(Spot::of(item), format!("'{what}' is {value}; it cannot be negative")))
}

/// The value if canonical JSON can say it.
pub(super) fn exact(value: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(value.as_str(), value.radix()).ok().filter(|n| n.unsigned_abs() <= MAX_INTEGER)
}

pub(super) fn beyond(source: &Source, what: &str, item: &Item<'_>) -> Error {
    source.invalid(Spot::of(item), format!("'{}' has an integer beyond ±(2^53-1)", shown(what)))
}

pub(super) fn wrong_type(source: &Source, what: &str, wanted: &str, item: &Item<'_>) -> Error {
    let found = item.get_ref().type_str();
    let article = if found.starts_with(['a', 'i']) { "an" } else { "a" };
    source.invalid(Spot::of(item), format!("'{}' must be {wanted}, found {article} {found}", shown(what)))
}

/// A key as it may stand in a message.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}
