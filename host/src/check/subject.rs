//! What is tested, in the process that tests it.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::report::Broken;
use super::stage::Stage;
use crate::backend;
use crate::checkpoint::Checkpoint;
use crate::error::LoadError;
use crate::model::{Model, TargetHandle};
use crate::plugin::{Drafter, DrafterSource, Library, PluginFile};

/// A plugin, and what it may be tried on.
pub struct Subject {
    /// The plugin's library.
    pub plugin: PathBuf,
    /// The drafter's checkpoint, if it has one.
    pub drafter: Option<PathBuf>,
    /// `--drafter-option` pairs.
    pub options: Vec<(String, String)>,
    /// The target.
    pub target: Arc<Checkpoint>,
    /// The digest of the target's token table, if it has one.
    pub vocabulary: Option<String>,
    /// Texts for the target to continue, as tokens; none without a tokenizer.
    pub prompts: Vec<Vec<i32>>,
    /// The only seed that is tried, else several.
    pub seed: Option<u64>,
    /// When whatever can be shorter should come to its end.
    pub until: Instant,
}

impl Subject {
    /// A subject whose longest tests take a good part of `limit`.
    pub fn until(limit: Duration) -> Instant {
        Instant::now() + limit / 3
    }

    /// Whether there is time to go on.
    pub(super) fn has_time(&self) -> bool {
        Instant::now() < self.until
    }

    pub(super) fn file(&self) -> Result<PluginFile, LoadError> {
        PluginFile::read(&self.plugin)
    }

    pub(super) fn source(&self, options: &[(String, String)]) -> Result<DrafterSource, LoadError> {
        Ok(DrafterSource {
            library: Library::load(&self.file()?)?,
            checkpoint: self.drafter.clone(),
            options: [&self.options, options].concat(),
        })
    }

    /// The target, loaded.
    pub(super) fn target(&self) -> Result<Rc<TargetHandle>, LoadError> {
        backend::install();
        let model = Model::load(self.target.clone(), self.vocabulary.clone())?;
        Ok(Rc::new(TargetHandle::new(Rc::new(model))))
    }

    /// A drafter for it.
    pub(super) fn load(&self, target: &TargetHandle) -> Result<Rc<Drafter>, LoadError> {
        Drafter::load(&self.source(&[])?, target.model())
    }

    /// Target and drafter.
    pub(super) fn stage(&self) -> Result<Stage, Broken> {
        let target = self.target()?;
        self.stage_on(target)
    }

    /// A drafter on a target that is loaded.
    pub(super) fn stage_on(&self, target: Rc<TargetHandle>) -> Result<Stage, Broken> {
        let drafter = self.load(&target)?;
        Ok(Stage {
            taps: drafter.taps().to_vec(),
            target,
            drafter,
            _finish: backend::Finish,
        })
    }

    /// The drafter's checkpoint, opened.
    pub(super) fn drafter_checkpoint(&self) -> Result<Option<Checkpoint>, LoadError> {
        self.drafter.as_deref().map(Checkpoint::open).transpose()
    }

    pub(super) fn target_path(&self) -> &Path {
        self.target.path()
    }
}
