//! `[blocks]`: what is streamed as one unit.

use std::collections::BTreeMap;

use super::fields::{self, Fields, Item};
use super::natural::Natural;
use super::pattern::{Form, Pattern};
use super::resolution::Block;
use super::source::{Source, Spot};
use crate::error::Result;
use crate::tensor::TensorName;

/// The name of the block that holds what no pattern matched; always first.
const REST: &str = "rest";
/// The most patterns of a recipe.
const MAX_PATTERNS: usize = 4096;

/// A prefix of final names. A block is all tensors whose matched text is the
/// same under the first pattern that matches them.
#[derive(Clone, Debug)]
pub(super) struct BlockPattern {
    pattern: Pattern,
    spot: Spot,
}

impl BlockPattern {
    pub(super) fn read_all(source: &Source, item: &Item<'_>) -> Result<Vec<Self>> {
        let fields = Fields::open_item(source, "[blocks]", item, &["patterns"])?;
        let Some(item) = fields.get("patterns") else {
            return Ok(Vec::new());
        };
        let items = fields::array(source, "patterns", item)?;
        if items.len() > MAX_PATTERNS {
            return Err(source.invalid(Spot::of(item), format!("'patterns' has more than {MAX_PATTERNS} patterns")));
        }
        items.iter().map(|item| BlockPattern::read(source, item)).collect()
    }

    fn read(source: &Source, item: &Item<'_>) -> Result<Self> {
        let spot = Spot::of(item);
        let pattern =
            Pattern::parse(fields::string(source, "patterns", item)?).map_err(|e| e.at(source.locate(spot)))?;
        match pattern.captures().iter().find(|capture| capture.form == Form::List) {
            Some(list) => {
                Err(source.invalid(spot, format!("a block's pattern cannot have the list capture {}", list.written())))
            }
            None => Ok(BlockPattern { pattern, spot }),
        }
    }
}

/// Puts every tensor into its block, and the blocks into stream order: `rest`,
/// then by pattern, then by the natural order of the captures' values.
///
/// # Errors
/// `recipe_invalid` if a matched text is `rest`.
pub(super) fn form_blocks<'n>(
    source: &Source,
    patterns: &[BlockPattern],
    names: impl IntoIterator<Item = &'n TensorName>,
) -> Result<Vec<Block>> {
    let mut rest = Vec::new();
    let mut blocks: BTreeMap<(usize, Vec<Natural<'n>>, &'n str), Vec<TensorName>> = BTreeMap::new();
    for name in names {
        match find_block(source, patterns, name)? {
            Some(key) => blocks.entry(key).or_default().push(name.clone()),
            None => rest.push(name.clone()),
        }
    }
    let rest = (!rest.is_empty()).then(|| Block { name: REST.to_owned(), tensors: rest });
    let named = blocks.into_iter().map(|((_, _, text), tensors)| Block { name: text.to_owned(), tensors });
    Ok(rest.into_iter().chain(named).collect())
}

fn find_block<'n>(
    source: &Source,
    patterns: &[BlockPattern],
    name: &'n TensorName,
) -> Result<Option<(usize, Vec<Natural<'n>>, &'n str)>> {
    let name = name.as_str();
    for (index, block) in patterns.iter().enumerate() {
        let found = block.pattern.match_prefix(name).map_err(|e| e.at(source.locate(block.spot)))?;
        if let Some(found) = found {
            let text = &name[..found.end];
            if text == REST {
                return Err(source
                    .invalid(block.spot, format!("the pattern '{}' makes a block named '{REST}'", block.pattern.text()))
                    .hint("that is the name of the block of what no pattern matches"));
            }
            return Ok(Some((index, found.values.into_iter().map(Natural).collect(), text)));
        }
    }
    Ok(None)
}
