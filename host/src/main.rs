//! The `weightmill` program.

fn main() -> std::process::ExitCode {
    weightmill::cli::main()
}
