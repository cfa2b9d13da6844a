//! What a contributor runs. `cargo xtask` lists the commands.

mod bench;
mod demo;
mod fuzz;
mod modules;
mod packages;
mod reproduce;
mod shell;
mod supply;
mod test;

use anyhow::{Result, bail};

const HELP: &str = "cargo xtask COMMAND

  demo              set up, then transform and stream a real checkpoint, cold and warm
  test              set up, then run every check and test
  modules           rebuild transforms/dist from source
  modules --check   rebuild and compare with transforms/dist, byte for byte
  reproduce         digests on every engine in every way, and one line that two hosts compare
                    (--quick: fewer ways; --target aarch64: that build, under qemu-user)
  fuzz TARGET [S]   run a fuzz target for S seconds
  supply            check licences and sources of the dependencies
  bench             transforms against the same work by plain Rust, as ratios
";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["demo"] => demo::run(),
        ["test"] => test::run(),
        ["modules"] => modules::rebuild(),
        ["modules", "--check"] => modules::check(),
        ["reproduce", rest @ ..] => reproduce::run(rest),
        ["fuzz", rest @ ..] => fuzz::run(rest),
        ["supply"] => supply::check(),
        ["bench", rest @ ..] => bench::run(rest),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => bail!("no such command: {}\n\n{HELP}", other.join(" ")),
    }
}
