//! What kind of drafter a checkpoint holds, and what its config and tensors say of it.

use std::collections::BTreeSet;

use serde_json::Value;

use super::head::Head;
use crate::checkpoint::Checkpoint;
use crate::error::LoadError;

/// Sizes and lists in configs are bounded by this; more is nonsense.
const MAX_SIZE: u64 = 1 << 32;
const MAX_TAPS: usize = 256;
/// Drafts per round of a Gemma 4 assistant whose config names no block.
const ASSISTANT_DRAFTS: u64 = 3;

/// The kinds of drafters that this project knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A Qwen3.5 multi-token-prediction head in a directory of its own.
    QwenMtp,
    /// One inside a full checkpoint.
    QwenMtpInside,
    /// A Gemma 4 assistant.
    GemmaAssistant,
    /// DFlash, as z-lab publishes it.
    DFlash,
    /// DSpark, as DeepSpec publishes it or packaged otherwise.
    DSpark,
    /// A DSpark snapshot with `dspark.json`.
    DSparkSnapshot,
}

impl Kind {
    /// The kind that a config stands for.
    fn of(checkpoint: &Checkpoint) -> Option<Self> {
        checkpoint
            .families()
            .into_iter()
            .find_map(|family| match family {
                "qwen3_5_mtp" => Some(Self::QwenMtp),
                "gemma4_assistant" | "gemma4_unified_assistant" => Some(Self::GemmaAssistant),
                "DFlashDraftModel" => Some(Self::DFlash),
                "Qwen3DSparkModel" | "Gemma4DSparkModel" | "dspark" => Some(Self::DSpark),
                "dspark-drafter" => Some(Self::DSparkSnapshot),
                _ => None,
            })
    }

    /// A word for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::QwenMtp => "qwen3_5_mtp",
            Self::QwenMtpInside => "qwen3_5_mtp_inside",
            Self::GemmaAssistant => "gemma4_assistant",
            Self::DFlash => "dflash",
            Self::DSpark => "dspark",
            Self::DSparkSnapshot => "dspark_snapshot",
        }
    }

    /// A line for people.
    pub fn title(self) -> &'static str {
        match self {
            Self::QwenMtp => "multi-token-prediction head of Qwen3.5, split off",
            Self::QwenMtpInside => {
                "multi-token-prediction head of Qwen3.5, inside the full checkpoint"
            }
            Self::GemmaAssistant => "Gemma 4 assistant",
            Self::DFlash => "DFlash",
            Self::DSpark => "DSpark",
            Self::DSparkSnapshot => "DSpark snapshot (dspark.json)",
        }
    }

    /// This project's plugin for it.
    pub fn plugin(self) -> &'static str {
        match self {
            Self::QwenMtp | Self::QwenMtpInside => "qwen_mtp",
            Self::GemmaAssistant => "gemma_assistant",
            Self::DFlash | Self::DSparkSnapshot => "dflash",
            Self::DSpark => "deepspec",
        }
    }
}

/// The target that a drafter is made for, as far as its config says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Its `model_type`, or the name that a snapshot gives it.
    pub model: Option<String>,
    /// Width of its residual stream.
    pub hidden: Option<u64>,
    /// Its layers.
    pub layers: Option<u64>,
    /// Its tokens.
    pub vocab: Option<u64>,
    /// Layers whose outputs it hands over.
    pub taps: Option<Vec<i64>>,
    /// The window of its sliding layers, whose keys it lends.
    pub window: Option<u64>,
    /// Head dimensions of the keys it lends: of its sliding layers, and of the full ones.
    pub head_dims: Option<[u64; 2]>,
}

/// How weights are stored in few bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// Bits of an element, where the config says.
    pub bits: Option<u64>,
    /// Elements that share a scale.
    pub group: Option<u64>,
}

/// What is known of a drafter without running anything.
#[derive(Clone, Debug)]
pub struct Description {
    /// What it is.
    pub kind: Kind,
    /// What it is made for.
    pub target: Target,
    /// Its own layers.
    pub layers: Option<u64>,
    /// Its own width.
    pub hidden: Option<u64>,
    /// The most it drafts per round, or what it was made for.
    pub drafts: Option<u64>,
    /// `block_size` as its config has it; what that counts differs by kind.
    pub block: Option<u64>,
    /// Its tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The element types of tensors.
    pub dtypes: BTreeSet<String>,
    /// If there are packed weights.
    pub quantization: Option<Quantization>,
}

/// Describes the drafter in `checkpoint`; `None` when it holds none.
///
/// # Errors
/// There is a head inside, but which of its tensors belong to it is not clear.
pub fn describe(checkpoint: &Checkpoint) -> Result<Option<Description>, LoadError> {
    let (kind, prefix, text) = match (Kind::of(checkpoint), Head::find(checkpoint)?) {
        (Some(kind), _) => (kind, "", checkpoint.config().get("text_config")),
        (None, Some(head)) => (Kind::QwenMtpInside, head.prefix, Some(head.text)),
        (None, None) => return Ok(None),
    };
    let config = checkpoint.config();
    let text = text.unwrap_or(config);
    let block = size(config, "block_size");
    let mut found = Description {
        kind,
        target: Target {
            vocab: size(text, "vocab_size"),
            ..Target::default()
        },
        layers: size(text, "num_hidden_layers"),
        hidden: size(text, "hidden_size"),
        drafts: None,
        block,
        tensors: 0,
        bytes: 0,
        dtypes: BTreeSet::new(),
        quantization: None,
    };
    match kind {
        Kind::QwenMtp | Kind::QwenMtpInside => found.qwen_mtp(text),
        Kind::GemmaAssistant => found.gemma_assistant(config, text),
        Kind::DFlash => found.dflash(config),
        Kind::DSpark => found.dspark(config),
        Kind::DSparkSnapshot => found.snapshot(config),
    }
    found.weigh(checkpoint, prefix);
    Ok(Some(found))
}

impl Description {
    fn qwen_mtp(&mut self, text: &Value) {
        let model = self::text(text, "model_type");
        // The text model's own name is that of the target and a suffix.
        let model = model.map(|name| name.strip_suffix("_text").unwrap_or(name).to_owned());
        self.target.model = model;
        self.target.hidden = self.hidden;
        self.target.layers = self.layers;
        self.layers = Some(size(text, "mtp_num_hidden_layers").unwrap_or(1));
        // The block counts the pending token; inside a full checkpoint it follows from the layers.
        self.block = self.block.or(self.layers.map(|layers| layers + 2));
        self.drafts = self.block.map(|block| block.saturating_sub(1));
    }

    fn gemma_assistant(&mut self, config: &Value, text: &Value) {
        self.target.model = Some("gemma4".to_owned());
        self.target.hidden = size(config, "backbone_hidden_size");
        self.target.window = size(text, "sliding_window");
        let sliding = size(text, "head_dim");
        let full = size(text, "global_head_dim").or(sliding);
        self.target.head_dims = sliding.zip(full).map(|(sliding, full)| [sliding, full]);
        let drafts = self.block.map(|block| block.saturating_sub(1));
        self.drafts = Some(drafts.unwrap_or(ASSISTANT_DRAFTS));
    }

    fn dflash(&mut self, config: &Value) {
        self.of_same_width(config);
        // The type that is stated is that of its own layers.
        self.target.model = None;
        let own = config.get("dflash_config").unwrap_or(&Value::Null);
        self.block = size(own, "block_size").or(self.block);
        self.drafts = self.block.map(|block| block.saturating_sub(1));
        self.target.taps = taps(own.get("target_layer_ids"));
    }

    /// DeepSpec's own config is flat; others have the layers or the drafter's keys in a section.
    fn dspark(&mut self, config: &Value) {
        let layers = config.get("transformer_layer_config").unwrap_or(config);
        let own = config.get("dflash_config").unwrap_or(config);
        self.layers = size(layers, "num_hidden_layers");
        self.hidden = size(layers, "hidden_size");
        self.target.vocab = size(layers, "vocab_size");
        self.of_same_width(config);
        let aux = config.get("aux_hidden_state_layer_ids");
        self.target.taps = taps(own.get("target_layer_ids").or(aux));
        self.block = size(own, "block_size").or(self.block);
        self.drafts = self.block;
    }

    /// Drafters whose residual stream is as wide as the target's.
    fn of_same_width(&mut self, config: &Value) {
        self.target.model = text(config, "model_type").map(str::to_owned);
        self.target.hidden = self.hidden;
        self.target.layers = size(config, "num_target_layers");
    }

    fn snapshot(&mut self, file: &Value) {
        let own = file.get("config").unwrap_or(&Value::Null);
        let dims = file.get("dims").unwrap_or(&Value::Null);
        self.target = Target {
            model: text(file, "target_id").map(str::to_owned),
            hidden: size(dims, "hiddenSize"),
            vocab: size(dims, "vocabSize"),
            taps: taps(own.get("tapLayers")),
            ..Target::default()
        };
        self.layers = size(own, "nLayers");
        self.hidden = size(own, "dDraft");
        self.block = size(own, "gamma");
        self.drafts = self.block;
    }

    /// Counts its tensors.
    fn weigh(&mut self, checkpoint: &Checkpoint, prefix: &str) {
        let names = checkpoint.names().filter(|name| name.starts_with(prefix));
        let mut packed = false;
        for name in names {
            self.tensors += 1;
            self.bytes = self
                .bytes
                .saturating_add(checkpoint.bytes_of(name).unwrap_or(0));
            packed |= name.ends_with(".scales");
            if let Some(Ok(tensor)) = checkpoint.tensor(name) {
                self.dtypes.insert(tensor.dtype.to_string().to_lowercase());
            }
        }
        if packed {
            let scheme = checkpoint
                .config()
                .get("quantization")
                .unwrap_or(&Value::Null);
            self.quantization = Some(Quantization {
                bits: size(scheme, "bits"),
                group: size(scheme, "group_size"),
            });
        }
    }
}

fn size(config: &Value, key: &str) -> Option<u64> {
    config.get(key)?.as_u64().filter(|&size| size < MAX_SIZE)
}

fn text<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    config.get(key)?.as_str()
}

fn taps(list: Option<&Value>) -> Option<Vec<i64>> {
    let ids = list?.as_array()?.iter().take(MAX_TAPS);
    ids.map(Value::as_i64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn described(file: &str, config: Value) -> Option<Description> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(file), config.to_string()).unwrap();
        let header = br#"{"fc.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}"#;
        let length = (header.len() as u64).to_le_bytes();
        let weights = [&length[..], header, &[0; 4]].concat();
        std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
        describe(&Checkpoint::open(dir.path()).unwrap()).unwrap()
    }

    #[test]
    fn block_drafters_are_told_apart() {
        let config = json!({"architectures": ["DFlashDraftModel"], "model_type": "qwen3",
            "hidden_size": 8, "num_hidden_layers": 2, "num_target_layers": 6, "vocab_size": 99,
            "block_size": 16, "dflash_config": {"target_layer_ids": [1, 3], "block_size": 8}});
        let found = described("config.json", config).unwrap();
        assert_eq!((found.kind, found.kind.plugin()), (Kind::DFlash, "dflash"));
        assert_eq!(
            (found.drafts, found.block, found.layers),
            (Some(7), Some(8), Some(2))
        );
        assert_eq!(found.target.taps, Some(vec![1, 3]));
        assert_eq!(
            (found.target.layers, found.target.hidden),
            (Some(6), Some(8))
        );
        assert_eq!((found.tensors, found.bytes), (1, 4));

        let config = json!({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text",
            "block_size": 7, "target_layer_ids": [-1, 2]});
        let found = described("config.json", config).unwrap();
        assert_eq!(
            (found.kind, found.kind.plugin()),
            (Kind::DSpark, "deepspec")
        );
        assert_eq!(
            (found.drafts, found.target.taps),
            (Some(7), Some(vec![-1, 2]))
        );

        let file = json!({"kind": "dspark-drafter", "variant": "dspark", "version": 1, "target_id": "t",
            "config": {"gamma": 4, "dDraft": 8, "nLayers": 2, "tapLayers": [0, 5]},
            "dims": {"hiddenSize": 16, "vocabSize": 99, "eps": 1e-6}});
        let found = described("dspark.json", file).unwrap();
        assert_eq!((found.kind, found.drafts), (Kind::DSparkSnapshot, Some(4)));
        assert_eq!(found.target.model.as_deref(), Some("t"));
    }

    #[test]
    fn nonsense_is_left_out_and_targets_are_no_drafters() {
        let config = json!({"model_type": "qwen3_5_mtp", "block_size": -3,
            "text_config": {"hidden_size": 1u64 << 40, "vocab_size": "many", "mtp_num_hidden_layers": 0}});
        let found = described("config.json", config).unwrap();
        assert_eq!((found.hidden, found.target.vocab), (None, None));
        for config in [
            json!({}),
            json!({"model_type": "qwen3_5"}),
            json!({"model_type": 3}),
        ] {
            assert!(described("config.json", config).is_none());
        }
    }
}
