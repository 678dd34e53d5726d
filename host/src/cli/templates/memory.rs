//! What a text has taught: which token followed each token the last time.

use std::collections::BTreeMap;

/// The followers of the tokens of one text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    pub after: BTreeMap<i32, i32>,
}

impl Memory {
    /// Learns from tokens that follow each other.
    pub fn learn(&mut self, tokens: &[i32]) {
        for pair in tokens.windows(2) {
            self.after.insert(pair[0], pair[1]);
        }
    }

    /// At most `depth` tokens that may come after `last`: its follower, the follower of that, and so on.
    pub fn draft(&self, last: i32, depth: usize) -> Vec<i32> {
        let next = |token: &i32| self.after.get(token).copied();
        let chain = std::iter::successors(next(&last), next);
        chain.take(depth).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(tokens: &[i32]) -> Memory {
        let mut memory = Memory::default();
        memory.learn(tokens);
        memory
    }

    #[test]
    fn drafts_what_followed_the_last_time() {
        let memory = memory(&[1, 2, 3, 9, 1, 4, 1, 2]);
        assert_eq!(memory.draft(1, 1), [2]);
        assert_eq!(memory.draft(1, 4), [2, 3, 9, 1]);
    }

    #[test]
    fn drafts_nothing_after_what_is_new() {
        assert!(memory(&[1, 2]).draft(2, 4).is_empty());
        assert!(memory(&[]).draft(7, 4).is_empty());
        assert!(memory(&[1, 2]).draft(1, 0).is_empty());
    }
}
