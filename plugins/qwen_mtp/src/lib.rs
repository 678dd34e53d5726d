//! Qwen3.5 multi-token-prediction heads: one decoder layer that continues the target's last hidden.
//!
//! Row `p` of the head combines token `p + 1` with the target's hidden at `p`, and predicts token
//! `p + 2`; to draft further it takes its own output for the hidden. Embedding and output head are
//! the target's. Format: the split snapshots of mlx-vlm (`qwen3_5_mtp`), and the `mtp.*` tensors of
//! full Qwen3.5 checkpoints.

mod head;
mod rows;
mod settings;

use std::rc::Rc;

use plugin_api::{
    Checkpoint, Drafter, DrafterInfo, Options, Result, RowSpec, Shared, Target, TargetFacts,
    export_plugin,
};

use head::Head;
use rows::MtpRows;
use settings::Settings;

/// A head whose config is read; its weights follow with the first rows.
pub struct QwenMtp {
    checkpoint: Rc<Checkpoint>,
    settings: Settings,
    head: Shared<Head>,
}

impl Drafter for QwenMtp {
    type Rows = MtpRows;

    fn load(checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        let checkpoint = Checkpoint::needed(checkpoint, "qwen_mtp")?;
        let settings = Settings::read(&checkpoint, options)?;
        settings.require_tensors(&checkpoint)?;
        Ok(Self {
            checkpoint: Rc::new(checkpoint),
            settings,
            head: Shared::default(),
        })
    }

    fn info(&self) -> DrafterInfo {
        DrafterInfo {
            name: "qwen_mtp".into(),
            weight_bytes: self.checkpoint.bytes(self.settings.prefix()),
            taps: vec![self.settings.tap],
            donors: Vec::new(),
            default_depth: self.settings.depth,
            max_depth: 16,
        }
    }

    fn pair(&self, target: &TargetFacts) -> Result<()> {
        let (path, settings) = (self.checkpoint.path(), &self.settings);
        target.require(path, "hidden size", settings.hidden, target.hidden_size)?;
        target.require(path, "vocabulary size", settings.vocab, target.vocab_size)?;
        if let Some(vocabulary) = &settings.draft_vocab {
            vocabulary.require(path, target)?;
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
        let load = || Head::load(checkpoint, settings, target, facts.dtype).map(Rc::new);
        let head = self.head.get_or_load(load)?;
        Ok(MtpRows::new(head, self.settings.commit, rows))
    }
}

export_plugin! {
    drafter: QwenMtp,
    name: "qwen_mtp",
    families: ["qwen3_5_mtp", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"],
    options: {
        "hidden": "which target hidden the head sees: post_norm (default) or pre_norm",
        "commit": "accepted rows: recompute from true hiddens (default) or keep as drafted",
        "draft_vocab": "auto: restrict the draft head as draft_vocab.json says (default), or full",
    },
}
