//! `where`: which candidate tensors a step looks at.

use toml::de::DeValue;

use super::fields::{self, Fields, Item};
use super::glob::Glob;
use super::source::{Source, Spot};
use crate::error::{Result, nearest};
use crate::tensor::{Dtype, TensorType};

const KNOWN: &[&str] = &["dtype", "ndim", "only", "not"];

/// The conditions, all of which must hold. An absent one holds always.
#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    dtypes: Option<Vec<Dtype>>,
    ndims: Option<Vec<u64>>,
    only: Option<Vec<Glob>>,
    not: Vec<Glob>,
}

impl Filter {
    pub(super) fn read(source: &Source, item: &Item<'_>) -> Result<Self> {
        let fields = Fields::open_item(source, "where", item, KNOWN)?;
        let globs = |field| match fields.get(field) {
            None => Ok(None),
            Some(item) => {
                fields::strings(source, field, item).map(|texts| Some(texts.into_iter().map(Glob::new).collect()))
            }
        };
        let dtype = |item| read_dtype(source, item);
        let dtypes = fields.get("dtype").map(|item| fields::array(source, "dtype", item)?.iter().map(dtype).collect());
        let ndims = fields.get("ndim").map(|item| match item.get_ref() {
            DeValue::Array(items) => items.iter().map(|item| fields::natural(source, "ndim", item)).collect(),
            _ => fields::natural(source, "ndim", item).map(|ndim| vec![ndim]),
        });
        Ok(Filter {
            dtypes: dtypes.transpose()?,
            ndims: ndims.transpose()?,
            only: globs("only")?,
            not: globs("not")?.unwrap_or_default(),
        })
    }

    pub(super) fn accepts_name(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|globs| globs.iter().any(|glob| glob.matches(name)))
            && !self.not.iter().any(|glob| glob.matches(name))
    }

    /// Whether [`accepts_type`](Self::accepts_type) can say no.
    pub(super) fn looks_at_types(&self) -> bool {
        self.dtypes.is_some() || self.ndims.is_some()
    }

    pub(super) fn accepts_type(&self, tensor: &TensorType) -> bool {
        self.dtypes.as_ref().is_none_or(|dtypes| dtypes.contains(&tensor.dtype()))
            && self.ndims.as_ref().is_none_or(|ndims| ndims.contains(&(tensor.shape().len() as u64)))
    }
}

fn read_dtype(source: &Source, item: &Item<'_>) -> Result<Dtype> {
    let text = fields::string(source, "dtype", item)?;
    Dtype::ALL.iter().copied().find(|dtype| dtype.as_str() == text).ok_or_else(|| {
        let error = source.invalid(Spot::of(item), format!("there is no dtype '{}'", fields::shown(text)));
        match nearest(&text.to_ascii_uppercase(), Dtype::ALL.iter().map(|dtype| dtype.as_str())) {
            Some(near) => error.hint(format!("did you mean '{near}'?")),
            None => error.hint("dtypes have their safetensors names, such as F32 or BF16"),
        }
    })
}
