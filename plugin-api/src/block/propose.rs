//! From a block's logits to drafts, column by column where each depends on the one before.

use crate::abi::{DType, Tap};
use crate::block::{Ask, Confidence, Markov};
use crate::config::Config;
use crate::drafter::Drafts;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::sampling;
use crate::tensor::Tensor;

/// Below what confidence a draft ends.
#[derive(Clone, Debug, Default)]
pub struct Thresholds(Vec<f32>);

impl Thresholds {
    /// The `min_confidence` option, or else what the checkpoint says for each column (`calibrated`).
    ///
    /// # Errors
    /// A threshold is not within 0 to 1, or asked of a drafter without a confidence head.
    pub fn take(
        options: &mut Options,
        path: &str,
        has_head: bool,
        calibrated: Vec<f32>,
    ) -> Result<Self> {
        let wanted: Option<f32> = options.take("min_confidence")?;
        let all = match wanted {
            Some(one) => vec![one],
            None => calibrated,
        };
        if let Some(wrong) = all.iter().find(|t| !(0.0..=1.0).contains(*t)) {
            let problem = format!("{path}: a confidence of {wrong} is asked for: expected 0 to 1");
            return Err(Error::invalid(problem));
        }
        if wanted.is_some_and(|t| t > 0.0) && !has_head {
            return Err(Error::invalid(format!(
                "{path}: min_confidence is given, and this drafter has no confidence head"
            )));
        }
        Ok(Self(all))
    }

    /// Whether anything may be cut.
    fn cuts(&self) -> bool {
        self.0.iter().any(|&t| t > 0.0)
    }

    /// How many drafts of these confidences stay: those before the first that is below its threshold.
    fn keep(&self, confidences: &[f32]) -> u32 {
        let threshold = |column: usize| self.0.get(column).or(self.0.last()).copied();
        let stays = |(column, confidence): &(usize, &f32)| {
            **confidence >= threshold(*column).unwrap_or(0.0)
        };
        confidences.iter().enumerate().take_while(stays).count() as u32
    }
}

/// What makes drafts of a block's columns.
#[derive(Clone, Copy)]
pub struct Chain<'a> {
    /// What the token before adds to a column's logits.
    pub markov: Option<&'a Markov>,
    /// Judges drafts, where there is such a head.
    pub confidence: Option<&'a Confidence>,
    /// Where drafts end.
    pub thresholds: &'a Thresholds,
    /// The token ids of what is drawn, `[draft vocabulary]` i32, where that is not the vocabulary.
    pub ids: Option<&'a Tensor>,
}

impl Chain<'_> {
    /// Drafts from the logits `[B, W, V]` of the columns that predict, the first one the token after the
    /// pending one, and their hiddens `[B, W, H]`.
    pub fn propose(&self, logits: &Tensor, hidden: &Tensor, ask: &Ask<'_>) -> Result<Drafts> {
        let depth = ask.max_depth().min(logits.dim(1));
        if depth == 0 {
            return Ok(Drafts {
                ids: None,
                lens: vec![0; ask.depths.len()],
            });
        }
        let Some(markov) = self.markov else {
            let drawn = sampling::draw(&logits.slice(1, 0, depth)?, ask.sampling, ask.positions)?;
            let ids = self.named(drawn)?;
            let confidences = match self.judge() {
                Some(head) => Some(head.of(&hidden.slice(1, 0, depth)?, None)?),
                None => None,
            };
            return self.cut(ids, confidences, ask);
        };
        let mut before = ask.pending.clone();
        let mut state = None;
        let (mut ids, mut confidences) = (Vec::new(), Vec::new());
        for column in 0..depth {
            let own = |x: &Tensor| x.slice(1, column, column + 1);
            let (hidden, embedded) = (own(hidden)?, markov.embed(&before)?);
            let bias = markov.bias(&embedded, &hidden, &mut state)?;
            if let Some(head) = self.judge() {
                confidences.push(head.of(&hidden, Some(&embedded))?);
            }
            let positions: Vec<u32> = ask.positions.iter().map(|p| p + column as u32).collect();
            let logits = own(logits)?.add(&bias)?;
            before = self.named(sampling::draw(&logits, ask.sampling, &positions)?)?;
            ids.push(before.clone());
        }
        let joined = |columns: &[Tensor]| Tensor::concat(&columns.iter().collect::<Vec<_>>(), 1);
        let confidences = match confidences.as_slice() {
            [] => None,
            columns => Some(joined(columns)?),
        };
        self.cut(joined(&ids)?, confidences, ask)
    }

    /// The ids of drawn tokens.
    fn named(&self, drawn: Tensor) -> Result<Tensor> {
        match self.ids {
            Some(ids) => ids.take(&drawn, 0),
            None => Ok(drawn),
        }
    }

    /// The confidence head, if its word counts.
    fn judge(&self) -> Option<&Confidence> {
        self.confidence.filter(|_| self.thresholds.cuts())
    }

    /// Ends each row's draft where its confidence does.
    fn cut(&self, ids: Tensor, confidences: Option<Tensor>, ask: &Ask<'_>) -> Result<Drafts> {
        let width = ids.dim(1);
        let mut lens: Vec<u32> = ask.depths.iter().map(|&d| d.min(width as u32)).collect();
        let Some(confidences) = confidences else {
            return Ok(Drafts {
                ids: Some(ids),
                lens,
            });
        };
        // Drafts and confidences are computed together, in one go.
        let confidences = confidences.astype(DType::F32)?;
        Tensor::start_all(&[&ids, &confidences])?;
        let confidences = confidences.to_vec::<f32>()?;
        for (len, row) in lens.iter_mut().zip(confidences.chunks(width as usize)) {
            *len = (*len).min(self.thresholds.keep(row));
        }
        let longest = lens.iter().copied().max().unwrap_or(0) as i32;
        let ids = match longest {
            0 => None,
            longest => Some(ids.slice(1, 0, longest)?),
        };
        Ok(Drafts { ids, lens })
    }
}

/// A block's token ids, `[B, width]`: the pending token `[B, 1]`, then masks.
pub fn masked(pending: &Tensor, mask: i32, width: i32) -> Result<Tensor> {
    let rows = pending.dim(0);
    let masks = vec![mask; (rows * (width - 1).max(0)) as usize];
    let masks = Tensor::from_slice(&masks, &[rows, (width - 1).max(0)])?;
    Tensor::concat(&[pending, &masks], 1)
}

/// The taps that a list of layer numbers stands for: the output of that layer, -1 the embedding. The last
/// layer of a target has no output of that kind: publishers' code sees it after the final norm.
pub fn taps(config: &Config, key: &str, ids: &[i32], target_layers: i32) -> Result<Vec<Tap>> {
    let inside = |&id: &i32| (-1..target_layers - 1).contains(&id);
    if ids.is_empty() || !ids.iter().all(inside) {
        let problem = format!(
            "is {ids:?}, expected layers of -1 to {} of a target with {target_layers}",
            target_layers - 2
        );
        return Err(config.error(key, problem));
    }
    Ok(ids.iter().map(|&id| Tap::layer(id)).collect())
}
