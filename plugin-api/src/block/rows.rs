//! A group of rows of any block drafter.

use std::rc::Rc;

use crate::abi::RowSpec;
use crate::block::{Context, ContextRows};
use crate::drafter::{Advance, DraftRequest, DraftRows, Drafts};
use crate::error::Result;
use crate::sampling::Sampling;
use crate::state::RowState;
use crate::tensor::Tensor;

/// The form of a captured row.
const SCHEMA: &str = "block/2";

/// What is asked of a block that was computed.
pub struct Ask<'a> {
    /// The token before the block's first draft, `[B, 1]` i32.
    pub pending: &'a Tensor,
    /// How each row is sampled.
    pub sampling: &'a [Sampling],
    /// The position of each row's first draft: the key of its draw.
    pub positions: &'a [u32],
    /// At most this many tokens per row.
    pub depths: &'a [u32],
}

impl Ask<'_> {
    /// The deepest row's depth.
    pub fn max_depth(&self) -> i32 {
        self.depths.iter().copied().max().unwrap_or(0) as i32
    }
}

/// A family of block drafters.
///
/// ```no_run
/// use plugin_api::block::{Ask, BlockDrafter, Chain, Context, Thresholds, masked};
/// use plugin_api::{Drafts, Result, Target, TargetHead, Tensor};
///
/// /// A block is the pending token and masks; every mask becomes a draft.
/// struct Masks {
///     context: Context,
///     target: Target,
///     head: TargetHead,
///     mask: i32,
///     thresholds: Thresholds,
/// }
///
/// impl BlockDrafter for Masks {
///     fn context(&self) -> &Context {
///         &self.context
///     }
///
///     fn columns(&self, depth: u32) -> i32 {
///         1 + depth as i32
///     }
///
///     fn input(&self, pending: &Tensor, width: i32) -> Result<Tensor> {
///         self.target.embed(&masked(pending, self.mask, width)?)
///     }
///
///     fn propose(&self, out: &Tensor, ask: &Ask<'_>) -> Result<Drafts> {
///         // The first column is the pending token's.
///         let hidden = out.slice(1, 1, out.dim(1))?;
///         let chain = Chain {
///             markov: None,
///             confidence: None,
///             thresholds: &self.thresholds,
///             ids: self.head.ids(),
///         };
///         chain.propose(&self.head.logits(&hidden)?, &hidden, ask)
///     }
/// }
/// ```
pub trait BlockDrafter: 'static {
    /// The projection and the layers.
    fn context(&self) -> &Context;

    /// Columns of the block in which a row gets `depth` drafts, at least 1. What a row drafts must not
    /// depend on other rows: the block is as wide as the widest row's, and each row sees only its own
    /// columns.
    fn columns(&self, depth: u32) -> i32;

    /// The block's input `[B, W, hidden]` from each row's pending token, `[B, 1]` i32.
    fn input(&self, pending: &Tensor, width: i32) -> Result<Tensor>;

    /// Tokens from the block's output `[B, W, hidden]`.
    fn propose(&self, out: &Tensor, ask: &Ask<'_>) -> Result<Drafts>;
}

/// The rows of a group: their context, and nothing else.
pub struct BlockRows<D: ?Sized> {
    drafter: Rc<D>,
    context: ContextRows,
    sampling: Vec<Sampling>,
}

impl<D: BlockDrafter + ?Sized> BlockRows<D> {
    /// A group with one row per spec, nothing processed yet.
    pub fn new(drafter: Rc<D>, rows: &[RowSpec]) -> Self {
        Self {
            context: drafter.context().new_rows(rows.len()),
            sampling: rows.iter().map(|row| row.sampling).collect(),
            drafter,
        }
    }
}

impl<D: BlockDrafter + ?Sized> DraftRows for BlockRows<D> {
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.drafter.context().follow(&mut self.context, advance)
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
        if request.max_depth() == 0 {
            return Drafts::from_lists(&vec![Vec::new(); request.depths.len()]);
        }
        let rows = request.pending.len() as i32;
        let pending = Tensor::from_slice(request.pending, &[rows, 1])?;
        let columns = request.depths.iter();
        let columns: Vec<i32> = columns.map(|&d| self.drafter.columns(d)).collect();
        let width = columns.iter().copied().max().unwrap_or(1);
        let input = self.drafter.input(&pending, width)?;
        let context = self.drafter.context();
        let out = context.pass(&mut self.context, &input, &columns)?;
        self.drafter.propose(
            &out,
            &Ask {
                pending: &pending,
                sampling: &self.sampling,
                positions: request.positions,
                depths: request.depths,
            },
        )
    }

    fn commit(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.drafter.context().follow(&mut self.context, advance)
    }

    fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
        self.context = self.context.filtered(keep)?;
        self.sampling = keep.iter().map(|&row| self.sampling[row]).collect();
        Ok(())
    }

    fn append(&mut self, other: Self) -> Result<()> {
        self.context = self.context.joined(&other.context)?;
        self.sampling.extend(other.sampling);
        Ok(())
    }

    fn row_count(&self) -> usize {
        self.context.count()
    }

    fn capture(&self, row: usize) -> Result<Option<RowState>> {
        self.context.capture(row, SCHEMA).map(Some)
    }

    fn restore(&mut self, state: &RowState) -> Result<()> {
        state.require(SCHEMA)?;
        self.context = self.drafter.context().restored(state)?;
        Ok(())
    }
}
