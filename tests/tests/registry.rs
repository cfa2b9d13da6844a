//! Publishing, against a real registry on the loopback: modules and entries go
//! there and come back, with and without permission, whole or not at all.
//!
//! The registry is Debian's `docker-registry`; without it these tests say that
//! they are skipped. A hostile registry stands before it where one is needed.

#[path = "registry/access.rs"]
mod access;
#[path = "registry/between.rs"]
mod between;
#[path = "registry/elsewhere.rs"]
mod elsewhere;
#[path = "registry/entries.rs"]
mod entries;
#[path = "registry/folders.rs"]
mod folders;
#[path = "registry/front.rs"]
mod front;
#[path = "registry/hostile.rs"]
mod hostile;
#[path = "registry/modules.rs"]
mod modules;
#[path = "registry/referrers.rs"]
mod referrers;
#[path = "registry/server.rs"]
mod server;
#[path = "registry/world.rs"]
mod world;
