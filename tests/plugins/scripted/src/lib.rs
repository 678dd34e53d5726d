//! A drafter that knows the answer, and is right exactly as often as its script says.
//!
//! With it a test decides how many drafted tokens are accepted in every round. It also checks what
//! the host tells it (tokens, positions, accepted lengths) and faults at the first difference, which
//! a test sees as an answer without a drafter.
//!
//! The script is JSON, read anew for every group:
//! `{"rows": [{"prompt": [..], "seed": 7, "answer": [..]}, ..], "accept": [0, 1, 2], "depth": 4}`.
//! A row finds itself by its prompt and, if that is stated, its seed; `accept` may stand in a row to
//! replace the common one there. Without any rows the drafter neither drafts nor checks.

mod script;
mod watch;

use std::path::PathBuf;

use plugin_api::{
    Checkpoint, DraftSource, Drafter, DrafterInfo, Error, Options, Result, RowSpec, Target,
    TargetFacts, export_plugin,
};

use script::{Entry, Script};
use watch::Watched;

/// The drafter: where its script is, and the depth that stood there when it was loaded.
struct Scripted {
    path: PathBuf,
    depth: u32,
}

impl Drafter for Scripted {
    type Rows = Watched<Row>;

    fn load(_checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        let path = options
            .take::<PathBuf>("script")?
            .ok_or_else(|| Error::invalid("scripted: drafter option script=FILE is needed"))?;
        let depth = Script::read(&path)?.depth;
        Ok(Self { path, depth })
    }

    fn info(&self) -> DrafterInfo {
        DrafterInfo {
            name: "scripted".into(),
            weight_bytes: 0,
            taps: Vec::new(),
            donors: Vec::new(),
            default_depth: self.depth,
            max_depth: 32,
        }
    }

    fn pair(&self, _target: &TargetFacts) -> Result<()> {
        Ok(())
    }

    fn open(
        &mut self,
        _target: Target,
        _facts: &TargetFacts,
        rows: &[RowSpec],
    ) -> Result<Self::Rows> {
        let script = Script::read(&self.path)?;
        Ok(Watched::new(rows.iter().map(|row| Row {
            script: script.clone(),
            seed: row.sampling.seed,
            known: Vec::new(),
            entry: None,
            round: 0,
            planned: None,
            ended: false,
        })))
    }
}

/// One request.
struct Row {
    script: Script,
    seed: u64,
    /// The prompt, then the answer so far, with the pending token.
    known: Vec<i32>,
    /// Found at the first draft or commit, when the whole prompt is known.
    entry: Option<Entry>,
    /// Drafts so far.
    round: usize,
    /// How many tokens of the last draft must be accepted.
    planned: Option<usize>,
    /// A commit was shorter than planned: the answer has ended there.
    ended: bool,
}

impl Row {
    /// Its part of the script; none if the script has no rows at all.
    fn entry(&mut self) -> Result<Option<Entry>> {
        if self.entry.is_none() && !self.script.entries.is_empty() {
            let (first, prompt) = self
                .known
                .split_last()
                .ok_or_else(|| Error::failed("asked before any token was known"))?;
            let entry = self.script.find(prompt, self.seed)?;
            if entry.answer.first() != Some(first) {
                return Err(Error::failed(format!("the answer begins with {first}")));
            }
            self.entry = Some(entry);
        }
        Ok(self.entry.clone())
    }
}

impl DraftSource for Row {
    fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
        // The pending token of one call is not repeated in the next.
        self.known.extend(tokens);
        Ok(())
    }

    fn draft(&mut self, depth: usize) -> Result<Vec<i32>> {
        let Some(entry) = self.entry()? else {
            return Ok(Vec::new());
        };
        if self.ended {
            return Err(Error::failed("asked for a draft after the answer's end"));
        }
        let known = self.known.len() - entry.prompt.len();
        let rest = entry.answer.get(known..).unwrap_or_default();
        let right = entry.accept[self.round % entry.accept.len()].min(depth);
        // After the wrong token the right ones go on: a host that looked past it would take them.
        let mut draft: Vec<i32> = rest.iter().take(depth).copied().collect();
        if let Some(wrong) = draft.get_mut(right) {
            *wrong = if *wrong == 0 { 1 } else { 0 };
        }
        self.round += 1;
        self.planned = Some(right.min(draft.len()));
        Ok(draft)
    }

    fn commit(&mut self, tokens: &[i32], accepted: usize) -> Result<()> {
        let Some(entry) = self.entry()? else {
            return Ok(());
        };
        let planned = self.planned.take().unwrap_or(0);
        if accepted > planned || tokens.len() != accepted + 1 {
            let told = format!("{} tokens, {accepted} accepted", tokens.len());
            return Err(Error::failed(format!("{told}, of {planned} planned")));
        }
        self.ended = accepted < planned;
        let at = self.known.len() - entry.prompt.len();
        let rest = entry.answer.get(at..).unwrap_or_default();
        if let Some((told, right)) = tokens.iter().zip(rest).find(|(told, right)| told != right) {
            return Err(Error::failed(format!("told {told}, expected {right}")));
        }
        self.known.extend(tokens);
        Ok(())
    }
}

export_plugin! {
    drafter: Scripted,
    name: "scripted",
    families: [],
    options: {
        "script": "the JSON file that says what to draft",
    },
}
