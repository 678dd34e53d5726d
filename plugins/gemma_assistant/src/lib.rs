//! Gemma 4 assistants: a few narrow layers that look at the target's own keys and values.
//!
//! A step combines the target's embedding of a token with a hidden of the target's width, runs layers
//! without keys of their own, and gives the next token's logits and the next hidden. The first hidden is
//! the target's, after its final norm. Format: `gemma4_assistant` as published, dense or with MLX's
//! affine quantization.

mod model;
mod rows;
mod settings;

use std::rc::Rc;

use plugin_api::layers::GemmaKind;
use plugin_api::{
    Checkpoint, DonorFacts, Drafter, DrafterInfo, Options, Result, RowSpec, Shared, Tap, Target,
    TargetFacts, export_plugin,
};

use model::Assistant;
use rows::AssistantRows;
use settings::Settings;

/// An assistant whose config is read; its weights follow with the first rows.
pub struct GemmaAssistant {
    checkpoint: Rc<Checkpoint>,
    settings: Settings,
    model: Shared<Assistant>,
}

impl Drafter for GemmaAssistant {
    type Rows = AssistantRows;

    fn load(checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        let checkpoint = Checkpoint::needed(checkpoint, "gemma_assistant")?;
        let settings = Settings::read(&checkpoint, options)?;
        settings.require_tensors(&checkpoint)?;
        Ok(Self {
            checkpoint: Rc::new(checkpoint),
            settings,
            model: Shared::default(),
        })
    }

    fn info(&self) -> DrafterInfo {
        DrafterInfo {
            name: "gemma_assistant".into(),
            weight_bytes: self.checkpoint.bytes(""),
            taps: vec![Tap::FINAL],
            donors: self.settings.donors(),
            default_depth: 3,
            max_depth: 16,
        }
    }

    fn pair(&self, target: &TargetFacts) -> Result<()> {
        let (path, settings) = (self.checkpoint.path(), &self.settings);
        target.require(
            path,
            "backbone hidden size",
            settings.backbone,
            target.hidden_size,
        )?;
        target.require(path, "vocabulary size", settings.vocab, target.vocab_size)?;
        for (kind, attention) in &settings.layers {
            let what = match kind {
                GemmaKind::Full => "full",
                GemmaKind::Sliding => "sliding",
            };
            let same_kind = |donor: &&DonorFacts| donor.kind == kind.donor();
            let Some(donor) = target.donors.iter().find(same_kind) else {
                continue; // The host refuses it, with the reason.
            };
            let same = |name: &str, own: i32, theirs: u32| {
                target.require(
                    path,
                    &format!("{name} of {what} layers"),
                    own,
                    theirs as i32,
                )
            };
            same("head size", attention.head_dim, donor.head_dim)?;
            same("key heads", attention.kv_heads, donor.kv_heads)?;
            if *kind == GemmaKind::Sliding {
                target.require(path, "sliding window", settings.window, donor.window as i32)?;
            }
        }
        target.require_vocabulary(path, self.checkpoint.vocabulary()?.as_deref())
    }

    fn open(
        &mut self,
        target: Target,
        facts: &TargetFacts,
        rows: &[RowSpec],
    ) -> Result<Self::Rows> {
        let (checkpoint, settings) = (&self.checkpoint, &self.settings);
        let load = || Assistant::load(checkpoint, settings, target, facts.dtype).map(Rc::new);
        let model = self.model.get_or_load(load)?;
        Ok(AssistantRows::new(model, rows))
    }
}

export_plugin! {
    drafter: GemmaAssistant,
    name: "gemma_assistant",
    families: ["gemma4_assistant", "gemma4_unified_assistant"],
    options: {
        "positions": "where drafts stand, as the publisher has it (default), mlx_vlm or optiq",
    },
}
