//! A drafter for groups of requests, made by hand: rows leave, join, and go on later.
//!
//! The host calls `load` once, `open` for each group of requests, and then the rows of the group: `prefill` with
//! their prompts, `draft` and `commit` in turns.

mod memory;

use memory::Memory;
use plugin_api::{
    Advance, Checkpoint, DraftRequest, DraftRows, Drafter, DrafterInfo, Drafts, Error, Options,
    Result, RowSpec, RowState, Target, TargetFacts, Tensor, export_plugin,
};

const NAME: &str = env!("CARGO_PKG_NAME");

/// The form of a captured row. Whoever changes the form changes the number.
const SCHEMA: &str = concat!(env!("CARGO_PKG_NAME"), "/1");

/// The drafter: nothing that rows would share.
struct Followers;

impl Drafter for Followers {
    type Rows = Rows;

    fn load(checkpoint: Option<Checkpoint>, _options: &mut Options) -> Result<Self> {
        match checkpoint {
            None => Ok(Self),
            Some(checkpoint) => {
                let path = checkpoint.path();
                let problem = format!("{path}: {NAME} has no weights; leave --drafter out");
                Err(Error::invalid(problem))
            }
        }
    }

    fn info(&self) -> DrafterInfo {
        DrafterInfo {
            name: NAME.into(),
            weight_bytes: 0,
            taps: Vec::new(),
            donors: Vec::new(),
            default_depth: 4,
            max_depth: 16,
        }
    }

    fn pair(&self, _target: &TargetFacts) -> Result<()> {
        Ok(()) // Token ids are all it needs: any target will do.
    }

    fn open(&mut self, _target: Target, _facts: &TargetFacts, rows: &[RowSpec]) -> Result<Rows> {
        Ok(Rows(rows.iter().map(|_| Row::default()).collect()))
    }
}

/// One request.
#[derive(Clone, Debug, Default, PartialEq)]
struct Row {
    memory: Memory,
    /// Tokens that the target has processed.
    processed: u32,
}

impl Row {
    /// Each token and its follower, one after the other.
    fn pairs(&self) -> Vec<i32> {
        let pairs = self.memory.after.iter();
        pairs.flat_map(|(&token, &after)| [token, after]).collect()
    }

    /// The row of which these were the pairs.
    fn restored(processed: u32, pairs: &[i32]) -> Self {
        let mut memory = Memory::default();
        for pair in pairs.chunks_exact(2) {
            memory.learn(pair);
        }
        Self { memory, processed }
    }
}

/// A group. Each row stands at a place of its own.
struct Rows(Vec<Row>);

impl Rows {
    /// Takes in what the target has processed.
    fn follow(&mut self, advance: &Advance<'_>) {
        for (row, news) in self.0.iter_mut().zip(&advance.rows) {
            // A row may have no news in a call. Its `next` means nothing then.
            if !news.tokens.is_empty() {
                row.memory.learn(&[news.tokens, &[news.next]].concat());
                row.processed += news.tokens.len() as u32;
            }
        }
    }

    /// What each row proposes after its pending token.
    fn propose(&self, request: &DraftRequest<'_>) -> Vec<Vec<i32>> {
        let asked = request.pending.iter().zip(request.depths);
        let rows = self.0.iter().zip(asked);
        rows.map(|(row, (&pending, &depth))| row.memory.draft(pending, depth as usize))
            .collect()
    }
}

impl DraftRows for Rows {
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.follow(advance);
        Ok(())
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
        Drafts::from_lists(&self.propose(request))
    }

    fn commit(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.follow(advance);
        Ok(())
    }

    fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
        if keep.iter().any(|&row| row >= self.0.len()) {
            return Err(Error::failed("a row that does not exist cannot be kept"));
        }
        self.0 = keep.iter().map(|&row| self.0[row].clone()).collect();
        Ok(())
    }

    fn append(&mut self, other: Self) -> Result<()> {
        self.0.extend(other.0);
        Ok(())
    }

    fn row_count(&self) -> usize {
        self.0.len()
    }

    /// A drafter that sees nothing but tokens could leave this out: it would be told them again. This one goes on
    /// without reading them.
    fn capture(&self, row: usize) -> Result<Option<RowState>> {
        let row = self.0.get(row);
        let row = row.ok_or_else(|| Error::failed("a row that does not exist cannot go on"))?;
        let pairs = row.pairs();
        let mut state = RowState::new(SCHEMA, row.processed);
        let shape = [pairs.len() as i32 / 2, 2];
        state.put("followers", Tensor::from_slice(&pairs, &shape)?);
        Ok(Some(state))
    }

    fn restore(&mut self, state: &RowState) -> Result<()> {
        state.require(SCHEMA)?;
        let pairs = state.get("followers")?.to_vec::<i32>()?;
        self.0 = vec![Row::restored(state.processed(), &pairs)];
        Ok(())
    }
}

export_plugin! {
    drafter: Followers,
    name: "{{name}}",
    families: [],
    options: {},
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugin_api::RowAdvance;

    fn group(rows: usize) -> Rows {
        Rows(vec![Row::default(); rows])
    }

    /// Tells each row its processed tokens and the one that follows.
    fn tell(rows: &mut Rows, news: &[(&[i32], i32)]) {
        let told = news.iter().map(|&(tokens, next)| RowAdvance {
            tokens,
            next,
            accepted: 0,
        });
        let advance = Advance {
            rows: told.collect(),
            taps: Vec::new(),
        };
        rows.commit(&advance).unwrap();
    }

    /// Two drafts for each row, after these tokens.
    fn drafts(rows: &Rows, pending: &[i32]) -> Vec<Vec<i32>> {
        rows.propose(&DraftRequest {
            depths: &vec![2; pending.len()],
            pending,
            positions: &vec![0; pending.len()],
            donors: Vec::new(),
        })
    }

    #[test]
    fn rows_learn_apart() {
        let mut rows = group(2);
        tell(&mut rows, &[(&[1, 2], 1), (&[7, 8], 7)]);
        assert_eq!(drafts(&rows, &[1, 7]), [[2, 1], [8, 7]]);
        tell(&mut rows, &[(&[1], 3), (&[], 0)]);
        assert_eq!(drafts(&rows, &[2, 7]), [[1, 3], [8, 7]]);
        assert_eq!([rows.0[0].processed, rows.0[1].processed], [3, 2]);
    }

    #[test]
    fn rows_leave_and_join() {
        let mut rows = group(3);
        tell(&mut rows, &[(&[1], 10), (&[2], 20), (&[3], 30)]);
        rows.filter_rows(&[0, 2]).unwrap();
        assert!(rows.filter_rows(&[2]).is_err());
        let mut other = group(1);
        tell(&mut other, &[(&[4], 40)]);
        rows.append(other).unwrap();
        assert_eq!(rows.row_count(), 3);
        assert_eq!(drafts(&rows, &[1, 3, 4]), [[10], [30], [40]]);
    }

    #[test]
    fn a_row_comes_back_as_it_was() {
        let mut rows = group(1);
        tell(&mut rows, &[(&[5, 6, 5], 7)]);
        let row = &rows.0[0];
        assert_eq!(&Row::restored(row.processed, &row.pairs()), row);
    }
}
