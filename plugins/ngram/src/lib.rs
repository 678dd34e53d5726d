//! Prompt lookup: proposes what followed the last time the same few tokens came up.
//!
//! No model, no tensors: the smallest example of a drafter. It shines where the answer repeats the
//! prompt (rewriting, code edits, quotes). Idea: Saxena, "Prompt Lookup Decoding", 2023.

use plugin_api::{
    Checkpoint, DraftSource, Drafter, DrafterInfo, Error, Options, Result, RowSpec, SourceRows,
    Target, TargetFacts, export_plugin,
};

/// The settings; shared by all rows.
#[derive(Clone, Copy)]
struct Ngram {
    /// The longest and shortest suffix that is looked for.
    longest: usize,
    shortest: usize,
}

impl Drafter for Ngram {
    type Rows = SourceRows<Lookup>;

    fn load(checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        if let Some(checkpoint) = checkpoint {
            let path = checkpoint.path();
            return Err(Error::invalid(format!(
                "{path}: ngram has no weights; leave it out"
            )));
        }
        let longest = options.take("longest")?.unwrap_or(4);
        let shortest = options.take("shortest")?.unwrap_or(2);
        if shortest == 0 || shortest > longest || longest > 64 {
            let message = format!("ngram lengths {shortest} to {longest}: expected 1 to 64");
            return Err(Error::invalid(message));
        }
        Ok(Self { longest, shortest })
    }

    fn info(&self) -> DrafterInfo {
        DrafterInfo {
            name: "ngram".into(),
            weight_bytes: 0,
            taps: Vec::new(),
            donors: Vec::new(),
            default_depth: 4,
            max_depth: 32,
        }
    }

    fn pair(&self, _target: &TargetFacts) -> Result<()> {
        Ok(()) // token ids are all it needs: any target will do
    }

    fn open(
        &mut self,
        _target: Target,
        _facts: &TargetFacts,
        rows: &[RowSpec],
    ) -> Result<Self::Rows> {
        Ok(SourceRows::new(rows.iter().map(|_| Lookup {
            settings: *self,
            known: Vec::new(),
        })))
    }
}

/// One request: its settings and all its tokens so far, the pending one last.
struct Lookup {
    settings: Ngram,
    known: Vec<i32>,
}

impl DraftSource for Lookup {
    fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
        self.known.extend(tokens);
        Ok(())
    }

    fn draft(&mut self, depth: usize) -> Result<Vec<i32>> {
        let known = &self.known;
        for length in (self.settings.shortest..=self.settings.longest).rev() {
            let Some(start) = known.len().checked_sub(length) else {
                continue;
            };
            let suffix = &known[start..];
            // The latest earlier occurrence is the likeliest to go on the same way.
            let found = known[..known.len() - 1]
                .windows(length)
                .rposition(|window| window == suffix);
            if let Some(at) = found {
                let follows = &known[at + length..];
                return Ok(follows.iter().take(depth).copied().collect());
            }
        }
        Ok(Vec::new())
    }

    fn commit(&mut self, tokens: &[i32], _accepted: usize) -> Result<()> {
        self.known.extend(tokens);
        Ok(())
    }
}

export_plugin! {
    drafter: Ngram,
    name: "ngram",
    families: [],
    options: {
        "longest": "longest run of tokens to look for, default 4",
        "shortest": "shortest run of tokens to look for, default 2",
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(tokens: &[i32]) -> Lookup {
        Lookup {
            settings: Ngram {
                longest: 3,
                shortest: 2,
            },
            known: tokens.to_vec(),
        }
    }

    #[test]
    fn proposes_what_followed_last_time() {
        assert_eq!(lookup(&[1, 2, 3, 4, 9, 1, 2]).draft(2).unwrap(), [3, 4]);
        // The longer match wins over the later one.
        let tokens = [5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2];
        assert_eq!(lookup(&tokens).draft(1).unwrap(), [3]);
    }

    #[test]
    fn proposes_nothing_without_a_match() {
        assert!(lookup(&[1, 2, 3]).draft(4).unwrap().is_empty());
        assert!(lookup(&[]).draft(4).unwrap().is_empty());
    }
}
