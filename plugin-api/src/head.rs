//! The target's head as drafters use it: whole, or only for tokens that are worth drafting.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::target::{HeadSubset, Target, TargetFacts};
use crate::tensor::Tensor;

/// Ids that drafts are restricted to: a `draft_vocab.json` beside the weights, `{"ids": [..]}`, strictly
/// ascending. Most tokens of a vocabulary are too rare to be worth their share of the head.
///
/// ```no_run
/// use plugin_api::sampling::{self, Sampling};
/// use plugin_api::{
///     Checkpoint, DraftVocabulary, Result, Target, TargetFacts, TargetHead, Tensor,
/// };
///
/// /// In `Drafter::pair`.
/// fn pair(checkpoint: &Checkpoint, target: &TargetFacts) -> Result<()> {
///     match DraftVocabulary::of(checkpoint)? {
///         Some(vocabulary) => vocabulary.require(checkpoint.path(), target),
///         None => Ok(()),
///     }
/// }
///
/// /// In `Drafter::open`.
/// fn open(checkpoint: &Checkpoint, target: Target) -> Result<TargetHead> {
///     TargetHead::open(target, DraftVocabulary::of(checkpoint)?.as_ref())
/// }
///
/// /// In `DraftRows::draft`: `[B, 1]` token ids of hiddens `[B, 1, hidden]`.
/// fn draw(head: &TargetHead, hidden: &Tensor, rows: &[Sampling], at: &[u32]) -> Result<Tensor> {
///     let drawn = sampling::draw(&head.logits(hidden)?, rows, at)?;
///     match head.ids() {
///         Some(ids) => ids.take(&drawn, 0),
///         None => Ok(drawn),
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct DraftVocabulary(Vec<u32>);

impl DraftVocabulary {
    /// That of a checkpoint; none when it has none.
    ///
    /// # Errors
    /// The file is no such list.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let Some(file) = checkpoint.json("draft_vocab.json")? else {
            return Ok(None);
        };
        let ids = file
            .opt_ints("ids")?
            .ok_or_else(|| file.error("ids", "is missing"))?;
        let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
        if ids.is_empty() || ids[0] < 0 || !ascending {
            return Err(file.error("ids", "must be strictly ascending token ids"));
        }
        Ok(Some(Self(ids.into_iter().map(|id| id as u32).collect())))
    }

    /// Refuses one with ids that the target does not have.
    ///
    /// # Errors
    /// The message has the id and the number of the target's tokens.
    pub fn require(&self, drafter: &str, target: &TargetFacts) -> Result<()> {
        match self.0.last() {
            Some(&id) if id >= target.vocab_size as u32 => Err(Error::mismatch(format!(
                "drafter {drafter} drafts the id {id}, target {} has {} tokens",
                target.name, target.vocab_size
            ))),
            _ => Ok(()),
        }
    }
}

/// The target's head.
pub struct TargetHead {
    target: Target,
    /// The restriction of the head, and the ids that its outputs stand for.
    subset: Option<(HeadSubset, Tensor)>,
}

impl TargetHead {
    /// The head, restricted to a vocabulary if there is one.
    pub fn open(target: Target, vocabulary: Option<&DraftVocabulary>) -> Result<Self> {
        let subset = match vocabulary {
            Some(DraftVocabulary(ids)) => {
                let subset = target.head_subset(ids)?;
                let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
                Some((subset, Tensor::from_slice(&ids, &[ids.len() as i32])?))
            }
            None => None,
        };
        Ok(Self { target, subset })
    }

    fn key(&self) -> Option<HeadSubset> {
        self.subset.as_ref().map(|(key, _)| *key)
    }

    /// Logits as the target has them: `[.., hidden]` to one per token of the vocabulary.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.target.logits(hidden, self.key())
    }

    /// As [`TargetHead::logits`], without a softcap.
    pub fn logits_bare(&self, hidden: &Tensor) -> Result<Tensor> {
        self.target.logits_bare(hidden, self.key())
    }

    /// The token ids that its logits stand for, `[n]` i32; none: all, in order.
    pub fn ids(&self) -> Option<&Tensor> {
        self.subset.as_ref().map(|(_, ids)| ids)
    }
}
