//! Where a Qwen3.5 checkpoint keeps its multi-token-prediction head, and how that stores its norms.

use serde_json::Value;

use crate::checkpoint::{Checkpoint, Quoted};
use crate::error::LoadError;

/// Heads have one layer; more than this is no head.
const MAX_LAYERS: u64 = 16;

/// What the names of a head's tensors begin with: as published, and as converters rename them.
const PUBLISHED: &str = "mtp.";
const CONVERTED: &str = "language_model.mtp.";

/// How a head stores the weights of its norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// As they are used.
    AsUsed,
    /// Minus one, as Qwen3.5 is published.
    MinusOne,
}

/// A head inside a full checkpoint.
pub(super) struct Head<'a> {
    pub checkpoint: &'a Checkpoint,
    /// What its tensors' names begin with.
    pub prefix: &'static str,
    /// The config of the target's text model.
    pub text: &'a Value,
    /// Layers of the head.
    pub layers: u64,
}

impl<'a> Head<'a> {
    /// The head inside `checkpoint`; `None` when it is of another family or has none.
    pub fn find(checkpoint: &'a Checkpoint) -> Result<Option<Self>, LoadError> {
        if !is_qwen3_5(checkpoint) {
            return Ok(None);
        }
        let has = |prefix: &str| checkpoint.names().any(|name| name.starts_with(prefix));
        let prefix = match (has(PUBLISHED), has(CONVERTED)) {
            (false, false) => return Ok(None),
            (true, false) => PUBLISHED,
            (false, true) => CONVERTED,
            (true, true) => {
                let what = format!("it has both {PUBLISHED}* and {CONVERTED}* tensors");
                return Err(LoadError::malformed(checkpoint.path(), what)
                    .remedy("which of them are its head, nothing says: remove the others"));
            }
        };
        let config = checkpoint.config();
        let text = config.get("text_config").filter(|text| text.is_object());
        let text = text.unwrap_or(config);
        let layers = match text.get("mtp_num_hidden_layers") {
            None => 1,
            Some(count) => match count.as_u64().filter(|n| (1..=MAX_LAYERS).contains(n)) {
                Some(count) => count,
                None => {
                    let count = count.to_string();
                    let what = format!(
                        "config.json: \"mtp_num_hidden_layers\" is {}, expected 1 to {MAX_LAYERS}",
                        Quoted(&count)
                    );
                    return Err(LoadError::malformed(checkpoint.path(), what));
                }
            },
        };
        Ok(Some(Self {
            checkpoint,
            prefix,
            text,
            layers,
        }))
    }

    /// How its norms are stored, from structure alone: values can't tell. What decides is whether the
    /// whole checkpoint went through a converter, and whether the head went with it.
    pub fn norms(&self) -> Result<Norms, LoadError> {
        let body = self.body_is_published()?;
        match (body, self.prefix) {
            (true, PUBLISHED) => Ok(Norms::MinusOne),
            (false, CONVERTED) => Ok(Norms::AsUsed),
            (true, prefix) => Err(self.ambiguous(&format!(
                "its layers are as published, but its head is named {prefix}* as converters do"
            ))),
            (false, prefix) => Err(self.ambiguous(&format!(
                "its layers are converted, but its head is named {prefix}* as published: \
                 some converters shift the norms of such heads, some don't"
            ))),
        }
    }

    /// Whether the layers of the target are as published: convolutions `[C, 1, K]`, where converters
    /// make them `[C, K, 1]`.
    fn body_is_published(&self) -> Result<bool, LoadError> {
        let (mut published, mut converted) = (false, false);
        let convolutions = self
            .checkpoint
            .names()
            .filter(|name| name.ends_with("linear_attn.conv1d.weight"));
        for name in convolutions {
            let shape = match self.checkpoint.tensor(name) {
                Some(tensor) => tensor?.shape,
                None => continue,
            };
            match shape[..] {
                [_, 1, kernel] if kernel != 1 => published = true,
                [_, kernel, 1] if kernel != 1 => converted = true,
                _ => {
                    let what = format!("{} has shape {shape:?}", Quoted(name));
                    return Err(self.ambiguous(&what));
                }
            }
        }
        match (published, converted) {
            (true, false) => Ok(true),
            (false, true) => Ok(false),
            (true, true) => Err(self.ambiguous("some of its convolutions are converted, some not")),
            (false, false) => Err(self.ambiguous("it has no convolution that would tell")),
        }
    }

    fn ambiguous(&self, why: &str) -> LoadError {
        let what = format!("whether the head's norms are stored minus one is not clear: {why}");
        LoadError::unsupported(self.checkpoint.path(), what)
            .remedy("if you know, say --norms minus-one or --norms as-used")
    }

    /// A size in the config of the text model, if it is a plausible one.
    pub fn size(&self, key: &str) -> Option<usize> {
        let size = self.text.get(key)?.as_u64()?;
        usize::try_from(size).ok().filter(|&size| size < 1 << 32)
    }
}

/// Whether the config says that this is a Qwen3.5 target, dense or with experts.
pub(super) fn is_qwen3_5(checkpoint: &Checkpoint) -> bool {
    let model_type = checkpoint
        .config()
        .get("model_type")
        .and_then(Value::as_str);
    matches!(
        model_type,
        Some("qwen3_5" | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text")
    )
}
