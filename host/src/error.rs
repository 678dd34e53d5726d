//! The library's errors: what is wrong, where, and what to do about it.

use std::fmt;
use std::path::{Path, PathBuf};

/// Input from outside (a file, a directory, a plugin) could not be used.
///
/// Its `Display` is at most three lines: the path with the problem, then the remedy.
#[derive(Debug)]
pub struct LoadError {
    path: PathBuf,
    kind: LoadErrorKind,
    remedy: Option<String>,
}

/// What was wrong with the input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadErrorKind {
    /// The file system said no.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Something that must be there is not (a file, a tensor, a key).
    #[error("{0}")]
    Missing(String),
    /// The bytes are not what the format says they should be.
    #[error("{0}")]
    Malformed(String),
    /// Well formed, but of a kind that is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// Two things that do not belong together.
    #[error("{0}")]
    Mismatch(String),
    /// The input may be right; working on it failed.
    #[error("{0}")]
    Failed(String),
}

impl LoadError {
    /// An error about `path`.
    pub fn new(path: impl AsRef<Path>, kind: impl Into<LoadErrorKind>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
            kind: kind.into(),
            remedy: None,
        }
    }

    /// A [`LoadErrorKind::Missing`] error.
    pub fn missing(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::new(path, LoadErrorKind::Missing(what.into()))
    }

    /// A [`LoadErrorKind::Malformed`] error.
    pub fn malformed(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::new(path, LoadErrorKind::Malformed(what.into()))
    }

    /// A [`LoadErrorKind::Unsupported`] error.
    pub fn unsupported(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::new(path, LoadErrorKind::Unsupported(what.into()))
    }

    /// A [`LoadErrorKind::Mismatch`] error.
    pub fn mismatch(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::new(path, LoadErrorKind::Mismatch(what.into()))
    }

    /// A [`LoadErrorKind::Failed`] error.
    pub fn failed(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::new(path, LoadErrorKind::Failed(what.into()))
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// The file or directory the error is about.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was wrong with it.
    pub fn kind(&self) -> &LoadErrorKind {
        &self.kind
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.kind)?;
        match &self.remedy {
            Some(remedy) => write!(f, "\n  {remedy}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.kind)
    }
}
