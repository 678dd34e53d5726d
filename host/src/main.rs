//! The program. `mlxhost --help` teaches it.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
