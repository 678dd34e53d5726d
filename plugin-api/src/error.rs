//! The SDK's error, which crosses the boundary as a [`Fault`].

use std::fmt;

use crate::abi::{Fault, FaultCode};

/// A result of the SDK.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something failed: a kind and a message for the user.
///
/// The kind decides how the host goes on: [`Error::invalid`] and [`Error::mismatch`] say that the user named the
/// wrong thing, the others that something broke.
///
/// ```
/// use plugin_api::Error;
/// use plugin_api::abi::FaultCode;
///
/// let error = Error::invalid("`hidden_size` is missing").context("head/config.json");
/// assert_eq!(error.code(), FaultCode::INVALID);
/// assert_eq!(error.to_string(), "head/config.json: `hidden_size` is missing");
/// ```
#[derive(Clone, Debug)]
pub struct Error {
    code: FaultCode,
    message: String,
}

impl Error {
    /// An error of the given kind.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// What was passed in cannot be used: a file, a key, an option, a shape.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(FaultCode::INVALID, message)
    }

    /// Two things do not belong together; the message names both and the number that differs.
    pub fn mismatch(message: impl Into<String>) -> Self {
        Self::new(FaultCode::MISMATCH, message)
    }

    /// The other side lacks a capability.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(FaultCode::UNSUPPORTED, message)
    }

    /// An operation failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(FaultCode::FAILED, message)
    }

    /// The kind.
    pub fn code(&self) -> FaultCode {
        self.code
    }

    /// The message alone.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Puts "`context`: " before the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self {
            code: error.code,
            message: error.message.into(),
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self {
            code: fault.code,
            message: fault.message.into(),
        }
    }
}
