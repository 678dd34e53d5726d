//! DFlash drafters: several tokens in one pass over a block of masks, beside the target's own hiddens.
//!
//! Two formats: the checkpoints of z-lab ([`published`]), and DSpark snapshots ([`snapshot`]).

mod published;
mod snapshot;

use std::rc::Rc;

use plugin_api::block::{BlockDrafter, BlockRows};
use plugin_api::{
    Checkpoint, Drafter, DrafterInfo, Options, Result, RowSpec, Shared, Target, TargetFacts,
    export_plugin,
};

use published::Published;
use snapshot::Snapshot;

/// A drafter whose config is read; its weights follow with the first rows.
pub struct DFlash {
    checkpoint: Rc<Checkpoint>,
    format: Format,
    model: Shared<dyn BlockDrafter>,
}

enum Format {
    Published(published::Settings),
    Snapshot(snapshot::Settings),
}

impl Drafter for DFlash {
    type Rows = BlockRows<dyn BlockDrafter>;

    fn load(checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        let checkpoint = Checkpoint::needed(checkpoint, "dflash")?;
        let format = if checkpoint.config()?.opt_str("kind")? == Some("dspark-drafter") {
            let settings = snapshot::Settings::read(&checkpoint, options)?;
            settings.require_tensors(&checkpoint)?;
            Format::Snapshot(settings)
        } else {
            let settings = published::Settings::read(&checkpoint, options)?;
            settings.require_tensors(&checkpoint)?;
            Format::Published(settings)
        };
        Ok(Self {
            checkpoint: Rc::new(checkpoint),
            format,
            model: Shared::default(),
        })
    }

    fn info(&self) -> DrafterInfo {
        let (taps, usual, most) = match &self.format {
            Format::Published(s) => (&s.taps, s.usual_block - 1, s.block - 1),
            Format::Snapshot(s) => (&s.taps, s.gamma, s.gamma),
        };
        DrafterInfo {
            name: "dflash".into(),
            weight_bytes: self.checkpoint.bytes(""),
            taps: taps.clone(),
            donors: Vec::new(),
            default_depth: usual as u32,
            max_depth: most as u32,
        }
    }

    fn pair(&self, target: &TargetFacts) -> Result<()> {
        let path = self.checkpoint.path();
        match &self.format {
            Format::Published(settings) => settings.pair(path, target)?,
            Format::Snapshot(settings) => settings.pair(path, target)?,
        }
        target.require_vocabulary(path, self.checkpoint.vocabulary()?.as_deref())
    }

    fn open(
        &mut self,
        target: Target,
        facts: &TargetFacts,
        rows: &[RowSpec],
    ) -> Result<Self::Rows> {
        let (checkpoint, dtype) = (&self.checkpoint, facts.dtype);
        let model = self.model.get_or_load(|| {
            Ok(match &self.format {
                Format::Published(settings) => {
                    Rc::new(Published::load(checkpoint, settings, target, dtype)?)
                }
                Format::Snapshot(settings) => {
                    Rc::new(Snapshot::load(checkpoint, settings, target, dtype)?)
                }
            })
        })?;
        Ok(BlockRows::new(model, rows))
    }
}

export_plugin! {
    drafter: DFlash,
    name: "dflash",
    families: ["DFlashDraftModel", "dspark-drafter"],
    options: {
        "draft_vocab": "auto: draft only what draft_vocab.json lists, if there is one (default), or full",
        "min_confidence": "end a draft before the first token that is less sure than this, 0 to 1",
    },
}
