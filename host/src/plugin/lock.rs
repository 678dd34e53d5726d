//! The lock file: the plugins that may be loaded, by the digest of their content.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::manifest::PluginFile;
use crate::error::LoadError;
use crate::paths;

/// The format that is written and read.
const FORMAT: u32 = 1;

/// The largest file that is read.
const MAX_BYTES: u64 = 1 << 20;

/// The plugins that may be loaded. Where there is such a file, nothing else may.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    pins: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    lock: u32,
    /// SHA-256 of each plugin's library, hexadecimal, by its name.
    plugins: BTreeMap<String, String>,
}

impl Lock {
    /// Reads a lock file; none if there is no such file.
    ///
    /// # Errors
    /// It can't be read, or is not a lock file: then nobody knows what is allowed.
    pub fn read(path: &Path) -> Result<Option<Self>, LoadError> {
        let broken = |what: String| {
            LoadError::malformed(path, format!("not a lock file: {what}"))
                .remedy("write it anew with `mlxhost plugins lock`, or delete it")
        };
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(LoadError::new(path, error)),
        };
        let mut text = Vec::new();
        let read = file.take(MAX_BYTES + 1).read_to_end(&mut text);
        if read.map_err(|e| LoadError::new(path, e))? as u64 > MAX_BYTES {
            return Err(broken("too large".to_owned()));
        }
        let stored: Stored = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
        if stored.lock != FORMAT {
            return Err(broken(format!("of format {}", stored.lock)));
        }
        Ok(Some(Self {
            path: path.to_owned(),
            pins: stored.plugins,
        }))
    }

    /// Writes a file that allows these plugins and no others.
    ///
    /// # Errors
    /// The system's; an older file is then as it was.
    pub fn write(path: &Path, files: &[&PluginFile]) -> Result<(), LoadError> {
        let pin = |file: &&PluginFile| (file.manifest().name.clone(), file.digest().to_owned());
        let stored = Stored {
            lock: FORMAT,
            plugins: files.iter().map(pin).collect(),
        };
        let text = serde_json::to_string_pretty(&stored)
            .map_err(std::io::Error::from)
            .and_then(|text| paths::write_whole(path, format!("{text}\n").as_bytes()));
        text.map_err(|e| LoadError::new(path, e))
    }

    /// Refuses a plugin that is not pinned, or is not as it was.
    pub(super) fn check(&self, file: &PluginFile) -> Result<(), LoadError> {
        let name = &file.manifest().name;
        let lock = self.path.display();
        let what = match self.pins.get(name) {
            Some(digest) if digest == file.digest() => return Ok(()),
            Some(_) => format!("its content is not what {lock} has pinned for {name}"),
            None => format!("plugin {name} is not pinned in {lock}"),
        };
        Err(LoadError::mismatch(file.path(), what)
            .remedy("if you trust it: `mlxhost plugins lock` with the same plugins pins it"))
    }
}
