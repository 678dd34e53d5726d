//! Heads that let a draft depend on the one before it, and that say how likely it is right.
//!
//! A block's columns are computed at once, blind to each other's tokens. A Markov head adds to each
//! column's logits what the token before it suggests: a factorised table of bigrams, `w2(w1[token])`, plain,
//! gated by the column's hidden, or with a state of its own. Source: DeepSpec's DSpark.

use crate::error::{Error, Result};
use crate::layers::Linear;
use crate::tensor::Tensor;

/// How the token before becomes a bias.
pub enum MarkovKind {
    /// `w2(e)`
    Vanilla,
    /// `w2(sigmoid(gate([h; e])) * e)`, gate `[r, H + r]`.
    Gated(Linear),
    /// `[g, c, o] = joint([s; e; h])`, `s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`, `w2(tanh(o))`; joint
    /// `[3 r, 2 r + H]`.
    Gru(Linear),
    /// `s = tanh(w(s) + e)`, `w2(s)`; w `[r, r]`, with a bias.
    Elman(Linear),
}

/// A Markov head of rank `r`.
pub struct Markov {
    w1: Linear,
    w2: Linear,
    kind: MarkovKind,
}

impl Markov {
    /// `w1` `[V, r]` is looked up by the token before, `w2` `[V, r]` gives the bias.
    pub fn new(w1: Linear, w2: Linear, kind: MarkovKind) -> Self {
        Self { w1, w2, kind }
    }

    /// `[B, 1]` i32 to `[B, 1, r]`.
    pub fn embed(&self, before: &Tensor) -> Result<Tensor> {
        self.w1.lookup(before)
    }

    /// What is added to a column's logits, `[B, 1, V]`: from the embedded token before it, its hidden
    /// `[B, 1, H]`, and the state that the columns before have left (none before the first).
    pub fn bias(
        &self,
        embedded: &Tensor,
        hidden: &Tensor,
        state: &mut Option<Tensor>,
    ) -> Result<Tensor> {
        let zero = || Tensor::full(&embedded.shape(), 0.0, embedded.dtype());
        let x = match &self.kind {
            MarkovKind::Vanilla => return self.w2.forward(embedded),
            MarkovKind::Gated(gate) => {
                let both = Tensor::concat(&[hidden, embedded], -1)?;
                gate.forward(&both)?.sigmoid()?.mul(embedded)?
            }
            MarkovKind::Gru(joint) => {
                let before = state.take().map_or_else(zero, Ok)?;
                let all = joint.forward(&Tensor::concat(&[&before, embedded, hidden], -1)?)?;
                let rank = embedded.dim(-1);
                let part = |index: i32| all.slice(-1, index * rank, (index + 1) * rank);
                let (gate, candidate) = (part(0)?.sigmoid()?, tanh(&part(1)?)?);
                // s = c + g (s - c)
                let change = before.sub(&candidate)?;
                *state = Some(candidate.add(&gate.mul(&change)?)?);
                tanh(&part(2)?)?
            }
            MarkovKind::Elman(w) => {
                let before = state.take().map_or_else(zero, Ok)?;
                let next = tanh(&w.forward(&before)?.add(embedded)?)?;
                *state = Some(next.clone());
                next
            }
        };
        self.w2.forward(&x)
    }
}

fn tanh(x: &Tensor) -> Result<Tensor> {
    x.unary(crate::abi::UnaryOp::TANH)
}

/// How likely a draft is right, given that those before it are: `sigmoid(w [h; e] + b)`.
pub struct Confidence {
    w: Linear,
    with_markov: bool,
}

impl Confidence {
    /// `w` is `[1, H + r]`, or without the Markov head's embedding `[1, H]`; it has a bias.
    pub fn new(w: Linear, with_markov: bool) -> Self {
        Self { w, with_markov }
    }

    /// `[B, 1]` for a column, from its hidden `[B, 1, H]` and the embedded token before it.
    pub fn of(&self, hidden: &Tensor, embedded: Option<&Tensor>) -> Result<Tensor> {
        let both;
        let x = match (self.with_markov, embedded) {
            (false, _) => hidden,
            (true, Some(embedded)) => {
                both = Tensor::concat(&[hidden, embedded], -1)?;
                &both
            }
            (true, None) => {
                return Err(Error::failed("the confidence head wants a Markov head"));
            }
        };
        let [rows, columns, _] = x.dims()?;
        self.w.forward(x)?.sigmoid()?.reshape(&[rows, columns])
    }
}
