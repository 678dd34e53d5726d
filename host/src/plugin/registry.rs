//! Which plugins there are, and which one serves a drafter.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::discover::{Candidate, Discovery, Place, Search, Searched, Verdict};
use super::library::Library;
use super::manifest::PluginFile;
use crate::error::{LoadError, LoadErrorKind};

/// The plugins of a run, in the order in which they are preferred.
pub struct Registry {
    searched: Vec<Searched>,
    candidates: Vec<Candidate>,
}

/// The plugin for a drafter, and the checkpoint it should read.
pub struct Choice {
    /// The plugin.
    pub library: Arc<Library>,
    /// What it reads; none for a plugin that needs no checkpoint.
    pub checkpoint: Option<PathBuf>,
}

impl Registry {
    /// Looks for plugins and reads what they say of themselves. Runs nothing of them. Of several of a name the
    /// first wins.
    ///
    /// # Errors
    /// The lock file can't be read. What is wrong with single files and places is found in the registry.
    pub fn discover(search: &Search) -> Result<Self, LoadError> {
        let found = Discovery::run(search)?;
        Ok(Self {
            searched: found.searched,
            candidates: found.candidates,
        })
    }

    /// The places that were searched, in that order.
    pub fn searched(&self) -> &[Searched] {
        &self.searched
    }

    /// Every file that was found, in that order.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The plugins, by preference.
    pub fn found(&self) -> impl Iterator<Item = &PluginFile> {
        self.placed().map(|(_, file)| file)
    }

    /// What is wrong with a library or a directory that the user has named, if something is.
    pub fn take_refusal_of_named(&mut self) -> Option<LoadError> {
        let by_name = |place| matches!(place, Place::Named | Place::Directory);
        let is_there = |error: &LoadError| !matches!(error.kind(), LoadErrorKind::Io(why) if why.kind() == ErrorKind::PermissionDenied);
        for searched in self.searched.iter_mut().filter(|s| by_name(s.place)) {
            if let Some(problem) = searched.problem.take_if(|problem| is_there(problem)) {
                return Some(problem);
            }
        }
        let refused = self.candidates.iter().position(|candidate| {
            candidate.place == Place::Named && matches!(candidate.verdict, Verdict::Refused(_))
        });
        match self.candidates.remove(refused?).verdict {
            Verdict::Refused(error) => Some(error),
            _ => None,
        }
    }

    /// Whether somebody has asked for plugins: not all lie where they are looked for unasked.
    pub fn is_asked_for(&self) -> bool {
        let standing = |place| matches!(place, Place::User | Place::Installation);
        self.placed().any(|(place, _)| !standing(place))
    }

    fn placed(&self) -> impl Iterator<Item = (Place, &PluginFile)> {
        self.candidates
            .iter()
            .filter_map(|candidate| match &candidate.verdict {
                Verdict::Usable(file) => Some((candidate.place, &**file)),
                _ => None,
            })
    }

    /// Whether one of the plugins serves one of these families.
    pub fn serves(&self, families: &[&str]) -> bool {
        let served = |file: &PluginFile| {
            let mut own = file.manifest().families.iter();
            own.any(|family| families.contains(&family.as_str()))
        };
        self.found().any(served)
    }

    /// The plugin that serves a drafter: by the families of `drafter`; without one, a plugin that
    /// finds its drafter inside the target's own checkpoint, or one that needs no checkpoint. `only` names the
    /// one plugin that comes into question.
    ///
    /// # Errors
    /// No plugin serves it, or the one that does is refused by a gate.
    pub fn choose(
        &self,
        drafter: Option<(&Path, &[&str])>,
        target: (&Path, &str),
        only: Option<&str>,
    ) -> Result<Choice, LoadError> {
        let is_meant = |file: &&PluginFile| only.is_none_or(|name| file.manifest().name == name);
        let found = || self.found().filter(is_meant);
        if let (Some(name), None) = (only, found().next()) {
            return Err(self.nobody_is_called(name));
        }
        let serving = |family: &str| {
            let serves = |file: &&PluginFile| file.manifest().families.iter().any(|f| f == family);
            found().find(serves)
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
        match found().find(without) {
            Some(file) => Ok(Choice {
                library: Library::load(file)?,
                checkpoint: None,
            }),
            None => {
                let (path, name) = found().next().map_or_else(
                    || (target.0, "any plugin"),
                    |file| (file.path(), file.manifest().name.as_str()),
                );
                let what = format!("{name} needs a drafter checkpoint, and none was named");
                Err(LoadError::missing(path, what).remedy("name one with --drafter DIR"))
            }
        }
    }

    fn nobody_is_called(&self, name: &str) -> LoadError {
        let names: Vec<_> = self.found().map(|f| f.manifest().name.as_str()).collect();
        let there = match names.as_slice() {
            [] => "there are none; name one with --plugin PATH".to_owned(),
            names => format!("there are: {}", names.join(", ")),
        };
        let shown = crate::text::one_line(name);
        LoadError::missing(shown, "no plugin of this name is at hand").remedy(there)
    }

    fn nobody_serves(&self, drafter: &Path, families: &[&str]) -> LoadError {
        let offers: Vec<_> = self
            .found()
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
