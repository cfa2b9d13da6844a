//! Grouped QKV to `[Q; K; V]`, and back.
//!
//! In a grouped tensor each of G groups holds the rows of m query heads, one
//! key head and one value head of d rows. Serving kernels want all queries,
//! then all keys, then all values. See README.md for which models do what.
#![cfg_attr(target_arch = "wasm32", no_std)]
#![forbid(unsafe_code)]

use core::ops::Range;

use weightmill_guest::prelude::*;

/// Parameters.
#[transform(
    name = "qkv-regroup",
    version = "1.0.0",
    summary = "grouped QKV rows to [Q; K; V], or back",
    licence = "Apache-2.0",
    uses_tp
)]
pub struct QkvRegroup {
    /// Groups: the number of key heads.
    groups: NonZeroU64,
    /// Query heads of a group.
    q_per_group: NonZeroU64,
    /// Rows of a head.
    head_dim: NonZeroU64,
    /// The order of the parts inside a group.
    #[param(default = Order::Qkv)]
    order: Order,
    /// Which way.
    #[param(default = Direction::Degroup)]
    direction: Direction,
    /// Whether several ranks may share a group's keys and values.
    kv_replication: bool,
}

/// The order of queries, keys and values inside a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
#[allow(missing_docs)]
pub enum Order {
    Qkv,
    Qvk,
    Kqv,
    Kvq,
    Vqk,
    Vkq,
}

/// Which way rows move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
pub enum Direction {
    /// From groups to `[Q; K; V]`.
    Degroup,
    /// From `[Q; K; V]` to groups.
    Group,
}

impl Transform for QkvRegroup {
    fn plan(&self, cx: &Plan) -> Result<Outputs> {
        let qkv = cx.input("qkv")?;
        let out = match self.direction {
            Direction::Degroup => self.degroup(&qkv, cx.tp())?,
            Direction::Group => self.group(&qkv, cx.tp())?,
        };
        cx.outputs().view("qkv", out)
    }
}

impl QkvRegroup {
    fn degroup(&self, qkv: &Array, tp: Tp) -> Result<Array> {
        let (groups, heads) = (self.groups.get(), self.q_per_group.get());
        let grouped = qkv.split(0, &[groups, heads + 2, self.head_dim.get()]).map_err(explain_rows)?;
        let share = self.share(tp)?;
        let mine = grouped.slice(0, share.groups)?;
        let [q, k, v] = self.order.offsets(heads);
        let part = |at: u64, len: u64| mine.slice(1, at..at + len)?.merge(0..3);
        Array::concat(0, &[part(q + share.first_head, share.heads)?, part(k, 1)?, part(v, 1)?])
    }

    /// This rank's groups and, in each of them, its query heads.
    fn share(&self, tp: Tp) -> Result<Share> {
        let (groups, heads) = (self.groups.get(), self.q_per_group.get());
        if groups.is_multiple_of(tp.size) {
            return Ok(Share { groups: tp.range(groups, "groups")?, first_head: 0, heads });
        }
        let refuse = |why: String, hint: &str| {
            Err(PlanError::tp(format!("{groups} groups do not divide by the tp size {}{why}", tp.size)).hint(hint))
        };
        if groups > tp.size || !self.kv_replication {
            let hint = match groups {
                1 => {
                    "for a fused [Q; K; V], which is not one group, use qkv-split, then qkv-fuse; \
                     to share a single key and value head between ranks, set kv_replication = true"
                }
                _ if groups < tp.size => "to share keys and values between ranks, set kv_replication = true",
                _ => "use a tp size that divides the groups",
            };
            return refuse(String::new(), hint);
        }
        let ranks = tp.size / groups;
        if !tp.size.is_multiple_of(groups) {
            return refuse(String::from(", and it does not divide by them"), "use a tp size that is a multiple");
        }
        if !heads.is_multiple_of(ranks) {
            return refuse(
                format!(", and {heads} query heads of a group do not divide by its {ranks} ranks"),
                "use a smaller tp size",
            );
        }
        let group = tp.rank / ranks;
        let heads = heads / ranks;
        Ok(Share { groups: group..group + 1, first_head: tp.rank % ranks * heads, heads })
    }

    fn group(&self, qkv: &Array, tp: Tp) -> Result<Array> {
        if tp.size > 1 {
            return Err(PlanError::tp(format!(
                "direction \"group\" makes the whole tensor, not the share of one of {} ranks",
                tp.size
            ))
            .hint("set tp = false on the step"));
        }
        let (groups, heads, dim) = (self.groups.get(), self.q_per_group.get(), self.head_dim.get());
        // The product is checked here, so those below cannot overflow.
        qkv.split(0, &[heads + 2, groups, dim]).map_err(explain_rows)?;
        let (q_rows, kv_rows) = (groups * heads * dim, groups * dim);
        let q = qkv.slice(0, ..q_rows)?.split(0, &[groups, heads, dim])?;
        let k = qkv.slice(0, q_rows..q_rows + kv_rows)?.split(0, &[groups, 1, dim])?;
        let v = qkv.slice(0, q_rows + kv_rows..)?.split(0, &[groups, 1, dim])?;
        let parts = match self.order {
            Order::Qkv => [q, k, v],
            Order::Qvk => [q, v, k],
            Order::Kqv => [k, q, v],
            Order::Kvq => [k, v, q],
            Order::Vqk => [v, q, k],
            Order::Vkq => [v, k, q],
        };
        Array::concat(1, &parts)?.merge(0..3)
    }
}

/// What one rank takes of a grouped tensor.
struct Share {
    groups: Range<u64>,
    first_head: u64,
    heads: u64,
}

impl Order {
    /// In which head of a group queries, keys and values begin.
    fn offsets(self, heads: u64) -> [u64; 3] {
        match self {
            Order::Qkv => [0, heads, heads + 1],
            Order::Qvk => [0, heads + 1, heads],
            Order::Kqv => [1, 0, heads + 1],
            Order::Kvq => [2, 0, 1],
            Order::Vqk => [1, heads + 1, 0],
            Order::Vkq => [2, 1, 0],
        }
    }
}

fn explain_rows(error: PlanError) -> PlanError {
    error.hint(
        "rows are groups x (q_per_group + 2) x head_dim; for a scale with a row a block, head_dim counts blocks \
         and must come out whole",
    )
}

#[cfg(test)]
mod tests;
