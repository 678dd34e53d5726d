//! Random lives of groups. Whatever the order of legal calls, every row drafts as it would alone.

use plugin_api::{Error, Result};

use super::group::Group;
use super::report::{Broken, Finding, Outcome};
use super::stage::{Kept, Random, Row, Stage};
use super::subject::Subject;

/// Seeds that are tried when none is named, and calls of each.
const SEEDS: u64 = 10;
const CALLS: usize = 60;

/// Groups that live at a time, their rows, and states that are kept.
const MOST_GROUPS: usize = 3;
const MOST_ROWS: usize = 5;
const MOST_KEPT: usize = 4;

pub(super) fn fuzz(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let seeds = match subject.seed {
        Some(seed) => seed..=seed,
        None => 1..=SEEDS,
    };
    let (mut lives, mut calls) = (0, 0);
    for seed in seeds {
        if lives > 0 && !subject.has_time() {
            break;
        }
        let mut life = Life::new(&stage, seed);
        life.run().map_err(|(call, error)| {
            Broken(format!(
                "{error} (seed {seed}, call {} of it: {call}; --reproduce {seed} repeats it)",
                life.calls
            ))
        })?;
        lives += 1;
        calls += life.calls;
    }
    Ok(Finding::Passed(format!("{lives} seeds, {calls} calls")))
}

/// What follows from a seed.
struct Life<'s> {
    stage: &'s Stage,
    random: Random,
    groups: Vec<Group<'s>>,
    kept: Vec<Kept>,
    calls: usize,
}

impl<'s> Life<'s> {
    fn new(stage: &'s Stage, seed: u64) -> Self {
        Self {
            stage,
            random: Random(seed),
            groups: Vec::new(),
            kept: Vec::new(),
            calls: 0,
        }
    }

    /// Makes the calls; where it goes wrong, the call that did.
    fn run(&mut self) -> std::result::Result<(), (String, Error)> {
        for _ in 0..CALLS {
            self.calls += 1;
            let mut call = String::new();
            self.step(&mut call).map_err(|error| (call, error))?;
        }
        let each = |group: &Group<'s>| self.stage.each_alone(group);
        let outcome = self.groups.iter().try_for_each(each);
        outcome.map_err(|error| ("the rows one by one".to_owned(), error))
    }

    /// One legal call, chosen at random. `call` says which.
    fn step(&mut self, call: &mut String) -> Result<()> {
        if self.groups.is_empty() {
            return self.open(call);
        }
        let index = self.random.below(self.groups.len());
        if !self.groups[index].is_ready() && self.random.below(4) > 0 {
            return self.prefill(index, call);
        }
        match self.random.below(12) {
            0 if self.groups.len() < MOST_GROUPS => self.open(call),
            1 => self.filter(index, call),
            2 => self.append(index, call),
            3 => self.capture(index, call),
            4 => self.restore(call),
            5 if self.groups.len() > 1 => {
                *call = format!("drop of group {index}");
                let group = self.groups.swap_remove(index);
                self.stage.each_alone(&group)
            }
            6 => self.plain(index, call),
            _ => self.round(index, call),
        }
    }

    fn open(&mut self, call: &mut String) -> Result<()> {
        let count = 1 + self.random.below(3);
        let vocab = self.stage.vocab();
        let row = |random: &mut Random| {
            let seed = random.below(1 << 30) as u64;
            Row::new(seed, 1 + random.below(30), vocab)
        };
        let rows: Vec<Row> = (0..count).map(|_| row(&mut self.random)).collect();
        *call = format!("open of {count} rows");
        self.groups.push(self.stage.open(rows)?);
        Ok(())
    }

    fn prefill(&mut self, index: usize, call: &mut String) -> Result<()> {
        let group = &mut self.groups[index];
        let most: Vec<usize> = (0..group.told.len())
            .map(|_| self.random.below(14))
            .collect();
        *call = format!("prefill of {most:?} tokens");
        group.prefill(&most)
    }

    fn round(&mut self, index: usize, call: &mut String) -> Result<()> {
        let group = &mut self.groups[index];
        if !group.is_ready() {
            return Ok(());
        }
        let rows = group.told.len();
        let most = self.stage.depth() as usize + 1;
        let depths: Vec<u32> = (0..rows).map(|_| self.random.below(most) as u32).collect();
        let accept: Vec<usize> = (0..rows).map(|_| self.random.below(most)).collect();
        *call = format!("round of depths {depths:?}, {accept:?} accepted");
        group.round(&depths, &accept).map(drop)
    }

    fn plain(&mut self, index: usize, call: &mut String) -> Result<()> {
        let group = &mut self.groups[index];
        if !group.is_ready() {
            return Ok(());
        }
        let rounds = 1 + self.random.below(5);
        *call = format!("{rounds} rounds without a draft");
        group.plain(rounds)
    }

    fn filter(&mut self, index: usize, call: &mut String) -> Result<()> {
        let group = &mut self.groups[index];
        let rows = group.told.len();
        let mut keep: Vec<usize> = (0..rows).filter(|_| self.random.below(3) > 0).collect();
        if keep.is_empty() {
            keep.push(self.random.below(rows));
        }
        *call = format!("filter_rows {keep:?} of {rows}");
        group.filter(&keep)
    }

    fn append(&mut self, index: usize, call: &mut String) -> Result<()> {
        let ready = |group: &Group<'_>| group.is_ready();
        let other = (0..self.groups.len()).find(|&at| at != index && ready(&self.groups[at]));
        let Some(other) = other.filter(|_| ready(&self.groups[index])) else {
            return Ok(());
        };
        let [rows, more] = [index, other].map(|at| self.groups[at].told.len());
        if rows + more > MOST_ROWS {
            return Ok(());
        }
        *call = format!("append of {more} rows to {rows}");
        let mut group = self.groups.remove(index);
        let other = self
            .groups
            .remove(if other > index { other - 1 } else { other });
        group.append(other)?;
        self.groups.push(group);
        Ok(())
    }

    fn capture(&mut self, index: usize, call: &mut String) -> Result<()> {
        let group = &mut self.groups[index];
        let row = self.random.below(group.told.len());
        if group.told[row].tokens.is_empty() {
            return Ok(());
        }
        *call = format!("capture of row {row} of {}", group.told.len());
        if let Some(kept) = group.capture(row)? {
            if self.kept.len() == MOST_KEPT {
                self.kept.remove(0);
            }
            self.kept.push(kept);
        }
        Ok(())
    }

    fn restore(&mut self, call: &mut String) -> Result<()> {
        if self.kept.is_empty() || self.groups.len() == MOST_GROUPS {
            return Ok(());
        }
        let kept = &self.kept[self.random.below(self.kept.len())];
        *call = format!("restore after {} tokens", kept.row.tokens.len());
        self.groups.push(self.stage.restored(kept)?);
        Ok(())
    }
}
