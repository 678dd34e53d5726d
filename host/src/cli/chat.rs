//! The conversation on a terminal.

use std::path::Path;

use mlxhost::engine::Finish;
use mlxhost::text::{Message, Role};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::args::GenerateArgs;
use super::error::CliError;
use super::generate::{self, Interrupt};
use super::load::Loaded;
use super::output::{self, Printer};
use super::{prompt, swap};

const HELP: &str = "\
/reset      forget the conversation
/swap PATH  draft with the plugin in this file from now on
/help       this text
/quit       end (or Ctrl-D); Ctrl-C ends an answer";

/// Talks until the user has had enough.
pub fn run(args: &GenerateArgs, loaded: &Loaded, interrupt: &Interrupt) -> Result<(), CliError> {
    let tokenizer = loaded.tokenizer.as_deref();
    let tokenizer = tokenizer.ok_or_else(|| CliError::input("the model has no tokenizer"))?;
    if args.json {
        return Err(CliError::input(
            "--json answers one prompt; name it with --prompt",
        ));
    }
    let mut editor = DefaultEditor::new()
        .map_err(|e| CliError::Failure(format!("can't read from the terminal: {e}")))?;
    let drafter = match loaded.engine.drafters().first() {
        Some(drafter) => format!(
            "drafted by {}, {} deep",
            drafter.name,
            args.models.depth.unwrap_or(drafter.depth)
        ),
        None => "without a drafter".to_owned(),
    };
    eprintln!("{}, {drafter}. /help for help.", loaded.engine.facts().name);
    let mut messages = prompt::beginning(&args.answer);
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(e) => {
                return Err(CliError::Failure(format!(
                    "can't read from the terminal: {e}"
                )));
            }
        };
        let _ = editor.add_history_entry(&line);
        match line.trim() {
            "" => continue,
            "/quit" | "/exit" => return Ok(()),
            "/help" => {
                eprintln!("{HELP}");
                continue;
            }
            "/reset" => {
                messages = prompt::beginning(&args.answer);
                continue;
            }
            command if command == "/swap" || command.starts_with("/swap ") => {
                swap_to(args, loaded, command["/swap".len()..].trim());
                continue;
            }
            command if command.starts_with('/') && !command.contains(' ') => {
                eprintln!("there is no command {command}; /help lists them");
                continue;
            }
            text => messages.push(Message::new(Role::User, text)),
        }
        let tokens = if args.answer.raw {
            tokenizer.encode(&messages[messages.len() - 1].content, true)?
        } else {
            prompt::encode_chat(tokenizer, &messages)?
        };
        let request = generate::request(args.ask(), &loaded.defaults, Some(tokenizer), tokens);
        let mut printer = Printer::new(args.show_drafts);
        interrupt.take();
        let (_, text, answer) =
            generate::answer(&loaded.engine, request, Some(&mut printer), interrupt)?;
        if args.stats {
            output::print_stats(&answer.stats);
        }
        if answer.finish == Finish::Cancelled {
            interrupt.take();
        }
        messages.push(Message::new(Role::Assistant, text));
    }
}

/// Says what came of it; the conversation goes on in any case.
fn swap_to(args: &GenerateArgs, loaded: &Loaded, path: &str) {
    if path.is_empty() {
        return eprintln!("/swap PATH: the file of a plugin");
    }
    match swap::swap(&args.models, &loaded.engine, Path::new(path)) {
        Ok(now) => eprintln!("{now}"),
        Err(error) => eprintln!("not swapped: {error}"),
    }
}
