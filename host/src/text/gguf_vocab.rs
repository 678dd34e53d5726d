//! The tokenizer that a GGUF file carries in its metadata.

use std::collections::BTreeMap;
use std::path::Path;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, TokenizerImpl};

use super::detokenize::{MAX_ID, Rules, SPACE};
use super::spm::Spm;
use super::tokenizer::Engine;
use crate::checkpoint::gguf::Metadata;
use crate::error::LoadError;

/// Texts of control tokens that end a turn; older files don't name theirs by id.
const TURN_ENDS: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The vocabulary of a GGUF file and what belongs to it.
///
/// Byte-level BPE (`gpt2`) whose text is split as for GPT-2, SmolLM, Llama 3 or Qwen2, and
/// SentencePiece BPE (`llama`) are supported.
#[derive(Debug)]
pub struct GgufVocab {
    pub(super) tokens: Vec<String>,
    pub(super) kinds: Vec<Kind>,
    model: Model,
    pub(super) add_bos: bool,
    pub(super) add_eos: bool,
    pub(super) bos: Option<i32>,
    pub(super) eos: Option<i32>,
    /// The ids that end a text.
    pub(super) eos_ids: Vec<i32>,
    /// Special tokens by the names that templates have for them.
    pub(super) names: BTreeMap<&'static str, String>,
    pub(super) chat_template: Option<String>,
}

#[derive(Debug)]
enum Model {
    Bpe { split: Cut, merges: Vec<String> },
    Spm { scores: Vec<f32>, prefix: bool },
}

/// How text is cut before merging (`tokenizer.ggml.pre`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    Gpt2,
    Smollm,
    Llama3,
    Qwen2,
}

/// `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    fn from_id(id: i64) -> Option<Self> {
        Some(match id {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }

    pub(super) fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }
}

impl GgufVocab {
    /// Reads the keys `tokenizer.*` of the file at `path`.
    ///
    /// # Errors
    /// There is no tokenizer, it is of a kind that is not supported (the error names it), or what
    /// the keys say does not fit together.
    pub fn from_metadata(path: &Path, metadata: &Metadata) -> Result<Self, LoadError> {
        let reader = Reader { path, metadata };
        let Some(kind) = metadata.get_str("tokenizer.ggml.model") else {
            return Err(reader.absent("tokenizer.ggml.model"));
        };
        let tokens = metadata.get_array_of_str("tokenizer.ggml.tokens");
        let Some(tokens) = tokens else {
            return Err(reader.absent("tokenizer.ggml.tokens"));
        };
        if tokens.is_empty() || tokens.len() > MAX_ID as usize {
            let what = format!("tokenizer.ggml.tokens has {} tokens", tokens.len());
            return Err(LoadError::malformed(path, what));
        }
        let kinds = reader.kinds(tokens.len())?;
        let (model, add_bos) = match kind {
            "gpt2" => {
                let split = reader.split()?;
                let merges = metadata.get_array_of_str("tokenizer.ggml.merges");
                let Some(merges) = merges else {
                    return Err(reader.absent("tokenizer.ggml.merges"));
                };
                let merges = merges.into_iter().map(str::to_owned).collect();
                (Model::Bpe { split, merges }, split == Cut::Llama3)
            }
            "llama" => {
                let scores = metadata.get_array_of_f32("tokenizer.ggml.scores");
                let Some(scores) = scores else {
                    return Err(reader.absent("tokenizer.ggml.scores"));
                };
                reader.same_length("tokenizer.ggml.scores", scores.len(), tokens.len())?;
                let prefix = reader.flag("tokenizer.ggml.add_space_prefix", true)?;
                (Model::Spm { scores, prefix }, true)
            }
            other => return Err(reader.unsupported("model", other, "gpt2 and llama")),
        };
        let id = |name: &str| reader.id(&format!("tokenizer.ggml.{name}_token_id"), tokens.len());
        let (bos, eos, eot, eom) = (id("bos")?, id("eos")?, id("eot")?, id("eom")?);
        let mut eos_ids: Vec<i32> = [eos, eot, eom].into_iter().flatten().collect();
        let mut names = BTreeMap::new();
        let text = |id: i32| tokens.get(usize::try_from(id).ok()?).copied();
        // The other two are only names: files fill in ids that are none.
        let (unk, pad) = (id("unknown").unwrap_or(None), id("padding").unwrap_or(None));
        for (name, id) in super::special::NAMES.into_iter().zip([bos, eos, unk, pad]) {
            if let Some(text) = id.and_then(text) {
                names.insert(name, text.to_owned());
            }
        }
        for (i, token) in (0i32..).zip(&tokens) {
            if TURN_ENDS.contains(token) && kinds.get(i as usize) == Some(&Kind::Control) {
                eos_ids.push(i);
            }
        }
        Ok(Self {
            model,
            add_bos: reader.flag("tokenizer.ggml.add_bos_token", add_bos)?,
            add_eos: reader.flag("tokenizer.ggml.add_eos_token", false)?,
            bos,
            eos,
            eos_ids,
            names,
            chat_template: metadata
                .get_str("tokenizer.chat_template")
                .map(str::to_owned),
            tokens: tokens.into_iter().map(str::to_owned).collect(),
            kinds,
        })
    }

    /// Id, text and kind of every token that the model has. Rows that the converter made up to
    /// pad the table are none: the same model elsewhere doesn't have them.
    pub(super) fn table(&self) -> impl Iterator<Item = (u32, &str, Kind)> {
        let all = (0u32..).zip(self.tokens.iter().zip(&self.kinds));
        all.map(|(id, (token, kind))| (id, token.as_str(), *kind))
            .filter(|(id, token, kind)| *kind != Kind::Unused || *token != format!("[PAD{id}]"))
    }

    /// How its tokens become text.
    pub(super) fn rules(&self) -> Rules {
        match self.model {
            Model::Bpe { .. } => Rules::byte_level(),
            Model::Spm { prefix, .. } => Rules::sentencepiece(prefix),
        }
    }

    /// What turns text into its tokens.
    pub(super) fn engine(&self) -> tokenizers::Result<Engine> {
        match &self.model {
            Model::Bpe { split, merges } => {
                let mut tokenizer = tokenizers::Tokenizer::new(self.bpe(*split, merges)?);
                if *split == Cut::Qwen2 {
                    tokenizer.with_normalizer(Some(NFC))?;
                }
                tokenizer.with_pre_tokenizer(Some(split.pre_tokenizer()?));
                tokenizer.add_tokens(self.added())?;
                Ok(Engine::Crate(Box::new(tokenizer)))
            }
            Model::Spm { scores, prefix } => {
                let mut tokenizer = TokenizerImpl::new(Spm::new(&self.tokens, scores, &self.kinds));
                let mut steps: Vec<NormalizerWrapper> = Vec::new();
                if *prefix {
                    steps.push(Prepend::new(SPACE.to_string()).into());
                }
                steps.push(Replace::new(" ", SPACE.to_string())?.into());
                tokenizer.with_normalizer(Some(Normalizers::new(steps)))?;
                tokenizer.add_tokens(self.added())?;
                Ok(Engine::Spm(Box::new(tokenizer)))
            }
        }
    }

    fn bpe(&self, split: Cut, merges: &[String]) -> tokenizers::Result<BPE> {
        // In reverse, so that of two tokens with the same text the first is the one it becomes.
        let mut table: Vec<_> = self.table().collect();
        table.reverse();
        let vocab: Vocab = table
            .into_iter()
            .map(|(id, t, _)| (t.to_owned(), id))
            .collect();
        let merges: Option<Merges> = merges.iter().map(|m| pair(m)).collect();
        BPE::builder()
            .vocab_and_merges(vocab, merges.ok_or("a merge is not two tokens")?)
            .ignore_merges(split == Cut::Llama3)
            .build()
    }

    /// The tokens that are found in text before it is cut.
    fn added(&self) -> Vec<AddedToken> {
        let spm = matches!(self.model, Model::Spm { .. });
        let mut added = Vec::new();
        for (_, token, kind) in self.table() {
            // With `▁` they would not be found in text that still has spaces; merging finds them.
            let user = kind == Kind::UserDefined && !(spm && token.contains(SPACE));
            if !token.is_empty() && (user || kind.is_special()) {
                added.push(AddedToken::from(token, kind.is_special()).normalized(false));
            }
        }
        added
    }
}

/// The two tokens of a merge; the first may begin with a space, so that one doesn't separate.
fn pair(merge: &str) -> Option<(String, String)> {
    let first = merge.chars().next()?.len_utf8();
    let at = first + merge.get(first..)?.find(' ')?;
    Some((merge.get(..at)?.to_owned(), merge.get(at + 1..)?.to_owned()))
}

impl Cut {
    fn pre_tokenizer(self) -> tokenizers::Result<Sequence> {
        let regex = |regex: &str| {
            let pattern = SplitPattern::Regex(regex.to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        };
        let first: Option<PreTokenizerWrapper> = match self {
            Self::Gpt2 => None,
            Self::Smollm => Some(Digits::new(true).into()),
            Self::Llama3 => Some(regex(LLAMA3)?.into()),
            Self::Qwen2 => Some(regex(QWEN2)?.into()),
        };
        let own_regex = matches!(self, Self::Gpt2 | Self::Smollm);
        let bytes = ByteLevel::new(false, true, own_regex).into();
        Ok(Sequence::new(first.into_iter().chain([bytes]).collect()))
    }
}

struct Reader<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
}

impl Reader<'_> {
    /// The error about a key that is missing or has the wrong kind of value.
    fn absent(&self, key: &str) -> LoadError {
        match self.metadata.kind(key) {
            Some(kind) => LoadError::malformed(self.path, format!("{key} is {kind}")),
            None => LoadError::missing(self.path, format!("{key} is missing"))
                .remedy("the file has no tokenizer: use one that was converted with it"),
        }
    }

    fn unsupported(&self, key: &str, value: &str, known: &str) -> LoadError {
        let what = format!("tokenizer.ggml.{key} {value:.40?} is not supported; {known} are");
        LoadError::unsupported(self.path, what)
    }

    fn same_length(&self, key: &str, len: usize, tokens: usize) -> Result<(), LoadError> {
        if len == tokens {
            return Ok(());
        }
        let what = format!("{key} has {len} values for {tokens} tokens");
        Err(LoadError::mismatch(self.path, what))
    }

    fn kinds(&self, tokens: usize) -> Result<Vec<Kind>, LoadError> {
        let key = "tokenizer.ggml.token_type";
        if !self.metadata.contains(key) {
            return Ok(vec![Kind::Normal; tokens]);
        }
        let Some(kinds) = self.metadata.get_array_of_i64(key) else {
            return Err(self.absent(key));
        };
        self.same_length(key, kinds.len(), tokens)?;
        let kinds: Option<Vec<Kind>> = kinds.into_iter().map(Kind::from_id).collect();
        kinds.ok_or_else(|| LoadError::malformed(self.path, format!("{key} has an unknown type")))
    }

    fn split(&self) -> Result<Cut, LoadError> {
        let key = "tokenizer.ggml.pre";
        // Files older than the key are those of GPT-2.
        match self.metadata.get_str(key) {
            None if self.metadata.contains(key) => Err(self.absent(key)),
            None | Some("gpt-2" | "default") => Ok(Cut::Gpt2),
            Some("smollm") => Ok(Cut::Smollm),
            Some("llama-bpe" | "llama3" | "llama-v3") => Ok(Cut::Llama3),
            Some("qwen2") => Ok(Cut::Qwen2),
            Some(other) => {
                Err(self.unsupported("pre", other, "gpt-2, default, smollm, llama-bpe and qwen2"))
            }
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, LoadError> {
        match self.metadata.get_bool(key) {
            Some(flag) => Ok(flag),
            None if self.metadata.contains(key) => Err(self.absent(key)),
            None => Ok(default),
        }
    }

    fn id(&self, key: &str, tokens: usize) -> Result<Option<i32>, LoadError> {
        if !self.metadata.contains(key) {
            return Ok(None);
        }
        let id = self.metadata.get_u64(key).filter(|id| *id < tokens as u64);
        match id.and_then(|id| i32::try_from(id).ok()) {
            Some(id) => Ok(Some(id)),
            None => Err(LoadError::malformed(
                self.path,
                format!("{key} is not the id of a token"),
            )),
        }
    }
}
