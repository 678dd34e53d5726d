//! Where plugins are looked for, and what became of each file that was found. Nothing of them is run.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use super::gate;
use super::lock::Lock;
use super::manifest::PluginFile;
use crate::error::LoadError;
use crate::paths;

/// Where to look, in this order. The working directory is never searched.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Libraries.
    pub named: Vec<PathBuf>,
    /// Directories.
    pub directories: Vec<PathBuf>,
    /// Entries of `MLXHOST_PLUGIN_PATH`, libraries or directories.
    pub search_path: Vec<PathBuf>,
    /// Directories that are searched unasked: the user's, and that of the installation. That one of them is
    /// not there is nothing to speak of.
    pub standing: Vec<(Place, PathBuf)>,
    /// The file that says which plugins are allowed, if there is to be one.
    pub lock: Option<PathBuf>,
    /// Whether files and directories that anyone may write to are taken.
    pub trust_writable: bool,
}

impl Search {
    /// The places that are searched unasked on this machine.
    #[must_use]
    pub fn with_standing(mut self) -> Self {
        let user = paths::data_dir().map(|dir| (Place::User, dir.join("plugins")));
        let installed = paths::installed("lib/mlxhost/plugins");
        let installed = installed.map(|dir| (Place::Installation, dir));
        self.standing
            .extend([user, installed].into_iter().flatten());
        self
    }

    /// Splits a search path.
    #[must_use]
    pub fn with_search_path(mut self, path: Option<&OsStr>) -> Self {
        self.search_path
            .extend(path.map(std::env::split_paths).into_iter().flatten());
        self
    }
}

/// How a place came to be searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// `--plugin`.
    Named,
    /// `--plugin-dir`.
    Directory,
    /// `MLXHOST_PLUGIN_PATH`.
    SearchPath,
    /// The user's own directory.
    User,
    /// The directory of the installation.
    Installation,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Named => "--plugin",
            Self::Directory => "--plugin-dir",
            Self::SearchPath => "MLXHOST_PLUGIN_PATH",
            Self::User => "user",
            Self::Installation => "installation",
        })
    }
}

/// A place that was searched: a directory, or a file that was named.
#[derive(Debug)]
pub struct Searched {
    /// How it came to be searched.
    pub place: Place,
    /// Where it is.
    pub path: PathBuf,
    /// Why nothing in it was taken; none: it could be read.
    pub problem: Option<LoadError>,
}

/// A file that was found.
pub struct Candidate {
    /// By way of which place.
    pub place: Place,
    /// Where it is.
    pub path: PathBuf,
    /// What became of it.
    pub verdict: Verdict,
}

/// What became of a file.
pub enum Verdict {
    /// This is the plugin of its name.
    Usable(Box<PluginFile>),
    /// It is no plugin, or none that this host may load.
    Refused(LoadError),
    /// Another plugin of its name was found before it.
    Shadowed {
        /// What it says of itself.
        file: Box<PluginFile>,
        /// The other one.
        by: PathBuf,
    },
}

/// Looks everywhere.
pub(super) struct Discovery {
    pub searched: Vec<Searched>,
    pub candidates: Vec<Candidate>,
    lock: Option<Lock>,
    trust_writable: bool,
}

impl Discovery {
    /// Looks everywhere.
    ///
    /// # Errors
    /// The lock file can't be read: nothing can be allowed then.
    pub fn run(search: &Search) -> Result<Self, LoadError> {
        let lock = match &search.lock {
            Some(path) => Lock::read(path)?,
            None => None,
        };
        let mut all = Self {
            searched: Vec::new(),
            candidates: Vec::new(),
            lock,
            trust_writable: search.trust_writable,
        };
        for path in &search.named {
            all.file(Place::Named, path);
        }
        for path in &search.directories {
            all.directory(Place::Directory, path);
        }
        for path in &search.search_path {
            // A relative entry would depend on the working directory, which anyone may have filled.
            if path.is_relative() {
                if !path.as_os_str().is_empty() {
                    let what = "a relative entry of MLXHOST_PLUGIN_PATH is not searched";
                    let problem = LoadError::unsupported(path, what).remedy("use an absolute path");
                    all.note(Place::SearchPath, path, Some(problem));
                }
            } else if path.is_dir() {
                all.directory(Place::SearchPath, path);
            } else {
                all.file(Place::SearchPath, path);
            }
        }
        for (place, path) in &search.standing {
            if path.exists() {
                all.directory(*place, path);
            }
        }
        Ok(all)
    }

    fn note(&mut self, place: Place, path: &Path, problem: Option<LoadError>) {
        self.searched.push(Searched {
            place,
            path: path.to_owned(),
            problem,
        });
    }

    fn directory(&mut self, place: Place, dir: &Path) {
        let listed = self
            .check_writable(dir)
            .and_then(|()| libraries_in(dir).map_err(|e| LoadError::new(dir, e)));
        match listed {
            Err(error) => self.note(place, dir, Some(error)),
            Ok(files) => {
                self.note(place, dir, None);
                for file in files {
                    self.offer(place, &file);
                }
            }
        }
    }

    fn file(&mut self, place: Place, path: &Path) {
        self.note(place, path, None);
        self.offer(place, path);
    }

    fn offer(&mut self, place: Place, path: &Path) {
        let verdict = match self.examine(path) {
            Err(error) => Verdict::Refused(error),
            Ok(file) => {
                let file = Box::new(file);
                match self.usable(&file.manifest().name) {
                    Some(other) => Verdict::Shadowed {
                        by: other.path().to_owned(),
                        file,
                    },
                    None => Verdict::Usable(file),
                }
            }
        };
        self.candidates.push(Candidate {
            place,
            path: path.to_owned(),
            verdict,
        });
    }

    fn usable(&self, name: &str) -> Option<&PluginFile> {
        let usable = self
            .candidates
            .iter()
            .filter_map(|candidate| match &candidate.verdict {
                Verdict::Usable(file) => Some(&**file),
                _ => None,
            });
        usable.into_iter().find(|file| file.manifest().name == name)
    }

    fn examine(&self, path: &Path) -> Result<PluginFile, LoadError> {
        let file = PluginFile::read(path)?;
        self.check_writable(file.path())?;
        // By way of a link, too: the directory that the file itself is in.
        if let Some(dir) = file.path().parent() {
            self.check_replaceable(dir)?;
        }
        gate::check_version(&file)?;
        if let Some(lock) = &self.lock {
            lock.check(&file)?;
        }
        Ok(file)
    }

    /// Refuses what anyone may write to.
    fn check_writable(&self, path: &Path) -> Result<(), LoadError> {
        match mode(path) {
            Some(mode) if mode & ANYONE != 0 && !self.trust_writable => {
                Err(LoadError::unsupported(
                    path,
                    "anyone may write to it, so anyone may decide what runs here",
                )
                .remedy(format!(
                    "chmod o-w {}, or --trust-writable-plugins",
                    path.display()
                )))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a directory in which anyone may replace files of others.
    fn check_replaceable(&self, dir: &Path) -> Result<(), LoadError> {
        match mode(dir) {
            Some(mode) if mode & STICKY != 0 => Ok(()),
            _ => self.check_writable(dir),
        }
    }
}

/// Permission of everybody to write; and that a directory's files belong to their owners all the same.
const ANYONE: u32 = 0o002;
const STICKY: u32 = 0o1000;

fn mode(path: &Path) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt;
    let facts = std::fs::metadata(path).ok()?;
    Some(facts.permissions().mode())
}

/// Shared libraries directly inside a directory, by name.
fn libraries_in(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let suffix = &std::env::consts::DLL_SUFFIX[1..];
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == suffix) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
