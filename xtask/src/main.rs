//! What a contributor runs. `cargo xtask` lists the commands.

mod bench;
mod demo;
mod modules;
mod packages;
mod shell;
mod test;

use anyhow::{Result, bail};

const HELP: &str = "cargo xtask COMMAND

  demo              set up, then transform and stream a real checkpoint, cold and warm
  test              set up, then run every check and test
  modules           rebuild transforms/dist from source
  modules --check   rebuild and compare with transforms/dist, byte for byte
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
        ["bench", rest @ ..] => bench::run(rest),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => bail!("no such command: {}\n\n{HELP}", other.join(" ")),
    }
}
