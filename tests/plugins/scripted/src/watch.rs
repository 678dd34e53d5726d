//! Checks the host's bookkeeping before it reaches the sources.

use plugin_api::{
    Advance, DraftRequest, DraftRows, DraftSource, Drafts, Error, Result, SourceRows,
};

/// [`SourceRows`] that believes nothing: every call must continue the one before.
pub struct Watched<S> {
    inner: SourceRows<S>,
    rows: Vec<Place>,
}

/// Where a row stands.
#[derive(Clone, Copy, Default)]
struct Place {
    processed: usize,
    /// The token that must come next, once any did.
    next: i32,
}

impl<S: DraftSource> Watched<S> {
    pub fn new(sources: impl IntoIterator<Item = S>) -> Self {
        let inner = SourceRows::new(sources);
        Self {
            rows: vec![Place::default(); inner.row_count()],
            inner,
        }
    }

    fn follow(&mut self, advance: &Advance<'_>) -> Result<()> {
        for (row, place) in advance.rows.iter().zip(&mut self.rows) {
            let Some(&first) = row.tokens.first() else {
                continue;
            };
            if place.processed > 0 && first != place.next {
                let announced = place.next;
                return Err(Error::failed(format!("{first} came after {announced}")));
            }
            place.processed += row.tokens.len();
            place.next = row.next;
        }
        Ok(())
    }
}

impl<S: DraftSource> DraftRows for Watched<S> {
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.follow(advance)?;
        self.inner.prefill(advance)
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
        let asked = request.pending.iter().zip(request.positions);
        for (place, (&pending, &position)) in self.rows.iter().zip(asked) {
            if pending != place.next || position as usize != place.processed + 1 {
                let (next, at) = (place.next, place.processed + 1);
                return Err(Error::failed(format!(
                    "a draft after {pending} at {position}, expected {next} at {at}"
                )));
            }
        }
        self.inner.draft(request)
    }

    fn commit(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.follow(advance)?;
        self.inner.commit(advance)
    }

    fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
        self.inner.filter_rows(keep)?;
        self.rows = keep.iter().map(|&row| self.rows[row]).collect();
        Ok(())
    }

    fn append(&mut self, other: Self) -> Result<()> {
        self.rows.extend(other.rows);
        self.inner.append(other.inner)
    }

    fn row_count(&self) -> usize {
        self.inner.row_count()
    }
}
