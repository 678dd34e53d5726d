//! A drafter on token ids alone: no weights, no tensors.
//!
//! The host calls `load` once, `open` for each group of requests, and then the `DraftSource` of each request:
//! `prefill` with its prompt, `draft` and `commit` in turns.

mod memory;

use memory::Memory;
use plugin_api::{
    Checkpoint, DraftSource, Drafter, DrafterInfo, Error, Options, Result, RowSpec, SourceRows,
    Target, TargetFacts, export_plugin,
};

const NAME: &str = env!("CARGO_PKG_NAME");

/// The drafter: its options, shared by all requests.
struct Followers {
    most: u32,
}

impl Drafter for Followers {
    type Rows = SourceRows<Request>;

    fn load(checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        if let Some(checkpoint) = checkpoint {
            let path = checkpoint.path();
            let problem = format!("{path}: {NAME} has no weights; leave --drafter out");
            return Err(Error::invalid(problem));
        }
        let most = options.take("most")?.unwrap_or(8);
        if !(1..=32).contains(&most) {
            let problem = format!("drafter option most={most}: expected 1 to 32");
            return Err(Error::invalid(problem));
        }
        Ok(Self { most })
    }

    fn info(&self) -> DrafterInfo {
        DrafterInfo {
            name: NAME.into(),
            weight_bytes: 0,
            taps: Vec::new(),
            donors: Vec::new(),
            default_depth: self.most.min(4),
            max_depth: self.most,
        }
    }

    fn pair(&self, _target: &TargetFacts) -> Result<()> {
        Ok(()) // Token ids are all it needs: any target will do.
    }

    fn open(
        &mut self,
        _target: Target,
        _facts: &TargetFacts,
        rows: &[RowSpec],
    ) -> Result<Self::Rows> {
        Ok(SourceRows::new(rows.iter().map(|_| Request::default())))
    }
}

/// One request.
#[derive(Default)]
struct Request {
    memory: Memory,
    /// The last token that is known: drafts follow it.
    last: Option<i32>,
}

impl Request {
    /// Goes on with tokens that follow those before.
    fn follow(&mut self, tokens: &[i32]) {
        let mut text = Vec::from_iter(self.last);
        text.extend(tokens);
        self.memory.learn(&text);
        self.last = text.last().copied();
    }
}

impl DraftSource for Request {
    fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
        self.follow(tokens);
        Ok(())
    }

    fn draft(&mut self, depth: usize) -> Result<Vec<i32>> {
        // No drafts are fine, too: the round is then a plain step.
        let drafts = self.last.map(|last| self.memory.draft(last, depth));
        Ok(drafts.unwrap_or_default())
    }

    fn commit(&mut self, tokens: &[i32], _accepted: usize) -> Result<()> {
        self.follow(tokens);
        Ok(())
    }
}

export_plugin! {
    drafter: Followers,
    name: "{{name}}",
    families: [],
    options: { "most": "the most tokens to draft at a time, default 8" },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(most: &str) -> Result<Followers> {
        let mut options = Options::new([("most".to_owned(), most.to_owned())]);
        Followers::load(None, &mut options)
    }

    #[test]
    fn a_request_learns_across_calls() {
        let mut request = Request::default();
        assert!(request.draft(4).unwrap().is_empty());
        request.prefill(&[1, 2]).unwrap();
        request.prefill(&[3, 1]).unwrap();
        assert_eq!(request.draft(4).unwrap(), [2, 3, 1, 2]);
        request.commit(&[5], 0).unwrap();
        assert!(request.draft(4).unwrap().is_empty());
        request.commit(&[1], 0).unwrap();
        assert_eq!(request.draft(1).unwrap(), [5]);
    }

    #[test]
    fn options_are_checked() {
        assert_eq!(load("3").unwrap().info().max_depth, 3);
        for wrong in ["0", "33", "-1", "many"] {
            assert!(load(wrong).is_err(), "{wrong}");
        }
    }
}
