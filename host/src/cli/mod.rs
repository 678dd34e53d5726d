//! The command line: arguments in, text and exit codes out.

mod args;
mod batch;
mod bench;
mod chat;
mod check;
mod drafter;
mod error;
mod eval;
mod generate;
mod kv;
mod load;
mod log;
mod new;
mod output;
mod plugins;
mod prompt;
mod swap;

use clap::Parser;

use args::{Args, Command};
use error::CliError;

/// Runs the program.
pub fn main() -> ! {
    let args = Args::parse();
    log::init();
    let outcome = match &args.command {
        None => generate::run(&args.generate),
        Some(Command::Batch(batch)) => batch::run(batch),
        Some(Command::Bench(bench)) => bench::run(bench),
        Some(Command::Eval(eval)) => eval::run(eval),
        Some(Command::Plugins(plugins)) => plugins::run(plugins),
        Some(Command::Drafter(drafter)) => drafter::run(drafter),
    };
    let code = match outcome {
        Ok(()) => 0,
        Err(error) => {
            if !matches!(error, CliError::Interrupted) {
                output::note(format_args!("mlxhost: {error}"));
            }
            error.code()
        }
    };
    // A plugin may still be in a call.
    mlxhost::backend::leave(code.into())
}
