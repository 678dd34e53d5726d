//! The target as a drafter sees it: facts and capabilities, never a model.

use abi_stable::std_types::RSlice;

use crate::abi::{self, DType, DonorFacts, RawTarget};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// What the pairing gate compares.
///
/// ```
/// use plugin_api::abi::FaultCode;
/// use plugin_api::{DType, TargetFacts};
///
/// let target = TargetFacts {
///     name: "SmolLM2".into(),
///     model_type: "llama".into(),
///     hidden_size: 576,
///     layers: 30,
///     vocab_size: 49152,
///     dtype: DType::F32,
///     vocabulary: None,
///     donors: Vec::new(),
/// };
/// // In `Drafter::pair`: the drafter's number, then the target's.
/// target.require("heads/a", "hidden size", 576, target.hidden_size)?;
/// let error = target.require("heads/b", "hidden size", 64, target.hidden_size).unwrap_err();
/// assert_eq!(error.code(), FaultCode::MISMATCH);
/// assert_eq!(error.message(), "drafter heads/b has hidden size 64, target SmolLM2 has 576");
/// # Ok::<(), plugin_api::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TargetFacts {
    /// A name for messages.
    pub name: String,
    /// `model_type` of its text model.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: i32,
    /// Decoder layers.
    pub layers: i32,
    /// Rows of the head.
    pub vocab_size: i32,
    /// Dtype of the residual stream.
    pub dtype: DType,
    /// Digest of its token table, if it has a tokenizer.
    pub vocabulary: Option<String>,
    /// The keys and values that it lends.
    pub donors: Vec<DonorFacts>,
}

impl TargetFacts {
    /// As the boundary carries it.
    pub fn as_abi(&self) -> abi::TargetFacts<'_> {
        abi::TargetFacts {
            name: self.name.as_str().into(),
            model_type: self.model_type.as_str().into(),
            hidden_size: self.hidden_size as u32,
            layers: self.layers as u32,
            vocab_size: self.vocab_size as u32,
            dtype: self.dtype,
            vocabulary: self.vocabulary.as_deref().map(Into::into).into(),
            donors: self.donors.as_slice().into(),
        }
    }

    pub(crate) fn from_abi(facts: &abi::TargetFacts<'_>) -> Self {
        let size = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        Self {
            name: facts.name.into(),
            model_type: facts.model_type.into(),
            hidden_size: size(facts.hidden_size),
            layers: size(facts.layers),
            vocab_size: size(facts.vocab_size),
            dtype: facts.dtype,
            vocabulary: facts.vocabulary.into_option().map(String::from),
            donors: facts.donors.to_vec(),
        }
    }

    /// Refuses a drafter whose number differs from the target's, naming both.
    pub fn require(&self, drafter: &str, what: &str, drafters: i32, targets: i32) -> Result<()> {
        if drafters == targets {
            return Ok(());
        }
        Err(Error::mismatch(format!(
            "drafter {drafter} has {what} {drafters}, target {} has {targets}",
            self.name
        )))
    }

    /// Refuses a drafter whose token table is known to be another one.
    pub fn require_vocabulary(&self, drafter: &str, digest: Option<&str>) -> Result<()> {
        match (digest, self.vocabulary.as_deref()) {
            (Some(a), Some(b)) if a != b => Err(Error::mismatch(format!(
                "drafter {drafter} was made for another token table (digest {}) than target {} ({})",
                a.get(..12).unwrap_or(a),
                self.name,
                b.get(..12).unwrap_or(b)
            ))),
            _ => Ok(()),
        }
    }
}

/// The capabilities of a target; valid as long as the rows that were opened on it.
///
/// ```no_run
/// use plugin_api::{Result, Target, Tensor};
///
/// /// What the target's own head makes of tokens' embeddings: `[B, T]` to `[B, T, vocabulary]`.
/// fn echo(target: Target, tokens: &Tensor) -> Result<Tensor> {
///     target.logits(&target.embed(tokens)?, None)
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Target(RawTarget);

/// A restriction of the head to some rows, from [`Target::head_subset`].
#[derive(Clone, Copy, Debug)]
pub struct HeadSubset(u64);

impl Target {
    pub(crate) fn new(raw: RawTarget) -> Self {
        Self(raw)
    }

    /// Input embeddings as the target's first layer gets them: `[..]` i32 to `[.., hidden]`.
    ///
    /// # Errors
    /// `UNSUPPORTED` when the target does not lend its embedding.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        self.embedded(ids, false)
    }

    /// Rows of the embedding as they are stored, without the factor that Gemma has.
    ///
    /// # Errors
    /// As [`Target::embed`].
    pub fn embed_bare(&self, ids: &Tensor) -> Result<Tensor> {
        self.embedded(ids, true)
    }

    fn embedded(&self, ids: &Tensor, bare: bool) -> Result<Tensor> {
        let slot = self.0.table.embed().into_option();
        let slot = slot.ok_or_else(|| lacks("its embedding"))?;
        Tensor::own("embed", slot(self.0.this, ids.raw(), bare))
    }

    /// Head logits of hiddens after the final norm: `[.., hidden]` to `[.., vocabulary]` (or the
    /// subset's length).
    ///
    /// # Errors
    /// `UNSUPPORTED` when the target does not lend its head.
    pub fn logits(&self, hidden: &Tensor, subset: Option<HeadSubset>) -> Result<Tensor> {
        self.headed(hidden, subset, false)
    }

    /// As [`Target::logits`], without the softcap that Gemma has.
    ///
    /// # Errors
    /// As [`Target::logits`].
    pub fn logits_bare(&self, hidden: &Tensor, subset: Option<HeadSubset>) -> Result<Tensor> {
        self.headed(hidden, subset, true)
    }

    fn headed(&self, hidden: &Tensor, subset: Option<HeadSubset>, bare: bool) -> Result<Tensor> {
        let slot = self.0.table.logits().into_option();
        let slot = slot.ok_or_else(|| lacks("its head"))?;
        let subset = subset.map_or(0, |s| s.0);
        Tensor::own("logits", slot(self.0.this, hidden.raw(), subset, bare))
    }

    /// Restricts the head to strictly ascending ids.
    ///
    /// # Errors
    /// `UNSUPPORTED` when the target cannot; `INVALID` when an id is out of range or order.
    pub fn head_subset(&self, ids: &[u32]) -> Result<HeadSubset> {
        let slot = self.0.table.head_subset().into_option();
        let slot = slot.ok_or_else(|| lacks("rows of its head"))?;
        let key = slot(self.0.this, RSlice::from_slice(ids)).into_result();
        key.map(HeadSubset).map_err(Error::from)
    }
}

fn lacks(what: &str) -> Error {
    Error::unsupported(format!("the target does not lend {what}"))
}
