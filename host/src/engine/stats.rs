//! What an answer took.

use std::time::Duration;

/// Counts and times of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were not processed again: a kept state begins with them.
    pub cached_tokens: usize,
    /// Tokens of the answer.
    pub tokens: usize,
    /// The target passes after the prompt's.
    pub rounds: Vec<Round>,
    /// Requests that shared its rounds, summed over them, this one included.
    pub rows: usize,
    /// Time from the submission until work on it began.
    pub queued: Duration,
    /// Time from then until the first token.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
    /// The plugin that drafted to the end; none without one, or when it failed.
    pub drafter: Option<String>,
}

/// One target pass and what was drafted for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The drafted tokens.
    pub drafted: Vec<i32>,
    /// How many of them were delivered.
    pub accepted: usize,
}

impl Round {
    /// Adds, for the first, second, … token of its draft, that it was drafted, and whether it was delivered.
    pub(super) fn count_into(&self, counts: &mut Vec<(usize, usize)>) {
        let drafted = self.drafted.len();
        if counts.len() < drafted {
            counts.resize(drafted, (0, 0));
        }
        for (position, count) in counts.iter_mut().enumerate().take(drafted) {
            count.0 += 1;
            count.1 += usize::from(position < self.accepted);
        }
    }
}

impl Stats {
    /// All drafted tokens.
    pub fn drafted_tokens(&self) -> usize {
        self.rounds.iter().map(|round| round.drafted.len()).sum()
    }

    /// All drafted tokens that were delivered.
    pub fn accepted_tokens(&self) -> usize {
        self.rounds.iter().map(|round| round.accepted).sum()
    }

    /// For the first, second, … token of a draft: in how many rounds it was drafted, and in how
    /// many of those delivered.
    pub fn by_position(&self) -> Vec<(usize, usize)> {
        let mut counts: Vec<(usize, usize)> = Vec::new();
        for round in &self.rounds {
            round.count_into(&mut counts);
        }
        counts
    }

    /// Tokens per target pass; the first token comes from the prompt's pass and does not count.
    pub fn tokens_per_pass(&self) -> f64 {
        self.tokens.saturating_sub(1) as f64 / self.rounds.len().max(1) as f64
    }

    /// Requests per round, this one included.
    pub fn rows_per_round(&self) -> f64 {
        self.rows as f64 / self.rounds.len().max(1) as f64
    }

    /// Tokens per second after the first one.
    pub fn decode_speed(&self) -> f64 {
        self.tokens.saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }

    /// Prompt tokens per second, of those that were processed.
    pub fn prefill_speed(&self) -> f64 {
        (self.prompt_tokens - self.cached_tokens) as f64 / self.prefill.as_secs_f64().max(1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_counted_apart() {
        let round = |drafted: &[i32], accepted| Round {
            drafted: drafted.to_vec(),
            accepted,
        };
        let stats = Stats {
            tokens: 7,
            rounds: vec![round(&[5, 6, 7], 1), round(&[8, 9], 2), round(&[], 0)],
            ..Stats::default()
        };
        assert_eq!(stats.by_position(), [(2, 2), (2, 1), (1, 0)]);
        assert_eq!((stats.drafted_tokens(), stats.accepted_tokens()), (5, 3));
        assert_eq!(stats.tokens_per_pass(), 2.0);
    }
}
