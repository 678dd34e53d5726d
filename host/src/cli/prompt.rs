//! From what the user gave to the tokens of the prompt.

use std::io::{IsTerminal, Read};

use mlxhost::text::{Message, Role, Tokenizer};

use super::args::{AnswerArgs, GenerateArgs};
use super::error::CliError;

/// Longer prompts on standard input or in files are refused.
const MAX_PROMPT_BYTES: u64 = 64 << 20;

/// What is to be answered.
pub enum Prompt {
    /// These tokens.
    Tokens(Vec<i32>),
    /// This text, as the one message of a conversation or raw.
    Text(String),
    /// Whatever the user types.
    Chat,
}

/// Finds the prompt: named, or on standard input, or to be typed.
pub fn find(args: &GenerateArgs) -> Result<Prompt, CliError> {
    if let Some(ids) = &args.prompt_tokens {
        return parse_tokens(ids).map(Prompt::Tokens);
    }
    if let Some(text) = &args.prompt {
        return Ok(Prompt::Text(text.clone()));
    }
    let mut stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Ok(Prompt::Chat);
    }
    let mut text = String::new();
    let read = stdin
        .by_ref()
        .take(MAX_PROMPT_BYTES + 1)
        .read_to_string(&mut text);
    read.map_err(|e| CliError::input(format!("can't read the prompt from standard input: {e}")))?;
    if text.len() as u64 > MAX_PROMPT_BYTES {
        return Err(CliError::input(
            "the prompt on standard input is larger than 64 MiB",
        ));
    }
    if text.trim().is_empty() {
        return Err(CliError::input(
            "there is no prompt\n  name one with --prompt, or write it to standard input",
        ));
    }
    Ok(Prompt::Text(text))
}

/// `1,2,3`, or `@FILE` with the same inside.
pub fn parse_tokens(argument: &str) -> Result<Vec<i32>, CliError> {
    let text = match argument.strip_prefix('@') {
        None => argument.to_owned(),
        Some(path) => {
            let refuse = |e: &dyn std::fmt::Display| CliError::input(format!("{path}: {e}"));
            let facts = std::fs::metadata(path).map_err(|e| refuse(&e))?;
            if facts.len() > MAX_PROMPT_BYTES {
                return Err(refuse(&"larger than 64 MiB"));
            }
            std::fs::read_to_string(path).map_err(|e| refuse(&e))?
        }
    };
    let separators = |c: char| c == ',' || c.is_whitespace() || c == '[' || c == ']';
    let ids: Vec<i32> = text
        .split(separators)
        .filter(|word| !word.is_empty())
        .map(|word| {
            word.parse().map_err(|_| {
                let shown: String = word.chars().take(40).collect();
                CliError::input(format!("--prompt-tokens: {shown:?} is not a token id"))
            })
        })
        .collect::<Result<_, _>>()?;
    if ids.is_empty() {
        return Err(CliError::input("--prompt-tokens: there are no token ids"));
    }
    Ok(ids)
}

/// The tokens of a conversation, up to where the answer begins.
pub fn encode_chat(tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<i32>, CliError> {
    match tokenizer.chat_template() {
        // The template writes the special tokens itself.
        Some(template) => Ok(tokenizer.encode(&template.render(messages, true)?, false)?),
        None => {
            let texts: Vec<_> = messages.iter().map(|m| m.content.as_str()).collect();
            Ok(tokenizer.encode(&texts.join("\n"), true)?)
        }
    }
}

/// The tokens of a text.
pub fn encode(tokenizer: &Tokenizer, text: &str, args: &AnswerArgs) -> Result<Vec<i32>, CliError> {
    if args.raw {
        return Ok(tokenizer.encode(text, true)?);
    }
    let mut messages = beginning(args);
    messages.push(Message::new(Role::User, text));
    encode_chat(tokenizer, &messages)
}

/// What comes before the user's first message.
pub fn beginning(args: &AnswerArgs) -> Vec<Message> {
    let system = args.system.as_deref();
    system
        .map(|text| Message::new(Role::System, text))
        .into_iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_lists_are_read_and_refused() {
        assert_eq!(parse_tokens("1,2, 3").unwrap(), [1, 2, 3]);
        assert_eq!(parse_tokens("[7, 8]").unwrap(), [7, 8]);
        for bad in ["", "1,x", "99999999999", "@/nonexistent/file"] {
            let error = parse_tokens(bad).unwrap_err();
            assert_eq!(error.code(), 2, "{error}");
        }
    }
}
