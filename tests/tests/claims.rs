//! What people say to each other about entries, and check: attestations,
//! lineage, digests, who built what.

#[path = "claims/attestations.rs"]
mod attestations;
#[path = "claims/builders.rs"]
mod builders;
#[path = "claims/differences.rs"]
mod differences;
#[path = "claims/lineage.rs"]
mod lineage;
#[path = "claims/models.rs"]
mod models;
#[path = "claims/page.rs"]
mod page;
#[path = "claims/setting.rs"]
mod setting;
