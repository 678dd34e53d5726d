//! Text: tokenizers, chat templates, and turning tokens back into text as they come.
//!
//! Everything read here (vocabularies, templates, configuration) comes from a stranger's
//! checkpoint: sizes are bounded, templates run on a fuel limit, and a file that makes a
//! dependency panic is a [`LoadError`](crate::error::LoadError).

mod chat;
mod detokenize;
mod files;
mod generation;
mod gguf_vocab;
#[cfg(test)]
mod golden;
mod jinja;
mod special;
mod spm;
mod stops;
mod stream;
mod tokenizer;

pub use chat::{ChatTemplate, Message, Role};
pub use generation::GenerationDefaults;
pub use gguf_vocab::GgufVocab;
pub use stream::{Piece, TextStream};
pub use tokenizer::Tokenizer;

/// Text could not be turned into tokens, or a conversation into a prompt.
///
/// Its `Display` is one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The chat template has an error, or refused the conversation (`raise_exception`).
    #[error("chat template: {0}")]
    Template(String),
    /// The tokenizer could not encode the text.
    #[error("tokenizer: {0}")]
    Encode(String),
}

/// The longest error text that is passed on, in characters: templates choose their own.
const MAX_MESSAGE: usize = 300;

/// Bytes as lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `text` on one line, bounded, without control characters (it is shown on a terminal).
pub fn one_line(text: &str) -> String {
    let mut words = text.split_whitespace();
    let mut line = String::new();
    let mut left = MAX_MESSAGE;
    while let Some(word) = words.next().filter(|_| left > 0) {
        if !line.is_empty() {
            line.push(' ');
            left -= 1;
        }
        let visible = word.chars().filter(|c| !c.is_control()).take(left);
        line.extend(visible);
        left = MAX_MESSAGE.saturating_sub(line.chars().count());
    }
    line
}

/// Runs `work`; a panic inside becomes `None`.
///
/// For calls into the `tokenizers` crate, which indexes and unwraps on what a vocabulary says.
/// Sound to resume after: what `work` was building is dropped, what it only read is immutable.
fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_bounded_line() {
        assert_eq!(one_line(" a\n\tb\u{1b}[1m  c "), "a b[1m c");
        assert_eq!(one_line(&"x".repeat(10_000)).len(), MAX_MESSAGE);
        assert_eq!(one_line(&"ä ".repeat(10_000)).chars().count(), MAX_MESSAGE);
        assert_eq!(one_line(""), "");
    }

    #[test]
    fn a_panic_is_contained() {
        let nothing: Vec<u8> = Vec::new();
        assert_eq!(guarded(|| nothing[std::hint::black_box(3)]), None);
        assert_eq!(guarded(|| 3), Some(3));
    }
}
