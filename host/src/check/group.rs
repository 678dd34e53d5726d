//! Groups of rows that target and drafter follow together.
//!
//! A group is led as the engine leads one, except that the text is decided here: how much of a draft is kept
//! and what comes next is legal whatever it is, so every accepted length can be had from any drafter. What each
//! row was told is remembered. Told again to a row alone, it must bring the same drafts.

use plugin_api::abi::{Donor, DraftRequest};
use plugin_api::layers::{LayerCache, Step};
use plugin_api::{Error, Result, RowSpec, Tensor};

use super::stage::{Event, Kept, Row, Stage};
use crate::model::Pass;
use crate::plugin::{Progress, Rows};

/// Rows that the target and the drafter process together.
pub(super) struct Group<'s> {
    stage: &'s Stage,
    caches: Vec<LayerCache>,
    rows: Rows,
    pub told: Vec<Row>,
    /// Whether what is told is remembered; it takes memory.
    pub remembers: bool,
}

impl Stage {
    /// Opens a group for rows that have not begun.
    pub fn open(&self, told: Vec<Row>) -> Result<Group<'_>> {
        let specs: Vec<RowSpec> = told.iter().map(|row| row.spec).collect();
        let rows = self.drafter.open(&self.target, &specs);
        let group = Group {
            stage: self,
            caches: self.target.model().new_caches(),
            rows: rows.map_err(|e| e.context("open"))?,
            told,
            remembers: true,
        };
        group.counted("open")?;
        Ok(group)
    }

    /// A group of `rows` rows whose prompts have been processed.
    pub fn begun(&self, seed: u64, rows: usize) -> Result<Group<'_>> {
        let row = |index: usize| Row::new(seed * 100 + index as u64, 9 + 7 * index, self.vocab());
        let mut group = self.open((0..rows).map(row).collect())?;
        group.finish_prompts()?;
        Ok(group)
    }

    /// A group of the one row that was kept.
    pub fn restored(&self, kept: &Kept) -> Result<Group<'_>> {
        let rows = self.drafter.open(&self.target, &[kept.row.spec]);
        let mut group = Group {
            stage: self,
            caches: self.target.model().restored(&kept.target)?,
            rows: rows.map_err(|e| e.context("open"))?,
            told: vec![kept.row.clone()],
            remembers: true,
        };
        match &kept.draft {
            Some(state) => group
                .rows
                .restore(state)
                .map_err(|e| e.context("restore"))?,
            None => {
                let row = &kept.row;
                let told = Progress {
                    tokens: &[&row.tokens],
                    next: &[row.pending],
                    accepted: &[0],
                    taps: &[],
                };
                tell(&mut group.rows, true, &told)?;
            }
        }
        group.counted("restore")?;
        Ok(group)
    }

    /// Tells a row's whole story to a row alone, or what came after it was kept, and compares the drafts.
    pub fn alone(&self, row: &Row, from: Option<&Kept>) -> Result<()> {
        let mut alone = match from {
            Some(kept) => self.restored(kept)?,
            None => {
                let mut fresh = Row::new(0, 1, self.vocab());
                fresh.spec = row.spec;
                self.open(vec![fresh])?
            }
        };
        alone.remembers = false;
        let done = from.map_or(0, |kept| kept.row.events.len());
        for event in row.events.iter().skip(done) {
            alone.follow(event)?;
        }
        Ok(())
    }

    /// As [`Stage::alone`] for every row of a group.
    pub fn each_alone(&self, group: &Group<'_>) -> Result<()> {
        group.told.iter().try_for_each(|row| self.alone(row, None))
    }
}

impl Group<'_> {
    /// The drafter's own rows.
    pub fn rows(&mut self) -> &mut Rows {
        &mut self.rows
    }

    /// The drafter's rows alone.
    pub fn into_rows(self) -> Rows {
        self.rows
    }

    fn counted(&self, call: &str) -> Result<()> {
        match (self.rows.counted(), self.told.len()) {
            (count, rows) if count == rows => Ok(()),
            (count, rows) => Err(Error::failed(format!(
                "{call}: row_count says {count}, there are {rows} rows"
            ))),
        }
    }

    /// Lets the target process some tokens of each row, `ahead` tokens after what the drafter was told.
    fn pass(&mut self, tokens: &[Vec<i32>], ahead: usize, speculative: bool) -> Result<Pass> {
        let width = tokens.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let mut ids = Vec::with_capacity(tokens.len() * width);
        for row in tokens {
            ids.extend(row);
            ids.extend(std::iter::repeat_n(0, width - row.len()));
        }
        let ids = Tensor::from_slice(&ids, &[tokens.len() as i32, width as i32])?;
        let at = |row: &Row| (row.tokens.len() + ahead) as i32;
        let offsets: Vec<i32> = self.told.iter().map(at).collect();
        let lens: Vec<i32> = tokens.iter().map(|row| row.len() as i32).collect();
        let step = Step::new(&offsets, &lens, width as i32, speculative && width > 1)?;
        let model = self.stage.target.model();
        let pass = model.forward(&ids, &step, &mut self.caches, &self.stage.taps)?;
        let state = self.caches.iter().flat_map(LayerCache::tensors);
        Tensor::eval_all(&state.chain(&pass.taps).collect::<Vec<_>>())?;
        Ok(pass)
    }

    /// Processes at most so many tokens of each row's prompt.
    pub fn prefill(&mut self, most: &[usize]) -> Result<()> {
        let pieces = self.told.iter().zip(most).map(|(row, &most)| {
            let from = row.tokens.len().min(row.prompt.len() - 1);
            row.prompt[from..from + row.unprocessed().min(most)].to_vec()
        });
        let pieces: Vec<Vec<i32>> = pieces.collect();
        if pieces.iter().all(Vec::is_empty) {
            return Ok(());
        }
        let pass = self.pass(&pieces, 0, false)?;
        let next = self.told.iter().zip(&pieces).map(|(row, piece)| {
            let following = row.prompt.get(row.tokens.len() + piece.len());
            following.copied().unwrap_or(row.pending)
        });
        let next: Vec<i32> = next.collect();
        self.tell(true, &pieces, &next, &vec![0; pieces.len()], &pass.taps)
    }

    /// Processes what is left of the prompts.
    pub fn finish_prompts(&mut self) -> Result<()> {
        self.prefill(&vec![usize::MAX; self.told.len()])
    }

    /// Whether all prompts have been processed.
    pub fn is_ready(&self) -> bool {
        self.told.iter().all(|row| row.unprocessed() == 0)
    }

    /// Tells the drafter of tokens, and remembers that.
    fn tell(
        &mut self,
        is_prompt: bool,
        tokens: &[Vec<i32>],
        next: &[i32],
        accepted: &[u32],
        taps: &[Tensor],
    ) -> Result<()> {
        let lists: Vec<&[i32]> = tokens.iter().map(Vec::as_slice).collect();
        let told = Progress {
            tokens: &lists,
            next,
            accepted,
            taps,
        };
        tell(&mut self.rows, is_prompt, &told)?;
        for (index, row) in self.told.iter_mut().enumerate() {
            let count = tokens[index].len() as i32;
            if count == 0 {
                continue;
            }
            row.advance(&tokens[index], next[index]);
            if self.remembers {
                let at = index as i32;
                let own = |tap: &Tensor| tap.slice(0, at, at + 1)?.slice(1, 0, count);
                row.events.push(Event::Told {
                    is_prompt,
                    tokens: tokens[index].clone(),
                    next: next[index],
                    accepted: accepted[index],
                    taps: taps.iter().map(own).collect::<Result<_>>()?,
                });
            }
        }
        self.counted(if is_prompt { "prefill" } else { "commit" })
    }

    /// Asks for drafts, at most `depths` tokens for each row, and reads them.
    pub fn draft(&mut self, depths: &[u32]) -> Result<Vec<Vec<i32>>> {
        let model = self.stage.target.model();
        let kinds = self.stage.drafter.donors().iter();
        let donors: Option<Vec<Donor>> =
            kinds.map(|kind| model.donor(*kind, &self.caches)).collect();
        let donors = donors.ok_or_else(|| Error::failed("the target has no keys to lend yet"))?;
        let pending: Vec<i32> = self.told.iter().map(|row| row.pending).collect();
        let positions: Vec<u32> = self
            .told
            .iter()
            .map(|row| row.tokens.len() as u32 + 1)
            .collect();
        let request = DraftRequest {
            depths: depths.into(),
            pending: pending.as_slice().into(),
            positions: positions.as_slice().into(),
            donors: donors.as_slice().into(),
        };
        let draft = self.rows.draft(&request).map_err(|e| e.context("draft"))?;
        let flat = match &draft.ids {
            Some(ids) => ids.to_vec::<i32>().map_err(|e| e.context("draft"))?,
            None => Vec::new(),
        };
        let width = flat.len() / self.told.len().max(1);
        let vocab = self.stage.vocab();
        let mut lists = Vec::with_capacity(self.told.len());
        for (index, &len) in draft.lens.iter().enumerate() {
            let list = &flat[index * width..][..len as usize];
            if let Some(id) = list.iter().find(|id| !(0..vocab).contains(*id)) {
                let problem = format!("draft: the id {id}, outside the vocabulary of {vocab}");
                return Err(Error::failed(problem));
            }
            lists.push(list.to_vec());
        }
        if self.remembers {
            let rows = self.told.iter_mut().zip(depths).zip(&lists);
            for ((row, &depth), ids) in rows.filter(|((_, depth), _)| **depth > 0) {
                let ids = ids.clone();
                row.events.push(Event::Drafted { depth, ids });
            }
        }
        self.counted("draft")?;
        Ok(lists)
    }

    /// What the target processes to verify drafts.
    fn verified(&self, drafts: &[Vec<i32>]) -> Vec<Vec<i32>> {
        let rows = self.told.iter().zip(drafts);
        rows.map(|(row, draft)| [&[row.pending], &draft[..]].concat())
            .collect()
    }

    /// Ends a round in which the first `accept` tokens of each row's draft are kept.
    pub fn commit(&mut self, drafts: &[Vec<i32>], accept: &[usize]) -> Result<()> {
        let vocab = self.stage.vocab();
        let verified = self.verified(drafts);
        let pass = self.pass(&verified, 0, true)?;
        let (mut kept, mut next) = (Vec::new(), Vec::new());
        for ((row, draft), &accept) in self.told.iter().zip(drafts).zip(accept) {
            let accept = accept.min(draft.len());
            kept.push([&[row.pending], &draft[..accept]].concat());
            let own = row.text(row.tokens.len() + accept + 1, vocab as usize);
            // What comes after a token that was not kept is another one.
            let is_refused = draft.get(accept) == Some(&own);
            next.push(if is_refused { (own + 1) % vocab } else { own });
        }
        let accepted: Vec<u32> = kept.iter().map(|row| row.len() as u32 - 1).collect();
        self.keep(&kept, &next, &accepted, &pass)
    }

    /// Ends a round with what the target itself says; how many drafted tokens it said, too.
    pub fn verify(&mut self, drafts: &[Vec<i32>]) -> Result<Vec<usize>> {
        let verified = self.verified(drafts);
        let pass = self.pass(&verified, 0, true)?;
        let drawn = self.stage.target.model().logits(&pass.hidden)?.argmax(-1)?;
        let width = drawn.dim(1) as usize;
        let drawn = drawn.to_vec::<i32>()?;
        let (mut kept, mut next, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (row, draft)) in self.told.iter().zip(drafts).enumerate() {
            let drawn = &drawn[index * width..][..width];
            let agree = draft.iter().zip(drawn).take_while(|(a, b)| a == b).count();
            kept.push([&[row.pending], &draft[..agree]].concat());
            next.push(drawn[agree]);
            counts.push(agree);
        }
        let accepted: Vec<u32> = counts.iter().map(|&count| count as u32).collect();
        self.keep(&kept, &next, &accepted, &pass)?;
        Ok(counts)
    }

    fn keep(
        &mut self,
        kept: &[Vec<i32>],
        next: &[i32],
        accepted: &[u32],
        pass: &Pass,
    ) -> Result<()> {
        let lens: Vec<i32> = kept.iter().map(|row| row.len() as i32).collect();
        for cache in &mut self.caches {
            cache.resolve(&lens)?;
        }
        self.tell(false, kept, next, accepted, &pass.taps)
    }

    /// A round: drafts as deep as `depths` say, of which `accept` are kept.
    pub fn round(&mut self, depths: &[u32], accept: &[usize]) -> Result<Vec<Vec<i32>>> {
        let drafts = self.draft(depths)?;
        self.commit(&drafts, accept)?;
        Ok(drafts)
    }

    /// Rounds without drafts, of which the drafter is told at once.
    pub fn plain(&mut self, rounds: usize) -> Result<()> {
        let vocab = self.stage.vocab() as usize;
        let mut pending: Vec<i32> = self.told.iter().map(|row| row.pending).collect();
        let mut tokens = vec![Vec::new(); pending.len()];
        let mut taps: Vec<Vec<Tensor>> = vec![Vec::new(); self.stage.taps.len()];
        for ahead in 0..rounds {
            let columns: Vec<Vec<i32>> = pending.iter().map(|&token| vec![token]).collect();
            let pass = self.pass(&columns, ahead, false)?;
            for (all, tap) in taps.iter_mut().zip(pass.taps) {
                all.push(tap);
            }
            let rows = self.told.iter().zip(&mut tokens).zip(&mut pending);
            for ((row, tokens), pending) in rows {
                tokens.push(*pending);
                *pending = row.text(row.tokens.len() + ahead + 1, vocab);
            }
        }
        let taps = taps.iter().map(|columns| {
            let columns: Vec<&Tensor> = columns.iter().collect();
            Tensor::concat(&columns, 1)
        });
        let taps = taps.collect::<Result<Vec<_>>>()?;
        self.tell(false, &tokens, &pending, &vec![0; tokens.len()], &taps)
    }

    /// Lets the other rows leave.
    pub fn filter(&mut self, keep: &[usize]) -> Result<()> {
        let rows: Vec<i32> = keep.iter().map(|&row| row as i32).collect();
        let rows = Tensor::from_slice(&rows, &[rows.len() as i32])?;
        let caches = self.caches.iter().map(|cache| cache.filtered(&rows));
        self.caches = caches.collect::<Result<_>>()?;
        let kept: Vec<u32> = keep.iter().map(|&row| row as u32).collect();
        let filtered = self.rows.filter(&kept);
        filtered.map_err(|e| e.context("filter_rows"))?;
        self.told = keep.iter().map(|&row| self.told[row].clone()).collect();
        Ok(())
    }

    /// Takes in the rows of another group.
    pub fn append(&mut self, other: Self) -> Result<()> {
        let pairs = self.caches.iter().zip(&other.caches);
        let caches = pairs.map(|(a, b)| a.joined(b)).collect::<Result<_>>()?;
        self.rows
            .append(other.rows)
            .map_err(|e| e.context("append"))?;
        self.caches = caches;
        self.told.extend(other.told);
        Ok(())
    }

    /// What a row needs to go on later. None: its drafter gives nothing, and can't be told the tokens again.
    pub fn capture(&mut self, index: usize) -> Result<Option<Kept>> {
        let row = &self.told[index];
        let processed = row.tokens.len();
        let state = self.rows.capture(index as u32);
        let state = state.map_err(|e| e.context("capture"))?;
        if let Some(state) = &state {
            if state.processed() as usize != processed {
                return Err(Error::failed(format!(
                    "capture: the state says {} processed tokens, the row was told of {processed}",
                    state.processed()
                )));
            }
            Tensor::eval_all(&state.tensors().map(|(_, t)| t).collect::<Vec<_>>())?;
        } else if !self.stage.taps.is_empty() {
            return Ok(None);
        }
        let model = self.stage.target.model();
        let target = model.capture(&self.caches, index, processed)?;
        Tensor::eval_all(&target.tensors().map(|(_, t)| t).collect::<Vec<_>>())?;
        Ok(Some(Kept {
            row: row.clone(),
            draft: state,
            target,
        }))
    }

    /// Does what another row did, and compares.
    fn follow(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Told {
                is_prompt,
                tokens,
                next,
                accepted,
                taps,
            } => {
                // Its own pass is only needed for keys that are lent.
                if !self.stage.drafter.donors().is_empty() {
                    self.pass(std::slice::from_ref(tokens), 0, false)?;
                }
                let tokens = std::slice::from_ref(tokens);
                self.tell(*is_prompt, tokens, &[*next], &[*accepted], taps)
            }
            Event::Drafted { depth, ids } => {
                let drafts = self.draft(&[*depth])?;
                if drafts[0] == *ids {
                    return Ok(());
                }
                let row = &self.told[0];
                Err(Error::failed(format!(
                    "after {} tokens it drafts {:?}, told the same alone {:?}",
                    row.tokens.len(),
                    ids,
                    drafts[0]
                )))
            }
        }
    }
}

/// Tells a drafter what was processed; a fault says in which call.
fn tell(rows: &mut Rows, is_prompt: bool, progress: &Progress<'_>) -> Result<()> {
    match is_prompt {
        true => rows.prefill(progress).map_err(|e| e.context("prefill")),
        false => rows.commit(progress).map_err(|e| e.context("commit")),
    }
}
