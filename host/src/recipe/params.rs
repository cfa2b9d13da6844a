//! A step's parameters: TOML turned into JSON, with `$config` expressions in
//! place of values, at any depth.

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::expression::{Expression, PREFIX};
use super::fields::{self, Item};
use super::source::{Source, Spot};
use crate::error::{Error, Result};

/// The parameters of a step.
#[derive(Clone, Debug, Default)]
pub(super) struct Params(Vec<Param>);

#[derive(Clone, Debug)]
struct Param {
    key: String,
    spot: Spot,
    node: Node,
}

#[derive(Clone, Debug)]
enum Node {
    Value(Value),
    Expression(Expression, Spot),
    Array(Vec<Node>),
    Table(Vec<(String, Node)>),
}

impl Params {
    pub(super) fn read(source: &Source, table: &DeTable<'_>) -> Result<Self> {
        let param = |(key, item): (&Spanned<_>, &Item<'_>)| {
            let key: &std::borrow::Cow<'_, str> = key.get_ref();
            Ok(Param { key: key.to_string(), spot: Spot::of(item), node: Node::read(source, key, item)? })
        };
        Ok(Params(table.iter().map(param).collect::<Result<_>>()?))
    }

    /// Where a parameter's value is.
    pub(super) fn spot(&self, key: &str) -> Option<Spot> {
        self.0.iter().find(|param| param.key == key).map(|param| param.spot)
    }

    /// The parameters as a JSON object.
    ///
    /// # Errors
    /// `missing_config` or `bad_params`, at the expression.
    pub(super) fn evaluate(&self, source: &Source, config: Option<&Value>) -> Result<Value> {
        let object = self.0.iter().map(|param| {
            let value = param.node.evaluate(source, config);
            let value = value.map_err(|e| e.context(format!("parameter '{}'", fields::shown(&param.key))))?;
            Ok((param.key.clone(), value))
        });
        Ok(Value::Object(object.collect::<Result<_>>()?))
    }
}

impl Node {
    fn read(source: &Source, key: &str, item: &Item<'_>) -> Result<Self> {
        let refuse =
            |what: &str| Err(source.invalid(Spot::of(item), format!("the parameter '{}' {what}", fields::shown(key))));
        Ok(match item.get_ref() {
            DeValue::String(text) => return Node::read_string(text, Spot::of(item), source),
            DeValue::Boolean(value) => Node::Value((*value).into()),
            DeValue::Integer(value) => match fields::exact(value) {
                Some(value) => Node::Value(value.into()),
                None => return Err(fields::beyond(source, key, item).hint("write it as a string or a float")),
            },
            DeValue::Float(value) => match value.as_str().parse().ok().and_then(serde_json::Number::from_f64) {
                Some(value) => Node::Value(value.into()),
                None => return refuse("is a float that is not finite"),
            },
            DeValue::Datetime(_) => return refuse("is a date, which JSON does not have"),
            DeValue::Array(items) => {
                Node::Array(items.iter().map(|item| Node::read(source, key, item)).collect::<Result<_>>()?)
            }
            DeValue::Table(table) => {
                let entry = |(inner, item): (&Spanned<_>, _)| {
                    let inner: &std::borrow::Cow<'_, str> = inner.get_ref();
                    Ok((inner.to_string(), Node::read(source, inner, item)?))
                };
                Node::Table(table.iter().map(entry).collect::<Result<_>>()?)
            }
        })
    }

    fn read_string(text: &str, spot: Spot, source: &Source) -> Result<Self> {
        if text.starts_with(PREFIX) {
            let expression = Expression::parse(text).map_err(|e| e.at(source.locate(spot)))?;
            return Ok(Node::Expression(expression, spot));
        }
        // `$$` at the beginning stands for `$`, so that any text can be said.
        let literal = if text.starts_with("$$") { &text[1..] } else { text };
        Ok(Node::Value(literal.into()))
    }

    fn evaluate(&self, source: &Source, config: Option<&Value>) -> Result<Value> {
        let located = |spot: Spot| move |e: Error| e.at(source.locate(spot));
        Ok(match self {
            Node::Value(value) => value.clone(),
            Node::Expression(expression, spot) => expression.evaluate(config).map_err(located(*spot))?,
            Node::Array(nodes) => nodes.iter().map(|node| node.evaluate(source, config)).collect::<Result<_>>()?,
            Node::Table(entries) => {
                let entry = |(key, node): &(String, Node)| Ok((key.clone(), node.evaluate(source, config)?));
                Value::Object(entries.iter().map(entry).collect::<Result<_>>()?)
            }
        })
    }
}
