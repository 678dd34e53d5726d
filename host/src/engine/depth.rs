//! How many tokens to draft: what pays, by the measured cost of rounds and the recent acceptance.
//!
//! A round of depth `d` gives `1 + a1 + a1 a2 + …` tokens, where `ai` is how often the `i`-th token of
//! a draft is accepted when those before it are, and takes as long as rounds of that depth took
//! lately. The depth with the most tokens per second is drafted, zero included. Now and then a
//! neighbour is tried, so that what was learnt does not grow old; never so often that trials lose more than
//! a small part of the time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::paths;

/// The deepest draft that is chosen without being asked for.
pub(super) const DEEPEST: u32 = 12;

/// Rounds between two trials, at first and at most.
const TRIALS: (u32, u32) = (16, 256);

/// The part of the time that trials may lose, and seconds of rounds for which it is saved up at most.
const TRIAL_LOSS: f64 = 0.01;
const SAVED_UP: f64 = 30.0;

/// How much the newest of many times counts.
const NEWEST: f64 = 0.08;

/// How much older observations of acceptance count with every new one.
const FADE: f64 = 0.95;

/// How often drafts were accepted lately: those of one request, or of all.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Acceptance {
    /// Per position: tried and accepted, fading.
    positions: Vec<(f64, f64)>,
    /// Rounds that asked for a draft, and those that got one.
    asked: f64,
    drafted: f64,
}

impl Acceptance {
    /// A round asked for a draft, got `drafted` tokens, and `accepted` of them were right.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        self.asked = self.asked * FADE + 1.0;
        self.drafted = self.drafted * FADE + if drafted > 0 { 1.0 } else { 0.0 };
        if self.positions.len() < drafted {
            self.positions.resize(drafted, (0.0, 0.0));
        }
        // What comes after a wrong token says nothing.
        for (index, (tried, right)) in self.positions.iter_mut().take(drafted).enumerate() {
            if index > accepted {
                break;
            }
            *tried = *tried * FADE + 1.0;
            *right = *right * FADE + if index < accepted { 1.0 } else { 0.0 };
        }
    }

    /// How often a request for a draft is answered with one; as `usual` where little is known.
    fn coverage(&self, usual: &Self) -> f64 {
        let usual = (usual.drafted + 1.0) / (usual.asked + 1.0);
        (self.drafted + usual) / (self.asked + 1.0)
    }

    /// The tokens that a round with a draft of `depth` gives; as with `usual` where little is known.
    fn tokens(&self, depth: u32, usual: &Self) -> f64 {
        let at = |of: &Self, index: usize| of.positions.get(index).copied().unwrap_or_default();
        let (mut all, mut reached, mut before) = (1.0, 1.0, 0.6);
        for index in 0..depth as usize {
            // Of what nobody knows, as at the position before.
            for (tried, right) in [at(usual, index), at(self, index)] {
                before = (right + 2.0 * before) / (tried + 2.0);
            }
            reached *= before;
            all += reached;
        }
        all
    }

    /// Whether the numbers can be what they are said to be.
    fn is_sensible(&self) -> bool {
        let pair = |&(tried, right): &(f64, f64)| {
            (0.0..1e6).contains(&tried) && (0.0..=tried).contains(&right)
        };
        self.positions.len() <= 256
            && self.positions.iter().all(pair)
            && pair(&(self.asked, self.drafted))
    }
}

/// What rounds cost, by the number of rows and the depth. One per engine.
pub struct Costs {
    known: BTreeMap<(usize, u32), Time>,
    /// How the drafts of all requests fared.
    usual: Acceptance,
    /// Seconds that trials may lose.
    budget: f64,
    /// Seconds that a drafter takes to hear of a token late.
    catching_up: f64,
    /// The depth that is tried once more: the first time, the drafter had to catch up.
    again: Option<u32>,
    /// Rounds until the next trial, and after it.
    until_trial: u32,
    interval: u32,
    trials: u32,
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Time {
    seconds: f64,
    /// How many were measured.
    count: u32,
}

#[derive(Default, Serialize, Deserialize)]
struct Saved {
    costs: Vec<Cost>,
    usual: Acceptance,
}

#[derive(Serialize, Deserialize)]
struct Cost {
    rows: usize,
    depth: u32,
    #[serde(flatten)]
    time: Time,
}

impl Costs {
    /// What `file` remembers, which [`Costs::save`] writes. A file that makes no sense is ignored.
    pub fn load(file: Option<PathBuf>) -> Self {
        let saved = file.as_deref().and_then(read).unwrap_or_default();
        let sensible = |saved: &Cost| {
            let time = saved.time.seconds;
            time.is_finite() && time > 0.0 && saved.depth <= DEEPEST && saved.rows <= 4096
        };
        let known = saved.costs.into_iter().filter(sensible).map(|saved| {
            // It was another day: what is measured now soon counts more.
            let count = saved.time.count.min(2);
            (
                (saved.rows, saved.depth),
                Time {
                    count,
                    ..saved.time
                },
            )
        });
        Self {
            known: known.collect(),
            usual: Some(saved.usual)
                .filter(Acceptance::is_sensible)
                .unwrap_or_default(),
            budget: 0.0,
            catching_up: 0.0,
            again: None,
            until_trial: TRIALS.0,
            interval: TRIALS.0,
            trials: 0,
            file,
        }
    }

    /// Writes what is known, if there is a place for it. Losing it does no harm.
    pub fn save(&self) {
        let Some(file) = self.file.as_ref().filter(|_| !self.known.is_empty()) else {
            return;
        };
        let known = self.known.iter();
        let saved = Saved {
            costs: known
                .map(|(&(rows, depth), &time)| Cost { rows, depth, time })
                .collect(),
            usual: self.usual.clone(),
        };
        let written = serde_json::to_vec(&saved)
            .map_err(std::io::Error::from)
            .and_then(|text| paths::write_whole(file, &text));
        if let Err(error) = written {
            tracing::debug!("{}: can't write: {error}", file.display());
        }
    }

    /// A round of some rows took so long with drafts of at most `depth` tokens, before which the drafter was
    /// told of `caught_up` tokens late.
    pub fn record(&mut self, rows: usize, depth: u32, took: Duration, caught_up: usize) {
        let seconds = took.as_secs_f64();
        self.budget = (self.budget + TRIAL_LOSS * seconds).min(TRIAL_LOSS * SAVED_UP);
        if caught_up > 4 * rows {
            let extra = (seconds - self.cost(rows, depth)).max(0.0) / caught_up as f64;
            self.catching_up += (extra - self.catching_up) * 0.3;
            self.again = Some(depth);
            return;
        }
        let time = self
            .known
            .entry((rows, depth))
            .or_insert(Time { seconds, count: 0 });
        time.count = time.count.saturating_add(1);
        // Something else on the machine must not weigh more than it must.
        let seconds = if time.count > 3 {
            seconds.min(2.0 * time.seconds)
        } else {
            seconds
        };
        time.seconds += (seconds - time.seconds) * NEWEST.max(1.0 / f64::from(time.count));
    }

    /// A round asked for a draft for some row, got `drafted` tokens, and `accepted` of them were right.
    pub fn learn(&mut self, drafted: usize, accepted: usize) {
        self.usual.record(drafted, accepted);
    }

    /// The depth for the next round of some rows, at most `limit`; a drafter has not heard of `behind` tokens.
    pub fn choose(&mut self, rows: &[&Acceptance], limit: u32, behind: usize) -> u32 {
        let limit = limit.min(DEEPEST);
        if let Some(depth) = self.again.take().filter(|depth| *depth <= limit) {
            return depth;
        }
        let count = rows.len();
        let measured = |rows, depth| self.known.get(&(rows, depth)).map_or(0, |time| time.count);
        // Everything else is guessed from the cost of a token and, with however many rows, of a check.
        if measured(count, 0) < 2 {
            return 0;
        }
        if limit > 0
            && self
                .known
                .iter()
                .all(|((_, depth), time)| *depth == 0 || time.count < 2)
        {
            return 1;
        }
        let mut best = (0, 0.0);
        for depth in 0..=limit {
            let speed = self.speed(rows, depth);
            if speed > best.1 {
                best = (depth, speed);
            }
        }
        let (best, most) = best;
        self.until_trial = self.until_trial.saturating_sub(1);
        if self.until_trial > 0 || limit == 0 {
            return best;
        }
        let other = match (self.trials + 1) % 3 {
            1 => best + 1,
            2 => best.saturating_sub(1),
            _ => 0,
        };
        let other = if other == best || other > limit {
            (best + 1).min(limit)
        } else {
            other
        };
        let mut loss = self.cost(count, other) * (1.0 - self.speed(rows, other) / most).max(0.0);
        if other > 0 && behind > 4 * count {
            loss = 2.0 * loss + self.catching_up * behind as f64;
        }
        if loss > self.budget {
            return best;
        }
        self.budget -= loss;
        self.interval = (self.interval * 3 / 2).min(TRIALS.1);
        self.until_trial = self.interval;
        self.trials += 1;
        other
    }

    /// Tokens per second of rounds of a depth.
    fn speed(&self, rows: &[&Acceptance], depth: u32) -> f64 {
        let (mut tokens, mut undrafted) = (0.0, 1.0);
        for row in rows {
            let coverage = row.coverage(&self.usual);
            tokens += 1.0 + coverage * (row.tokens(depth, &self.usual) - 1.0);
            undrafted *= 1.0 - coverage;
        }
        let cost = |depth| self.cost(rows.len(), depth);
        tokens / (undrafted * cost(0) + (1.0 - undrafted) * cost(depth))
    }

    /// Seconds of a round: as measured; else on the line through the nearest depths that were; else, where only
    /// rounds without a draft were, so many times longer as with the nearest number of rows.
    fn cost(&self, rows: usize, depth: u32) -> f64 {
        if let Some(cost) = self.cost_on_line(rows, depth) {
            return cost;
        }
        let plain = |rows| self.known.get(&(rows, 0)).map(|time| time.seconds);
        let Some(own) = plain(rows) else {
            return f64::INFINITY;
        };
        let mut others: Vec<usize> = self.known.keys().map(|(rows, _)| *rows).collect();
        others.dedup();
        others.sort_by_key(|other| other.abs_diff(rows));
        let ratio = |other| Some(self.cost_on_line(other, depth)? / plain(other)?);
        others
            .into_iter()
            .find_map(ratio)
            .map_or(f64::INFINITY, |ratio| own * ratio)
    }

    fn cost_on_line(&self, rows: usize, depth: u32) -> Option<f64> {
        if let Some(time) = self.known.get(&(rows, depth)) {
            return Some(time.seconds);
        }
        let of_rows = self.known.range((rows, 0)..=(rows, DEEPEST));
        let points: Vec<(f64, f64)> = of_rows
            .map(|(&(_, depth), time)| (f64::from(depth), time.seconds))
            .collect();
        let depth = f64::from(depth);
        let after = points
            .iter()
            .position(|(d, _)| *d > depth)
            .unwrap_or(points.len());
        // Between two, or beyond the last two.
        let last = after.clamp(1, points.len().max(2) - 1);
        let (a, b) = (points.get(last.wrapping_sub(1))?, points.get(last)?);
        let slope = ((b.1 - a.1) / (b.0 - a.0)).max(0.0);
        Some(a.1 + slope * (depth - a.0))
    }
}

fn read(file: &Path) -> Option<Saved> {
    let text = std::fs::read(file)
        .ok()
        .filter(|text| text.len() < 1 << 20)?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of one row until the policy has settled, and the depths of the last 600.
    fn play(cost: impl Fn(u32) -> f64, right: impl Fn(usize) -> bool) -> Vec<u32> {
        let mut costs = Costs::load(None);
        let mut row = Acceptance::default();
        let mut depths = Vec::new();
        for round in 0..1000 {
            let depth = costs.choose(&[&row], 12, 0);
            if depth > 0 {
                let accepted = (0..depth as usize)
                    .take_while(|i| right(round * 31 + i * 7))
                    .count();
                row.record(depth as usize, accepted);
                costs.learn(depth as usize, accepted);
            }
            costs.record(1, depth, Duration::from_secs_f64(cost(depth)), 0);
            depths.push(depth);
        }
        depths.split_off(400)
    }

    fn most_frequent(depths: &[u32]) -> u32 {
        let count = |depth: u32| depths.iter().filter(|d| **d == depth).count();
        (0..=DEEPEST).max_by_key(|depth| count(*depth)).unwrap_or(0)
    }

    #[test]
    fn drafts_that_are_never_right_cost_next_to_nothing() {
        let cost = |depth: u32| {
            if depth == 0 {
                1.0
            } else {
                1.3 + 0.3 * f64::from(depth)
            }
        };
        let depths = play(cost, |_| false);
        let time: f64 = depths.iter().map(|depth| cost(*depth)).sum();
        assert!(
            time <= 1.02 * depths.len() as f64,
            "{time} for {}",
            depths.len()
        );
    }

    #[test]
    fn free_checks_and_right_drafts_are_deep() {
        let depths = play(|depth| 1.0 + 0.01 * f64::from(depth), |_| true);
        assert_eq!(most_frequent(&depths), DEEPEST);
    }

    #[test]
    fn what_is_right_half_the_time_is_drafted_while_it_pays() {
        // 1, 1.5, 1.75, … tokens: with 0.2 a token, depth 1 gives 1.25 and depth 2 gives 1.25.
        let depths = play(|depth| 1.0 + 0.25 * f64::from(depth), |i| i % 2 == 0);
        assert!((1..=2).contains(&most_frequent(&depths)), "{depths:?}");
        let depths = play(|depth| 1.0 + 0.9 * f64::from(depth), |i| i % 2 == 0);
        assert_eq!(most_frequent(&depths), 0);
    }

    #[test]
    fn what_was_measured_is_remembered_and_nonsense_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("costs").join("a.json");
        let mut costs = Costs::load(Some(file.clone()));
        costs.record(2, 3, Duration::from_millis(7), 0);
        costs.save();
        assert_eq!(Costs::load(Some(file.clone())).cost(2, 3), 0.007);
        for text in [
            "",
            "{",
            r#"{"costs": [{"rows":1,"depth":0,"seconds":-1.0,"count":9}], "usual": {"positions": [], "asked": 0, "drafted": 0}}"#,
        ] {
            std::fs::write(&file, text).unwrap();
            assert!(Costs::load(Some(file.clone())).known.is_empty(), "{text}");
        }
    }
}
