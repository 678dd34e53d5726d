//! Projected context rows: the text so far, as layers of a block drafter look at it.

use crate::abi::DType;
use crate::checkpoint::Weights;
use crate::drafter::Advance;
use crate::error::{Error, Result};
use crate::layers::{DecoderLayer, GemmaLayer, LayerCache, Linear, RmsNorm, Step};
use crate::rows::kept_rows;
use crate::state::RowState;
use crate::tensor::Tensor;

/// A layer over context rows and a block.
pub enum ContextLayer {
    /// Pre-norm, as in Qwen3.
    Plain(DecoderLayer),
    /// As in Gemma 4.
    Gemma(GemmaLayer),
}

/// The projection of target hiddens, and the layers that look at them.
///
/// A context row is made once from the hiddens of one processed token, and every layer keeps its keys and
/// values of it. Columns of a block are dropped after the pass: the next rows are written over them.
pub struct Context {
    projection: Linear,
    norm: RmsNorm,
    layers: Vec<ContextLayer>,
    /// Whether context rows go through each layer's first norm, as columns of a block do.
    normed: bool,
    out_norm: RmsNorm,
    dtype: DType,
}

/// The context of a group of rows.
pub struct ContextRows {
    caches: Vec<LayerCache>,
    /// Processed tokens per row.
    lens: Vec<i32>,
}

impl Context {
    /// `projection` takes all taps side by side, `[taps * hidden]`; `norm` follows it; `out_norm` ends a
    /// pass. Everything computes in `dtype`.
    pub fn new(
        projection: Linear,
        norm: RmsNorm,
        layers: Vec<ContextLayer>,
        out_norm: RmsNorm,
        dtype: DType,
    ) -> Self {
        Self {
            projection,
            norm,
            layers,
            normed: false,
            out_norm,
            dtype,
        }
    }

    /// Takes `fc`, `hidden_norm` and `norm`, as DFlash and DeepSpec name them.
    pub fn load(
        w: &Weights,
        (taps, hidden, eps): (usize, i32, f32),
        layers: Vec<ContextLayer>,
        dtype: DType,
    ) -> Result<Self> {
        let inputs = i32::try_from(taps).ok().and_then(|n| n.checked_mul(hidden));
        let inputs = inputs.ok_or_else(|| w.error("fc", "is too wide"))?;
        Ok(Self::new(
            Linear::load(&w.child("fc"), inputs, hidden)?,
            RmsNorm::load(&w.child("hidden_norm"), hidden, eps)?,
            layers,
            RmsNorm::load(&w.child("norm"), hidden, eps)?,
            dtype,
        ))
    }

    /// Context rows go through each layer's first norm, too.
    #[must_use]
    pub fn normed_by_layers(self) -> Self {
        Self {
            normed: true,
            ..self
        }
    }

    /// An empty context for so many rows.
    pub fn new_rows(&self, rows: usize) -> ContextRows {
        let cache = |layer: &ContextLayer| match layer {
            ContextLayer::Plain(layer) => layer.new_cache(),
            ContextLayer::Gemma(layer) => layer.new_cache(),
        };
        ContextRows {
            caches: self.layers.iter().map(cache).collect(),
            lens: vec![0; rows],
        }
    }

    /// Appends the tokens of an advance; its taps are those that the projection takes.
    pub fn follow(&self, rows: &mut ContextRows, advance: &Advance<'_>) -> Result<()> {
        let news = advance.rows.iter().map(|row| row.tokens.len() as i32);
        let news: Vec<i32> = news.collect();
        let width = news.iter().copied().max().unwrap_or(0);
        if width == 0 {
            return Ok(());
        }
        let taps = advance.taps.iter().map(|tap| {
            let filled = tap.slice(1, 0, width)?;
            filled.astype(self.dtype)
        });
        let taps = taps.collect::<Result<Vec<_>>>()?;
        if taps.is_empty() {
            return Err(Error::failed(
                "the target's hiddens did not come with the tokens",
            ));
        }
        let taps = Tensor::concat(&taps.iter().collect::<Vec<_>>(), -1)?;
        let context = self.norm.forward(&self.projection.forward(&taps)?)?;
        let step = Step::new(&rows.lens, &news, width, false)?;
        for (layer, cache) in self.layers.iter().zip(&mut rows.caches) {
            match layer {
                ContextLayer::Plain(layer) => {
                    layer.remember(&context, self.normed, &step, cache)?;
                }
                ContextLayer::Gemma(layer) => layer.remember(&context, &step, cache)?,
            }
        }
        let state: Vec<&Tensor> = rows.caches.iter().flat_map(LayerCache::tensors).collect();
        Tensor::start_all(&state)?;
        for (len, new) in rows.lens.iter_mut().zip(news) {
            *len += new;
        }
        Ok(())
    }

    /// One row of a context that goes on from a state.
    pub fn restored(&self, state: &RowState) -> Result<ContextRows> {
        let mut rows = self.new_rows(1);
        for (index, cache) in rows.caches.iter_mut().enumerate() {
            *cache = cache.restored(&format!("layer.{index}"), state)?;
        }
        rows.lens = vec![state.processed() as i32];
        Ok(rows)
    }

    /// A pass over a block that begins after each row's last processed token: `x` `[B, W, hidden]`, of
    /// which row `b` fills `columns[b]`, to the same shape after the last norm.
    pub fn pass(&self, rows: &mut ContextRows, x: &Tensor, columns: &[i32]) -> Result<Tensor> {
        if rows.lens.contains(&0) {
            return Err(Error::failed("drafting before the prompt"));
        }
        let step = Step::new(&rows.lens, columns, x.dim(1), false)?;
        let mut x = x.astype(self.dtype)?;
        for (layer, cache) in self.layers.iter().zip(&mut rows.caches) {
            x = match layer {
                ContextLayer::Plain(layer) => layer.forward(&x, &step, cache)?,
                ContextLayer::Gemma(layer) => layer.forward(&x, &step, cache, None)?,
            };
        }
        self.out_norm.forward(&x)
    }
}

impl ContextRows {
    /// The given rows alone, strictly ascending; `self` does not change.
    pub fn filtered(&self, keep: &[usize]) -> Result<Self> {
        let rows = kept_rows(keep, self.lens.len())?;
        let caches = self.caches.iter().map(|cache| cache.filtered(&rows));
        Ok(Self {
            caches: caches.collect::<Result<_>>()?,
            lens: keep.iter().map(|&row| self.lens[row]).collect(),
        })
    }

    /// The rows of `self`, then those of `other`; neither changes.
    pub fn joined(&self, other: &Self) -> Result<Self> {
        let caches = self.caches.iter().zip(&other.caches);
        Ok(Self {
            caches: caches.map(|(a, b)| a.joined(b)).collect::<Result<_>>()?,
            lens: [&self.lens[..], &other.lens].concat(),
        })
    }

    /// The state of one row.
    pub fn capture(&self, row: usize, schema: &str) -> Result<RowState> {
        let mut state = RowState::new(schema, self.lens[row] as u32);
        for (index, cache) in self.caches.iter().enumerate() {
            cache.capture(row, &format!("layer.{index}"), &mut state)?;
        }
        Ok(state)
    }

    /// Rows of the group.
    pub fn count(&self) -> usize {
        self.lens.len()
    }
}
