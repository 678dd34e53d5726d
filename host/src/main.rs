//! The program. `mlxhost --help` teaches it.

mod cli;

fn main() {
    cli::main()
}
