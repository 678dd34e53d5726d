//! What is asked of the engine, and what comes back.

use std::time::Duration;

use plugin_api::sampling::Sampling;

use super::Stats;
use crate::plugin::Hang;

/// One prompt to be answered.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<i32>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// The most tokens to generate, at least one.
    pub max_tokens: usize,
    /// Tokens that end the answer (they are delivered as its last token, without text).
    pub stop_ids: Vec<i32>,
    /// Texts that end the answer (they and what follows are not delivered as text).
    pub stop: Vec<String>,
    /// Who drafts.
    pub draft_with: DraftWith,
    /// The tokens to draft per round; none: chosen round by round, by what pays.
    pub depth: Option<u32>,
    /// The time that it may take from its submission on; what is there by then is the answer.
    pub deadline: Option<Duration>,
}

/// Who drafts for a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DraftWith {
    /// The engine's first drafter, if it has any.
    #[default]
    Default,
    /// The drafter of the plugin of that name.
    Plugin(String),
    /// Nobody.
    Nothing,
}

/// A request that cannot be served.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A prompt token that the model does not know.
    #[error("prompt token {id} is outside the vocabulary of {vocab}")]
    TokenOutOfRange {
        /// The token.
        id: i32,
        /// Tokens the model knows.
        vocab: i32,
    },
    /// An answer of no tokens was asked for.
    #[error("max-tokens must be at least 1")]
    NoTokens,
    /// It names a drafter that the engine does not have.
    #[error("there is no drafter {name:?}; there are: {there}")]
    NoDrafter {
        /// The plugin that it names.
        name: String,
        /// The plugins that there are, as text.
        there: String,
    },
    /// A sampling value is out of range.
    #[error("{0}")]
    Sampling(String),
    /// The target has no tokenizer to watch for stop texts with.
    #[error("stop texts need a tokenizer, and the model has none")]
    StopWithoutTokenizer,
}

impl Request {
    /// Checks the request against a model's vocabulary.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn validate(&self, vocab: i32, has_tokenizer: bool) -> Result<(), RequestError> {
        if self.prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if let Some(&id) = self.prompt.iter().find(|id| !(0..vocab).contains(id)) {
            return Err(RequestError::TokenOutOfRange { id, vocab });
        }
        if self.max_tokens == 0 {
            return Err(RequestError::NoTokens);
        }
        if !self.stop.is_empty() && !has_tokenizer {
            return Err(RequestError::StopWithoutTokenizer);
        }
        self.sampling
            .validate()
            .map_err(|e| RequestError::Sampling(e.message().to_owned()))
    }
}

/// One token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: i32,
    /// The text that became certain with it; often empty, as characters span tokens.
    pub text: String,
    /// Whether the drafter had proposed it.
    pub drafted: bool,
}

/// What happens to a request, in order.
#[derive(Clone, Debug)]
pub enum Event {
    /// The answer goes on.
    Token(Token),
    /// The answer is complete.
    Done(Answer),
    /// The engine could not go on; what was delivered is right, but incomplete.
    Failed(Failure),
}

/// Why an answer broke off.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A pass could not be computed.
    #[error("{0}")]
    Engine(String),
    /// A plugin does not return from a call, and nobody is answered meanwhile.
    #[error(transparent)]
    Hung(Hang),
}

/// The end of an answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Why it ended.
    pub finish: Finish,
    /// Text that was held back until the end was certain.
    pub rest: String,
    /// What it took.
    pub stats: Stats,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token or text came up.
    Stop,
    /// The token limit was reached.
    Length,
    /// The request was cancelled.
    Cancelled,
    /// Its time was over.
    Deadline,
}

impl Finish {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
        }
    }
}
