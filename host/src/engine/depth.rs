//! How many tokens to draft: what pays, by the measured cost of rounds and the recent acceptance.
//!
//! A round of depth `d` gives `1 + a1 + a1 a2 + …` tokens, where `ai` is how often the `i`-th token of
//! a draft is accepted when those before it are, and takes as long as rounds of that depth took
//! lately. The depth with the most tokens per second is drafted, zero included. Now and then a
//! neighbour is tried, so that what was learnt does not grow old; the less often, the longer that
//! has changed nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::paths;

/// The deepest draft that is chosen without being asked for.
pub(super) const DEEPEST: u32 = 12;

/// Rounds between two trials, at first and at most.
const TRIALS: (u32, u32) = (16, 256);

/// How much the newest of many times counts.
const NEWEST: f64 = 0.08;

/// How much older observations of acceptance count with every new one.
const FADE: f64 = 0.95;

/// How often the drafts of a request were accepted lately.
#[derive(Clone, Default)]
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

    /// How often a request for a draft is answered with one.
    fn coverage(&self) -> f64 {
        (self.drafted + 1.0) / (self.asked + 1.0)
    }

    /// The tokens that a round with a draft of `depth` gives.
    fn tokens(&self, depth: u32) -> f64 {
        let (mut all, mut reached, mut before) = (1.0, 1.0, 0.6);
        for index in 0..depth as usize {
            let (tried, right) = self.positions.get(index).copied().unwrap_or_default();
            // Where little is known, as at the position before.
            before = (right + 2.0 * before) / (tried + 2.0);
            reached *= before;
            all += reached;
        }
        all
    }
}

/// What rounds cost, by the number of rows and the depth. One per engine.
pub struct Costs {
    known: BTreeMap<(usize, u32), Time>,
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

#[derive(Serialize, Deserialize)]
struct Saved {
    rows: usize,
    depth: u32,
    #[serde(flatten)]
    time: Time,
}

impl Costs {
    /// What `file` remembers, which [`Costs::save`] writes. A file that makes no sense is ignored.
    pub fn load(file: Option<PathBuf>) -> Self {
        let saved = file.as_deref().and_then(read).unwrap_or_default();
        let sensible = |saved: &Saved| {
            let time = saved.time.seconds;
            time.is_finite() && time > 0.0 && saved.depth <= DEEPEST && saved.rows <= 4096
        };
        let known = saved.into_iter().filter(sensible).map(|saved| {
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
        let saved: Vec<Saved> = self
            .known
            .iter()
            .map(|(&(rows, depth), &time)| Saved { rows, depth, time })
            .collect();
        let written = serde_json::to_vec(&saved)
            .map_err(std::io::Error::from)
            .and_then(|text| paths::write_whole(file, &text));
        if let Err(error) = written {
            tracing::debug!("{}: can't write: {error}", file.display());
        }
    }

    /// A round of some rows took so long with drafts of at most `depth` tokens.
    pub fn record(&mut self, rows: usize, depth: u32, took: Duration) {
        let seconds = took.as_secs_f64();
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

    /// The depth for the next round of some rows, at most `limit`.
    pub fn choose(&mut self, rows: &[&Acceptance], limit: u32) -> u32 {
        let limit = limit.min(DEEPEST);
        let count = rows.len();
        // The cost of a token and of a check are what everything else is guessed from.
        for depth in 0..=limit.min(1) {
            if self
                .known
                .get(&(count, depth))
                .is_none_or(|time| time.count < 2)
            {
                return depth;
            }
        }
        let mut best = (0, 0.0);
        for depth in 0..=limit {
            let speed = self.speed(rows, depth);
            if speed > best.1 {
                best = (depth, speed);
            }
        }
        let best = best.0;
        self.until_trial = self.until_trial.saturating_sub(1);
        if self.until_trial > 0 {
            return best;
        }
        self.interval = (self.interval * 3 / 2).min(TRIALS.1);
        self.until_trial = self.interval;
        self.trials += 1;
        let other = match self.trials % 3 {
            1 => best + 1,
            2 => best.saturating_sub(1),
            _ => 0,
        };
        if other == best || other > limit {
            (best + 1).min(limit)
        } else {
            other
        }
    }

    /// Tokens per second of rounds of a depth.
    fn speed(&self, rows: &[&Acceptance], depth: u32) -> f64 {
        let (mut tokens, mut undrafted) = (0.0, 1.0);
        for row in rows {
            let coverage = row.coverage();
            tokens += 1.0 + coverage * (row.tokens(depth) - 1.0);
            undrafted *= 1.0 - coverage;
        }
        let cost = |depth| self.cost(rows.len(), depth);
        tokens / (undrafted * cost(0) + (1.0 - undrafted) * cost(depth))
    }

    /// Seconds of a round: as measured, else on the line through the nearest that were.
    fn cost(&self, rows: usize, depth: u32) -> f64 {
        if let Some(time) = self.known.get(&(rows, depth)) {
            return time.seconds;
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
        match (points.get(last.wrapping_sub(1)), points.get(last)) {
            (Some(a), Some(b)) => {
                let slope = ((b.1 - a.1) / (b.0 - a.0)).max(0.0);
                a.1 + slope * (depth - a.0)
            }
            _ => f64::INFINITY,
        }
    }
}

fn read(file: &Path) -> Option<Vec<Saved>> {
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
            let depth = costs.choose(&[&row], 12);
            if depth > 0 {
                let accepted = (0..depth as usize)
                    .take_while(|i| right(round * 31 + i * 7))
                    .count();
                row.record(depth as usize, accepted);
            }
            costs.record(1, depth, Duration::from_secs_f64(cost(depth)));
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
        costs.record(2, 3, Duration::from_millis(7));
        costs.save();
        assert_eq!(Costs::load(Some(file.clone())).cost(2, 3), 0.007);
        for text in [
            "",
            "{",
            "[{\"rows\":1,\"depth\":0,\"seconds\":-1.0,\"count\":9}]",
        ] {
            std::fs::write(&file, text).unwrap();
            assert!(Costs::load(Some(file.clone())).known.is_empty(), "{text}");
        }
    }
}
