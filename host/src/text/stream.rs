//! Tokens in, text out, as they come.

use std::sync::Arc;

use super::detokenize::Decoding;
use super::stops::Stops;
use super::tokenizer::Tokenizer;

/// Text that became certain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    /// The new text; often empty, since characters and stop strings span tokens.
    pub text: String,
    /// A stop string is complete: `text` ends right before it and nothing more will come.
    pub stopped: bool,
}

/// Turns ids into text as they come.
///
/// Text is released only when its bytes are complete UTF-8 and it can't be the start of a stop
/// string. All pieces and [`finish`](Self::finish) together are exactly
/// [`Tokenizer::decode`] of all ids, up to the stop. A token costs time in the length of its own
/// text, not of the history.
///
/// Of several stop strings the one that completes first wins, of those that complete with the
/// same character the longest: the result does not depend on how the text is cut into tokens.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    decoding: Decoding,
    stops: Stops,
    /// Complete text that could still turn out to begin a stop string.
    held: String,
    stopped: bool,
}

impl TextStream {
    /// A stream at the beginning of a text. Empty stop strings are ignored; `skip_special`
    /// leaves special tokens out of the text, stop strings then don't see them either.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Vec<String>, skip_special: bool) -> Self {
        Self {
            decoding: tokenizer.start_decoding(),
            tokenizer,
            skip_special,
            stops: Stops::new(stops),
            held: String::new(),
            stopped: false,
        }
    }

    /// Feeds one token. Returns the text that is now certain, and whether a stop string was
    /// completed (then only the text before it; what follows is dropped, now and in later calls).
    ///
    /// An id outside the vocabulary gives U+FFFD.
    pub fn push(&mut self, id: i32) -> Piece {
        let mut text = String::new();
        if !self.stopped {
            self.tokenizer
                .decode_one(&mut self.decoding, id, self.skip_special, &mut text);
        }
        self.release(text)
    }

    /// Whatever is still held back, at the end. After a stop there is nothing.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let mut text = String::new();
        self.decoding.finish(&mut text);
        let piece = self.release(text);
        let mut rest = piece.text;
        rest.push_str(&std::mem::take(&mut self.held));
        rest
    }

    /// Lets out as much of the held text and `new` as is certain.
    fn release(&mut self, new: String) -> Piece {
        if self.stopped {
            return Piece {
                text: String::new(),
                stopped: true,
            };
        }
        let before = self.held.len();
        let found = self.stops.feed(&new);
        self.held.push_str(&new);
        let certain = match found {
            Some((end, len)) => (before + end).saturating_sub(len),
            None => self.held.len().saturating_sub(self.stops.held()),
        };
        let rest = self.held.split_off(certain);
        let text = std::mem::replace(&mut self.held, rest);
        if found.is_some() {
            self.held = String::new();
            self.stopped = true;
        }
        Piece {
            text,
            stopped: self.stopped,
        }
    }
}
