//! What a way of decoding has come to since the engine began.

use super::stats::Round;

/// Rounds after which a drafter that is hardly ever right is spoken of, drafted tokens that it takes to know, and
/// the share of them that is hardly any.
const ROUNDS: u64 = 200;
const DRAFTED: u64 = 50;
const HARDLY: f64 = 0.05;

/// Counts of all requests that were decoded with one drafter, or with none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Target passes after the prompts'.
    pub rounds: u64,
    /// Requests in them, summed over the passes.
    pub rows: u64,
    /// Delivered tokens, the first ones of answers excepted: those come from the prompts' passes.
    pub tokens: u64,
    /// For the first, second, … token of a draft: how often it was drafted, and how often delivered.
    pub by_position: Vec<(usize, usize)>,
    /// Of the rounds since the share of accepted tokens was last looked at.
    lately: Lately,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Lately {
    rounds: u64,
    drafted: u64,
    accepted: u64,
    told: bool,
}

impl Totals {
    /// All drafted tokens.
    pub fn drafted(&self) -> usize {
        self.by_position.iter().map(|(drafted, _)| drafted).sum()
    }

    /// All drafted tokens that were delivered.
    pub fn accepted(&self) -> usize {
        self.by_position.iter().map(|(_, accepted)| accepted).sum()
    }

    /// A row of a round has got so many tokens.
    pub(super) fn add_row(&mut self, round: &Round, tokens: usize) {
        self.rows += 1;
        self.tokens += tokens as u64;
        round.count_into(&mut self.by_position);
        self.lately.drafted += round.drafted.len() as u64;
        self.lately.accepted += round.accepted as u64;
    }

    /// A round is over. Once, when hardly anything was accepted for long: what to tell the user.
    pub(super) fn end_round(&mut self) -> Option<String> {
        self.rounds += 1;
        let lately = &mut self.lately;
        lately.rounds += 1;
        if lately.rounds < ROUNDS || lately.drafted < DRAFTED {
            return None;
        }
        let Lately {
            rounds,
            drafted,
            accepted,
            told,
        } = *lately;
        let is_bad = (accepted as f64) < HARDLY * drafted as f64;
        *lately = Lately {
            told: told || is_bad,
            ..Lately::default()
        };
        (is_bad && !told).then(|| {
            format!("only {accepted} of {drafted} drafted tokens were right in {rounds} rounds")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(drafted: usize, accepted: usize) -> Round {
        Round {
            drafted: vec![7; drafted],
            accepted,
        }
    }

    #[test]
    fn rows_are_counted_by_position() {
        let mut totals = Totals::default();
        totals.add_row(&row(3, 1), 2);
        totals.add_row(&row(1, 1), 2);
        assert_eq!(totals.end_round(), None);
        totals.add_row(&row(0, 0), 1);
        totals.end_round();
        assert_eq!((totals.rounds, totals.rows, totals.tokens), (2, 3, 5));
        assert_eq!(totals.by_position, [(2, 2), (1, 0), (1, 0)]);
        assert_eq!((totals.drafted(), totals.accepted()), (4, 2));
    }

    #[test]
    fn a_drafter_that_is_hardly_ever_right_is_spoken_of_once() {
        let told = |accepted: fn(u64) -> usize| {
            let mut totals = Totals::default();
            let rounds = (0..2000).filter_map(|n| {
                totals.add_row(&row(2, accepted(n)), 1);
                totals.end_round()
            });
            rounds.collect::<Vec<_>>()
        };
        let says = "only 10 of 400 drafted tokens were right in 200 rounds";
        assert_eq!(told(|n| usize::from(n % 20 == 0)), [says]);
        assert!(told(|n| usize::from(n % 4 == 0)).is_empty());
    }
}
