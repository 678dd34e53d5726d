//! DSpark drafters as DeepSpec trains them: a block of masks beside the target's own hiddens, whose drafts
//! depend on each other by a Markov head, and end where a confidence head says so.
//!
//! Format: `Qwen3DSparkModel` and `Gemma4DSparkModel` of DeepSpec, and two other packagings of the same
//! ([`settings`]).

mod model;
mod settings;

use std::rc::Rc;

use plugin_api::block::BlockRows;
use plugin_api::{
    Checkpoint, Drafter, DrafterInfo, Options, Result, RowSpec, Shared, Target, TargetFacts,
    export_plugin,
};

use model::DSpark;
use settings::Settings;

/// A drafter whose config is read; its weights follow with the first rows.
pub struct DeepSpec {
    checkpoint: Rc<Checkpoint>,
    settings: Settings,
    model: Shared<DSpark>,
}

impl Drafter for DeepSpec {
    type Rows = BlockRows<DSpark>;

    fn load(checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        let checkpoint = Checkpoint::needed(checkpoint, "deepspec")?;
        let settings = Settings::read(&checkpoint, options)?;
        settings.require_tensors(&checkpoint)?;
        Ok(Self {
            checkpoint: Rc::new(checkpoint),
            settings,
            model: Shared::default(),
        })
    }

    fn info(&self) -> DrafterInfo {
        let depth = (self.settings.columns - self.settings.first) as u32;
        DrafterInfo {
            name: "deepspec".into(),
            weight_bytes: self.checkpoint.bytes(""),
            taps: self.settings.taps.clone(),
            donors: Vec::new(),
            default_depth: depth,
            max_depth: depth,
        }
    }

    fn pair(&self, target: &TargetFacts) -> Result<()> {
        let path = self.checkpoint.path();
        self.settings.pair(path, target)?;
        target.require_vocabulary(path, self.checkpoint.vocabulary()?.as_deref())
    }

    fn open(
        &mut self,
        target: Target,
        facts: &TargetFacts,
        rows: &[RowSpec],
    ) -> Result<Self::Rows> {
        let (checkpoint, settings) = (&self.checkpoint, &self.settings);
        let load = || DSpark::load(checkpoint, settings, target, facts.dtype).map(Rc::new);
        let model = self.model.get_or_load(load)?;
        Ok(BlockRows::new(model, rows))
    }
}

export_plugin! {
    drafter: DeepSpec,
    name: "deepspec",
    families: ["Qwen3DSparkModel", "Gemma4DSparkModel", "dspark"],
    options: {
        "min_confidence": "end a draft before the first token that is less sure than this, 0 to 1",
    },
}
