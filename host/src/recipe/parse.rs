//! TOML text into a [`Recipe`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::blocks::BlockPattern;
use super::fields::{self, Fields, Item};
use super::layout::Layout;
use super::names::{Names, Tie};
use super::source::{Source, Spot};
use super::step::Step;
use crate::error::{Code, Error, Location, Result};

/// The format that this program reads.
const FORMAT: i64 = 1;
/// The largest recipe, in bytes.
const MAX_BYTES: usize = 4 << 20;
/// The most steps of a recipe.
const MAX_STEPS: usize = 4096;

const KNOWN: &[&str] = &["recipe", "name", "step", "tie", "names", "blocks", "layout", "guards"];

/// A recipe that is well-formed: every pattern, expression and regular
/// expression in it has been read.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub(super) source: Source,
    name: String,
    pub(super) steps: Vec<Step>,
    pub(super) ties: Vec<Tie>,
    pub(super) names: Names,
    pub(super) blocks: Vec<BlockPattern>,
    pub(super) layout: Layout,
    pub(super) guards: BTreeMap<String, String>,
}

impl Recipe {
    /// Reads a recipe's text. `file` is only named in errors.
    ///
    /// # Errors
    /// `recipe_invalid`, with the place; `bad_tensor_name` for an alias.
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        let source = Source::new(file, text);
        if text.len() > MAX_BYTES {
            return Err(too_large(file));
        }
        let document = DeTable::parse(text).map_err(|e| {
            let spot = Spot::at(e.span().map_or(0, |span| span.start));
            source.invalid(spot, format!("this is no TOML: {}", e.message().trim().replace('\n', ", ")))
        })?;
        let table = document.get_ref();
        check_format(&source, table)?;
        let fields = Fields::open(&source, "a recipe", Spot::at(0), table, KNOWN)?;
        let name_item = fields.require("name")?;
        let name = fields::string(&source, "name", name_item)?;
        if name.trim().is_empty() || name.chars().any(char::is_control) {
            return Err(source.invalid(Spot::of(name_item), "'name' is empty or has a control character"));
        }
        Ok(Recipe {
            name: name.to_owned(),
            steps: read_steps(&source, fields.get("step"))?,
            ties: match fields.get("tie") {
                Some(item) => fields::array(&source, "tie", item)?
                    .iter()
                    .map(|item| Tie::read(&source, item))
                    .collect::<Result<_>>()?,
                None => Vec::new(),
            },
            names: fields.get("names").map(|item| Names::read(&source, item)).transpose()?.unwrap_or_default(),
            blocks: fields
                .get("blocks")
                .map(|item| BlockPattern::read_all(&source, item))
                .transpose()?
                .unwrap_or_default(),
            layout: fields.get("layout").map(|item| Layout::read(&source, item)).transpose()?.unwrap_or_default(),
            guards: fields.get("guards").map(|item| read_guards(&source, item)).transpose()?.unwrap_or_default(),
            source,
        })
    }

    /// Reads a recipe's file.
    ///
    /// # Errors
    /// `io_error`, or what [`parse`](Self::parse) says.
    pub fn load(path: &Path) -> Result<Self> {
        let failed = |e| Error::io(format_args!("the recipe {} cannot be read", path.display()), e);
        let file = File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() > MAX_BYTES {
            return Err(too_large(path));
        }
        match std::str::from_utf8(&bytes) {
            Ok(text) => Recipe::parse(text, path),
            Err(e) => {
                let source = Source::new(path, &String::from_utf8_lossy(&bytes));
                Err(source.invalid(Spot::at(e.valid_up_to()), "a recipe is UTF-8, and here is a byte that is not"))
            }
        }
    }

    /// The recipe's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that it was read from, as the user named it.
    pub fn file(&self) -> &Path {
        self.source.file()
    }

    /// The SHA-256 of the recipe's text.
    pub fn text_digest(&self) -> crate::digest::BlobDigest {
        self.source.digest()
    }

    /// The steps, in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Where the value of a parameter of a step (counted from 0, as in
    /// [`steps`](Self::steps)) is, or the step if it does not have the
    /// parameter.
    ///
    /// # Panics
    /// If there is no such step.
    pub fn param_location(&self, step: usize, param: &str) -> Location {
        let step = &self.steps[step];
        match step.params.spot(param) {
            Some(spot) => self.source.locate(spot),
            None => step.at().clone(),
        }
    }

    /// Where the pattern of an input role of a step is, or the step if it does
    /// not have the role.
    ///
    /// # Panics
    /// If there is no such step.
    pub fn input_location(&self, step: usize, role: &str) -> Location {
        let step = &self.steps[step];
        match step.inputs.iter().find(|input| input.name == role) {
            Some(input) => self.source.locate(input.spot),
            None => step.at().clone(),
        }
    }

    /// Where the name of an output role of a step is, or the step if it does
    /// not have the role.
    ///
    /// # Panics
    /// If there is no such step.
    pub fn output_location(&self, step: usize, role: &str) -> Location {
        let step = &self.steps[step];
        match step.outputs.iter().find(|output| output.name == role) {
            Some(output) => self.source.locate(output.spot),
            None => step.at().clone(),
        }
    }
}

fn too_large(file: &Path) -> Error {
    Error::new(Code::RecipeInvalid, format!("the recipe has more than {MAX_BYTES} bytes")).at(Location {
        file: file.to_path_buf(),
        line: 1,
        column: 1,
    })
}

/// Looks at the version before anything else: a later format has fields that
/// are unknown here.
fn check_format(source: &Source, table: &DeTable<'_>) -> Result<()> {
    let Some(item) = table.get("recipe") else {
        return Err(source
            .invalid(Spot::at(0), "a recipe lacks the field 'recipe'")
            .hint(format!("begin it with recipe = {FORMAT}")));
    };
    match fields::integer(source, "recipe", item)? {
        FORMAT => Ok(()),
        other => Err(source
            .invalid(Spot::of(item), format!("this is recipe format {other}; this program reads format {FORMAT}"))
            .hint("use a program that knows that format")),
    }
}

fn read_steps(source: &Source, item: Option<&Item<'_>>) -> Result<Vec<Step>> {
    let Some(item) = item else {
        return Ok(Vec::new());
    };
    let items = fields::array(source, "step", item)?;
    if items.len() > MAX_STEPS {
        return Err(source.invalid(Spot::of(item), format!("the recipe has more than {MAX_STEPS} steps")));
    }
    items.iter().enumerate().map(|(index, item)| Step::read(source, index + 1, item)).collect()
}

fn read_guards(source: &Source, item: &Item<'_>) -> Result<BTreeMap<String, String>> {
    let guards = fields::table(source, "guards", item)?.iter().map(|(key, item)| match item.get_ref() {
        DeValue::String(text) => Ok((key.get_ref().to_string(), text.to_string())),
        _ => Err(fields::wrong_type(source, key.get_ref(), "a string", item)),
    });
    guards.collect()
}
