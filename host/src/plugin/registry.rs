//! Which plugins there are, and which one serves a drafter.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::library::Library;
use super::manifest::PluginFile;
use crate::error::LoadError;

/// The plugins of a run, in the order in which they are preferred.
#[derive(Default)]
pub struct Registry {
    found: Vec<PluginFile>,
    refused: Vec<LoadError>,
}

/// The plugin for a drafter, and the checkpoint it should read.
pub struct Choice {
    /// The plugin.
    pub library: Arc<Library>,
    /// What it reads; none for a plugin that needs no checkpoint.
    pub checkpoint: Option<PathBuf>,
}

impl Registry {
    /// Reads the named libraries, then those in the given directories and in the entries (libraries
    /// or directories) of a search path such as `MLXHOST_PLUGIN_PATH`. Runs nothing of them.
    ///
    /// # Errors
    /// A *named* library cannot be read. What a directory holds besides plugins is passed over; what
    /// looks like a plugin there and is refused is kept in [`Registry::refused`].
    pub fn discover(
        named: &[PathBuf],
        directories: &[PathBuf],
        search_path: Option<&std::ffi::OsStr>,
    ) -> Result<Self, LoadError> {
        let mut registry = Self::default();
        for path in named {
            registry.add(PluginFile::read(path)?);
        }
        for dir in directories {
            let listed = libraries_in(dir).map_err(|e| LoadError::new(dir, e))?;
            registry.offer(&listed);
        }
        for entry in search_path.map(std::env::split_paths).into_iter().flatten() {
            // A relative entry would depend on the working directory, which anyone may have filled.
            if entry.as_os_str().is_empty() || entry.is_relative() {
                registry.refused.push(
                    LoadError::unsupported(
                        &entry,
                        "a relative entry of MLXHOST_PLUGIN_PATH is not searched",
                    )
                    .remedy("use an absolute path"),
                );
            } else if entry.is_dir() {
                match libraries_in(&entry) {
                    Ok(listed) => registry.offer(&listed),
                    Err(error) => registry.refused.push(LoadError::new(&entry, error)),
                }
            } else {
                registry.offer(&[entry]);
            }
        }
        Ok(registry)
    }

    /// The first of a name wins.
    fn add(&mut self, file: PluginFile) {
        let name = &file.manifest().name;
        if self
            .found
            .iter()
            .all(|known| known.manifest().name != *name)
        {
            self.found.push(file);
        }
    }

    fn offer(&mut self, paths: &[PathBuf]) {
        for path in paths {
            match PluginFile::read(path) {
                Ok(file) => self.add(file),
                Err(error) => self.refused.push(error),
            }
        }
    }

    /// The plugins, by preference.
    pub fn found(&self) -> &[PluginFile] {
        &self.found
    }

    /// Whether one of the plugins serves one of these families.
    pub fn serves(&self, families: &[&str]) -> bool {
        let served = |file: &PluginFile| {
            let mut own = file.manifest().families.iter();
            own.any(|family| families.contains(&family.as_str()))
        };
        self.found.iter().any(served)
    }

    /// What was found and could not be read.
    pub fn refused(&self) -> &[LoadError] {
        &self.refused
    }

    /// The plugin that serves a drafter: by the families of `drafter`; without one, a plugin that
    /// finds its drafter inside the target's own checkpoint, or one that needs no checkpoint.
    ///
    /// # Errors
    /// No plugin serves it, or the one that does is refused by a gate.
    pub fn choose(
        &self,
        drafter: Option<(&Path, &[&str])>,
        target: (&Path, &str),
    ) -> Result<Choice, LoadError> {
        let serving = |family: &str| {
            let serves = |file: &&PluginFile| file.manifest().families.iter().any(|f| f == family);
            self.found.iter().find(serves)
        };
        if let Some((path, families)) = drafter {
            let file = families.iter().find_map(|family| serving(family));
            let file = file.ok_or_else(|| self.nobody_serves(path, families))?;
            return Ok(Choice {
                library: Library::load(file)?,
                checkpoint: Some(path.to_owned()),
            });
        }
        // Among several plugins a target's own head goes before a drafter without weights.
        if let Some(file) = serving(target.1) {
            return Ok(Choice {
                library: Library::load(file)?,
                checkpoint: Some(target.0.to_owned()),
            });
        }
        let without = |file: &&PluginFile| file.manifest().families.is_empty();
        match self.found.iter().find(without) {
            Some(file) => Ok(Choice {
                library: Library::load(file)?,
                checkpoint: None,
            }),
            None => {
                let (path, name) = self.found.first().map_or_else(
                    || (target.0, "any plugin"),
                    |file| (file.path(), file.manifest().name.as_str()),
                );
                let what = format!("{name} needs a drafter checkpoint, and none was named");
                Err(LoadError::missing(path, what).remedy("name one with --drafter DIR"))
            }
        }
    }

    fn nobody_serves(&self, drafter: &Path, families: &[&str]) -> LoadError {
        let offers: Vec<_> = self
            .found
            .iter()
            .map(|file| {
                let manifest = file.manifest();
                format!("{} ({})", manifest.name, manifest.families.join(", "))
            })
            .collect();
        let shown = families
            .iter()
            .map(|family| format!("{:?}", crate::text::one_line(family)));
        let shown = shown.collect::<Vec<_>>().join(" or ");
        let what = format!("no loaded plugin serves drafters of type {shown}");
        let error = LoadError::unsupported(drafter, what);
        if offers.is_empty() {
            error.remedy("name the plugin with --plugin PATH")
        } else {
            error.remedy(format!(
                "loaded: {}; name another with --plugin",
                offers.join("; ")
            ))
        }
    }
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
