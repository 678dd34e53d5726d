//! Answers on the terminal, and as JSON.

use std::io::{IsTerminal, Write};

use mlxhost::engine::{Answer, Stats, Token};
use serde_json::{Value, json};

use super::error::CliError;

/// Green, for tokens that the drafter had proposed.
const DRAFTED: &str = "\x1b[32m";
const RESET: &str = "\x1b[0m";

/// Writes an answer as it comes.
pub struct Printer {
    colour: bool,
    coloured: bool,
}

impl Printer {
    pub fn new(show_drafts: bool) -> Self {
        Self {
            colour: show_drafts && std::env::var_os("NO_COLOR").is_none(),
            coloured: false,
        }
    }

    pub fn token(&mut self, token: &Token) -> Result<(), CliError> {
        if token.text.is_empty() {
            return Ok(());
        }
        let mut text = String::new();
        if self.colour && self.coloured != token.drafted {
            text.push_str(if token.drafted { DRAFTED } else { RESET });
            self.coloured = token.drafted;
        }
        text.push_str(&token.text);
        write(&text)
    }

    /// The text that was held back, and the end of the line.
    pub fn end(&mut self, rest: &str) -> Result<(), CliError> {
        let reset = if self.coloured { RESET } else { "" };
        self.coloured = false;
        write(&format!("{rest}{reset}\n"))
    }
}

/// Writes to standard output, at once. (`println!` would panic where it can't.)
pub fn write(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| match e.kind() {
            // `mlxhost … | head`: the reader has seen enough.
            std::io::ErrorKind::BrokenPipe => CliError::Interrupted,
            _ => CliError::io("can't write to standard output", &e),
        })
}

/// Writes a line to standard error. There is nobody to tell when that fails.
pub fn note(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The statistics of an answer, on standard error.
pub fn print_stats(stats: &Stats) {
    let faint = std::io::stderr().is_terminal();
    let (on, off) = if faint { ("\x1b[2m", RESET) } else { ("", "") };
    note(format_args!(
        "{on}prompt   {} tokens{} in {:.2} s ({:.1} tokens/s)",
        stats.prompt_tokens,
        match stats.cached_tokens {
            0 => String::new(),
            n => format!(", {n} of them remembered,"),
        },
        stats.prefill.as_secs_f64(),
        stats.prefill_speed()
    ));
    note(format_args!(
        "answer   {} tokens in {:.2} s ({:.1} tokens/s), {} target passes, {:.2} tokens per pass",
        stats.tokens,
        stats.decode.as_secs_f64(),
        stats.decode_speed(),
        stats.rounds.len(),
        stats.tokens_per_pass()
    ));
    match &stats.drafter {
        Some(drafter) => {
            let positions: Vec<_> = stats
                .by_position()
                .iter()
                .enumerate()
                .map(|(at, (drafted, accepted))| format!("{}: {accepted}/{drafted}", at + 1))
                .collect();
            let (accepted, drafted) = (stats.accepted_tokens(), stats.drafted_tokens());
            let share = 100.0 * accepted as f64 / drafted.max(1) as f64;
            let positions = match positions.join(", ") {
                none if none.is_empty() => none,
                list => format!("; by position {list}"),
            };
            note(format_args!(
                "drafter  {drafter}: {accepted} of {drafted} drafted tokens accepted ({share:.0}%){positions}{off}",
            ));
        }
        None => note(format_args!("drafter  none{off}")),
    }
}

/// An answer as one JSON object.
pub fn to_json(tokens: &[i32], text: &str, answer: &Answer) -> Value {
    let stats = &answer.stats;
    let rounds: Vec<_> = stats
        .rounds
        .iter()
        .map(|round| json!({"drafted": round.drafted, "accepted": round.accepted}))
        .collect();
    json!({
        "tokens": tokens,
        "text": text,
        "finish_reason": answer.finish.name(),
        "rounds": rounds,
        "drafter": stats.drafter,
        "timings": {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "queued_s": stats.queued.as_secs_f64(),
            "prefill_s": stats.prefill.as_secs_f64(),
            "decode_s": stats.decode.as_secs_f64(),
            "prefill_tokens_per_s": stats.prefill_speed(),
            "decode_tokens_per_s": stats.decode_speed(),
            "tokens_per_pass": stats.tokens_per_pass(),
            "rows_per_round": stats.rows_per_round(),
        },
    })
}
