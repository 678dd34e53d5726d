//! Errors as the user sees them: at most three lines, and an exit code.

use std::fmt;

use mlxhost::engine::EngineError;
use mlxhost::text::TextError;
use mlxhost::{LoadError, LoadErrorKind};

/// Why the program ends early.
#[derive(Debug)]
pub enum CliError {
    /// What the user named cannot be used: exit code 2.
    Input(String),
    /// The input may be right; working on it failed: exit code 1.
    Failure(String),
    /// Ctrl-C: exit code 130, nothing printed.
    Interrupted,
}

impl CliError {
    pub fn input(message: impl Into<String>) -> Self {
        Self::Input(message.into())
    }

    /// An error of the system while the program works.
    pub fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        Self::Failure(format!("{what}: {error}"))
    }

    pub fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Failure(_) => 1,
            Self::Interrupted => 130,
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = match self {
            Self::Input(message) | Self::Failure(message) => message,
            Self::Interrupted => "interrupted",
        };
        let lines: Vec<_> = message.lines().take(3).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl From<LoadError> for CliError {
    fn from(error: LoadError) -> Self {
        match error.kind() {
            LoadErrorKind::Failed(_) => Self::Failure(error.to_string()),
            _ => Self::Input(error.to_string()),
        }
    }
}

impl From<EngineError> for CliError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Load(error) => error.into(),
            EngineError::Request(error) => Self::Input(error.to_string()),
            other => Self::Failure(other.to_string()),
        }
    }
}

impl From<TextError> for CliError {
    fn from(error: TextError) -> Self {
        Self::Input(error.to_string())
    }
}

impl From<plugin_api::Error> for CliError {
    fn from(error: plugin_api::Error) -> Self {
        Self::Failure(error.message().to_owned())
    }
}
