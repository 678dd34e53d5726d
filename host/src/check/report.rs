//! What a test found.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::LoadError;
use crate::text::one_line;

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Passed,
    /// It works, but someone should look at it.
    Warning,
    /// It could not be tried here.
    Skipped,
    /// A rule is broken.
    Failed,
    /// The process ended without an answer, or never gave one.
    Crashed,
}

impl Verdict {
    const ALL: [Self; 5] = [
        Self::Passed,
        Self::Warning,
        Self::Skipped,
        Self::Failed,
        Self::Crashed,
    ];

    /// A word for people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Warning => "warning",
            Self::Skipped => "skipped",
            Self::Failed => "failed",
            Self::Crashed => "crashed",
        }
    }

    /// Whether the plugin is at fault.
    pub fn is_bad(self) -> bool {
        matches!(self, Self::Failed | Self::Crashed)
    }
}

/// A test's end, with a sentence that explains it.
#[derive(Clone, Debug)]
pub struct Report {
    /// The test's name.
    pub test: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// What was seen.
    pub why: String,
}

/// What a test that ran to its end has to say.
pub(super) enum Finding {
    Passed(String),
    Warning(String),
    Skipped(String),
}

impl Finding {
    /// A warning if there is something to warn of.
    pub fn noting(notes: Vec<String>, else_passed: impl Into<String>) -> Self {
        match notes.is_empty() {
            true => Self::Passed(else_passed.into()),
            false => Self::Warning(notes.join("; ")),
        }
    }
}

/// A rule is broken: how.
#[derive(Debug)]
pub(super) struct Broken(pub String);

/// What a test returns.
pub(super) type Outcome = Result<Finding, Broken>;

impl From<plugin_api::Error> for Broken {
    fn from(error: plugin_api::Error) -> Self {
        Self(error.message().to_owned())
    }
}

impl From<LoadError> for Broken {
    fn from(error: LoadError) -> Self {
        Self(error.kind().to_string())
    }
}

impl Report {
    /// A report; what a plugin said in it is one line.
    pub fn new(test: &'static str, verdict: Verdict, why: &str) -> Self {
        Self {
            test,
            verdict,
            why: one_line(why),
        }
    }

    pub(super) fn of(test: &'static str, outcome: Outcome) -> Self {
        let (verdict, why) = match outcome {
            Ok(Finding::Passed(why)) => (Verdict::Passed, why),
            Ok(Finding::Warning(why)) => (Verdict::Warning, why),
            Ok(Finding::Skipped(why)) => (Verdict::Skipped, why),
            Err(Broken(why)) => (Verdict::Failed, why),
        };
        Self::new(test, verdict, &why)
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        json!({"test": self.test, "verdict": self.verdict.name(), "why": self.why})
    }

    /// Leaves it for the process that waits for it.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.to_json().to_string())
    }

    /// What a process left; none if it did not come to that.
    pub(super) fn read(test: &'static str, path: &Path) -> Option<Self> {
        let value: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
        let name = value.get("verdict")?.as_str()?;
        let verdict = Verdict::ALL.into_iter().find(|v| v.name() == name)?;
        Some(Self::new(test, verdict, value.get("why")?.as_str()?))
    }
}
