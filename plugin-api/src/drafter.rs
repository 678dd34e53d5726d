//! What a drafter author implements.

use crate::abi::{DonorKind, RowSpec, Tap};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::state::RowState;
use crate::target::{Target, TargetFacts};
use crate::tensor::Tensor;

/// A loaded drafter: its config and its weights, shared by all groups of rows.
///
/// The host calls [`load`](Drafter::load), [`info`](Drafter::info) and [`pair`](Drafter::pair) once, in this order,
/// then [`open`](Drafter::open) for each group. All rows are dropped before the drafter.
///
/// ```no_run
/// use std::rc::Rc;
///
/// use plugin_api::layers::Linear;
/// use plugin_api::{
///     Checkpoint, Drafter, DrafterInfo, Options, Result, RowSpec, Shared, Tap, Target, TargetFacts,
///     Weights,
/// };
/// # use plugin_api::{Advance, DraftRequest, DraftRows, Drafts};
/// # struct Rows(Rc<Linear>, usize);
/// # impl DraftRows for Rows {
/// #     fn prefill(&mut self, _: &Advance<'_>) -> Result<()> { Ok(()) }
/// #     fn draft(&mut self, _: &DraftRequest<'_>) -> Result<Drafts> { Drafts::from_lists(&[]) }
/// #     fn commit(&mut self, _: &Advance<'_>) -> Result<()> { Ok(()) }
/// #     fn filter_rows(&mut self, _: &[usize]) -> Result<()> { Ok(()) }
/// #     fn append(&mut self, _: Self) -> Result<()> { Ok(()) }
/// #     fn row_count(&self) -> usize { self.1 }
/// # }
///
/// /// A head of one matrix. Its config is read, its weights follow with the first rows.
/// struct Head {
///     checkpoint: Rc<Checkpoint>,
///     hidden: i32,
///     matrix: Shared<Linear>,
/// }
///
/// impl Drafter for Head {
///     type Rows = Rows;
///
///     fn load(checkpoint: Option<Checkpoint>, _options: &mut Options) -> Result<Self> {
///         let checkpoint = Checkpoint::needed(checkpoint, "head")?;
///         let hidden = checkpoint.config()?.size("hidden_size")?;
///         checkpoint.require_tensors(["fc.weight".to_owned()])?;
///         Ok(Self { checkpoint: Rc::new(checkpoint), hidden, matrix: Shared::default() })
///     }
///
///     fn info(&self) -> DrafterInfo {
///         DrafterInfo {
///             name: "head".into(),
///             weight_bytes: self.checkpoint.bytes("fc."),
///             taps: vec![Tap::FINAL],
///             donors: Vec::new(),
///             default_depth: 1,
///             max_depth: 4,
///         }
///     }
///
///     fn pair(&self, target: &TargetFacts) -> Result<()> {
///         let path = self.checkpoint.path();
///         target.require(path, "hidden size", self.hidden, target.hidden_size)
///     }
///
///     fn open(&mut self, _: Target, facts: &TargetFacts, rows: &[RowSpec]) -> Result<Rows> {
///         let weights = Weights::new(self.checkpoint.clone()).with_dtype(facts.dtype);
///         let load = || Linear::load(&weights.child("fc"), self.hidden, self.hidden).map(Rc::new);
///         Ok(Rows(self.matrix.get_or_load(load)?, rows.len()))
///     }
/// }
/// ```
pub trait Drafter: Sized + 'static {
    /// A group of rows that it drafts for.
    type Rows: DraftRows;

    /// Reads the drafter: config and options now, weights as late as `open`. `checkpoint` is what
    /// the user named, none when nothing was named. Options that are not taken are refused by the
    /// SDK afterwards.
    fn load(checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self>;

    /// Identity, needs and limits.
    fn info(&self) -> DrafterInfo;

    /// Does it fit that target? An error names both and the number that differs
    /// ([`TargetFacts::require`] words it).
    fn pair(&self, target: &TargetFacts) -> Result<()>;

    /// A group with one row per spec, nothing processed yet.
    fn open(&mut self, target: Target, facts: &TargetFacts, rows: &[RowSpec])
    -> Result<Self::Rows>;
}

/// What a drafter says of itself.
#[derive(Clone, Debug)]
pub struct DrafterInfo {
    /// A name for messages and statistics.
    pub name: String,
    /// Bytes of weights it keeps resident.
    pub weight_bytes: u64,
    /// Target hiddens it wants to see, in this order in [`Advance::taps`].
    pub taps: Vec<Tap>,
    /// Keys and values of the target it wants to look at, in this order in [`DraftRequest::donors`].
    pub donors: Vec<DonorKind>,
    /// The depth it was made for.
    pub default_depth: u32,
    /// The largest depth it can draft.
    pub max_depth: u32,
}

/// Drafting for a group of rows that stand at different places. A single request is a group of one.
///
/// An error ends drafting for the group: its requests go on without. After a panic the group is only dropped.
///
/// A drafter on token ids, with what it keeps of each row in one place:
///
/// ```no_run
/// use plugin_api::{Advance, DraftRequest, DraftRows, Drafts, Error, Result};
///
/// /// Drafts each row's last processed token once more.
/// struct Rows(Vec<Option<i32>>);
///
/// impl DraftRows for Rows {
///     fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
///         for (last, row) in self.0.iter_mut().zip(&advance.rows) {
///             // A row without news stays as it is.
///             *last = row.tokens.last().copied().or(*last);
///         }
///         Ok(())
///     }
///
///     fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
///         let rows = self.0.iter().zip(request.depths);
///         let lists: Vec<Vec<i32>> = rows
///             .map(|(last, &depth)| last.iter().copied().take(depth as usize).collect())
///             .collect();
///         Drafts::from_lists(&lists)
///     }
///
///     fn commit(&mut self, advance: &Advance<'_>) -> Result<()> {
///         self.prefill(advance)
///     }
///
///     fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
///         let kept: Option<Vec<_>> = keep.iter().map(|&row| self.0.get(row).copied()).collect();
///         self.0 = kept.ok_or_else(|| Error::failed("a row that does not exist cannot be kept"))?;
///         Ok(())
///     }
///
///     fn append(&mut self, other: Self) -> Result<()> {
///         self.0.extend(other.0);
///         Ok(())
///     }
///
///     fn row_count(&self) -> usize {
///         self.0.len()
///     }
/// }
/// ```
pub trait DraftRows: Sized + 'static {
    /// A part of the prompt was processed by the target.
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()>;

    /// Proposes up to `depth` tokens for each row.
    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts>;

    /// The target verified a draft (or made a plain step): exactly these tokens are kept.
    fn commit(&mut self, advance: &Advance<'_>) -> Result<()>;

    /// Keeps the given rows, strictly ascending, and forgets the others.
    fn filter_rows(&mut self, keep: &[usize]) -> Result<()>;

    /// Appends the rows of another group. On an error `self` must be as before.
    fn append(&mut self, other: Self) -> Result<()>;

    /// Rows in the group.
    fn row_count(&self) -> usize;

    /// What one row needs to go on from here in another group, copied. None, the default: no more than its
    /// tokens, which [`DraftRows::prefill`] is told again; right for drafters without taps.
    fn capture(&self, _row: usize) -> Result<Option<RowState>> {
        Ok(None)
    }

    /// Puts a new group of one row where the row of a captured state was, maybe in another process. Whoever
    /// captures must restore.
    fn restore(&mut self, _state: &RowState) -> Result<()> {
        Err(Error::unsupported("its rows are not captured"))
    }
}

/// Tokens that the target has processed since the last call, for every row of the group.
pub struct Advance<'a> {
    /// One entry per row.
    pub rows: Vec<RowAdvance<'a>>,
    /// `[B, T, hidden]` per requested tap; columns beyond a row's tokens are padding.
    pub taps: Vec<Tensor>,
}

/// What happened to one row.
#[derive(Clone, Copy, Debug)]
pub struct RowAdvance<'a> {
    /// The processed tokens, maybe none.
    pub tokens: &'a [i32],
    /// The token that follows them: the prompt's next one, or the pending one that the target has
    /// sampled but not processed.
    pub next: i32,
    /// In a commit: how many drafted tokens are among the processed ones (`tokens[1..=accepted]`).
    pub accepted: usize,
}

/// What is asked of a draft.
pub struct DraftRequest<'a> {
    /// At most this many tokens per row; 0 for a row that wants none.
    pub depths: &'a [u32],
    /// The pending token of each row.
    pub pending: &'a [i32],
    /// The position of the first drafted token of each row: the key of its draw, for
    /// [`crate::sampling::draw`].
    pub positions: &'a [u32],
    /// What the target lends of its keys and values. They must not be kept beyond the call: whoever
    /// holds them makes the target copy its caches.
    pub donors: Vec<Donor>,
}

/// Keys and values of the target, for [`crate::layers::KvCache::lent`].
pub struct Donor {
    /// `[B, kv_heads, capacity, D]`, normalised and rotated; position `p` lies in column `p % capacity`. Or
    /// quantized, as [`crate::abi::Attend::keys`] says: whoever only lends them on need not know.
    pub keys: Tensor,
    /// As `keys`.
    pub values: Tensor,
    /// Beside quantized ones: keys and values before position `start`, as they are.
    pub first: Option<(Tensor, Tensor)>,
    /// The first position that is quantized; 0 where none is.
    pub start: i32,
}

impl DraftRequest<'_> {
    /// The deepest row's depth.
    pub fn max_depth(&self) -> u32 {
        self.depths.iter().copied().max().unwrap_or(0)
    }
}

/// Drafted tokens.
pub struct Drafts {
    /// `[B, W]` i32, which may still be uncomputed; none when no row drafted.
    pub ids: Option<Tensor>,
    /// How many of them each row proposes, at most its depth.
    pub lens: Vec<u32>,
}

impl Drafts {
    /// Drafts that are known on the CPU, one list per row.
    pub fn from_lists(lists: &[Vec<i32>]) -> Result<Self> {
        let lens: Vec<u32> = lists.iter().map(|l| l.len() as u32).collect();
        let width = lists.iter().map(Vec::len).max().unwrap_or(0);
        if width == 0 {
            return Ok(Self { ids: None, lens });
        }
        let mut ids = Vec::with_capacity(lists.len() * width);
        for list in lists {
            ids.extend(list);
            ids.extend(std::iter::repeat_n(0, width - list.len()));
        }
        let ids = Tensor::from_slice(&ids, &[lists.len() as i32, width as i32])?;
        Ok(Self {
            ids: Some(ids),
            lens,
        })
    }
}

/// The simple form, for drafters without tensors: one request, token ids in and out.
///
/// [`SourceRows`] makes a group of it. Tokens are told once, in order, without gaps.
///
/// ```
/// use plugin_api::{DraftSource, Result};
///
/// /// Drafts that the text begins anew.
/// #[derive(Default)]
/// struct Again(Vec<i32>);
///
/// impl DraftSource for Again {
///     fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
///         self.0.extend(tokens);
///         Ok(())
///     }
///
///     fn draft(&mut self, depth: usize) -> Result<Vec<i32>> {
///         Ok(self.0.iter().take(depth).copied().collect())
///     }
///
///     fn commit(&mut self, tokens: &[i32], _accepted: usize) -> Result<()> {
///         self.prefill(tokens)
///     }
/// }
///
/// let mut source = Again::default();
/// source.prefill(&[1, 2, 3])?;
/// assert_eq!(source.draft(2)?, [1, 2]);
/// # Ok::<(), plugin_api::Error>(())
/// ```
pub trait DraftSource: 'static {
    /// More tokens of the prompt are known; the last call's last token is the pending one.
    fn prefill(&mut self, tokens: &[i32]) -> Result<()>;

    /// Proposes at most `depth` tokens that may follow the known ones.
    fn draft(&mut self, depth: usize) -> Result<Vec<i32>>;

    /// More tokens of the answer are known, of which the first `accepted` had been drafted.
    fn commit(&mut self, tokens: &[i32], accepted: usize) -> Result<()>;
}

/// The adapter from [`DraftSource`] to [`DraftRows`].
pub struct SourceRows<S> {
    rows: Vec<SourceRow<S>>,
}

struct SourceRow<S> {
    source: S,
    /// Whether the source already knows the first token of the next advance (it was the last
    /// one's `next`).
    knows_pending: bool,
}

impl<S: DraftSource> SourceRows<S> {
    /// A group with one source per row.
    pub fn new(sources: impl IntoIterator<Item = S>) -> Self {
        let rows = sources.into_iter().map(|source| SourceRow {
            source,
            knows_pending: false,
        });
        Self {
            rows: rows.collect(),
        }
    }
}

impl<S> SourceRow<S> {
    /// The tokens of an advance that the source has not seen yet.
    fn news(&mut self, row: &RowAdvance<'_>) -> Vec<i32> {
        let skip = usize::from(std::mem::replace(&mut self.knows_pending, true));
        let seen = row.tokens.iter().skip(skip).copied();
        seen.chain([row.next]).collect()
    }
}

impl<S: DraftSource> DraftRows for SourceRows<S> {
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
        for (row, news) in self.rows.iter_mut().zip(&advance.rows) {
            if !news.tokens.is_empty() {
                let news = row.news(news);
                row.source.prefill(&news)?;
            }
        }
        Ok(())
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
        let drafts = self.rows.iter_mut().zip(request.depths);
        let lists = drafts
            .map(|(row, &depth)| match depth {
                0 => Ok(Vec::new()),
                _ => row.source.draft(depth as usize),
            })
            .collect::<Result<Vec<_>>>()?;
        Drafts::from_lists(&lists)
    }

    fn commit(&mut self, advance: &Advance<'_>) -> Result<()> {
        for (row, news) in self.rows.iter_mut().zip(&advance.rows) {
            if !news.tokens.is_empty() {
                let tokens = row.news(news);
                row.source.commit(&tokens, news.accepted)?;
            }
        }
        Ok(())
    }

    fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
        if keep.iter().any(|&row| row >= self.rows.len()) {
            return Err(Error::failed("a row that does not exist cannot be kept"));
        }
        let mut index = 0..;
        self.rows
            .retain(|_| index.next().is_some_and(|i| keep.contains(&i)));
        Ok(())
    }

    fn append(&mut self, other: Self) -> Result<()> {
        self.rows.extend(other.rows);
        Ok(())
    }

    fn row_count(&self) -> usize {
        self.rows.len()
    }
}
