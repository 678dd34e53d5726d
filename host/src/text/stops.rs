//! Watching a text for stop strings, a piece at a time.

/// Matches several strings against a growing text in time linear in the text.
///
/// The match that *completes* first wins, so that the result does not depend on how the text is
/// cut into pieces and nothing waits for a longer match; of those that complete with the same
/// byte, the longest. Knuth-Morris-Pratt automata, one a string: the state is how much of the
/// string the text ends with, which is also how much must be held back.
#[derive(Debug)]
pub(super) struct Stops {
    patterns: Vec<Pattern>,
}

#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `border[i]`: the longest proper prefix of `bytes[..=i]` that is also its suffix.
    border: Vec<usize>,
    /// How many bytes of the pattern the text ends with; below `bytes.len()` between calls.
    state: usize,
}

impl Stops {
    /// Empty strings are ignored: they would stop every text before it begins.
    pub(super) fn new(stops: Vec<String>) -> Self {
        let patterns = stops.into_iter().filter(|s| !s.is_empty());
        Self {
            patterns: patterns.map(Pattern::new).collect(),
        }
    }

    /// Takes in the next piece of the text. On a match, returns `(end, len)`: the stop string is
    /// `len` bytes long and its last byte is just before `end` in `piece`; what comes after it
    /// has not been looked at.
    pub(super) fn feed(&mut self, piece: &str) -> Option<(usize, usize)> {
        for (at, byte) in piece.bytes().enumerate() {
            let mut longest = None;
            for pattern in &mut self.patterns {
                if pattern.step(byte) {
                    longest = longest.max(Some(pattern.bytes.len()));
                }
            }
            if let Some(len) = longest {
                return Some((at + 1, len));
            }
        }
        None
    }

    /// How many bytes at the end of the text could be the beginning of a stop string.
    ///
    /// Always whole characters: a match begins at the first byte of one.
    pub(super) fn held(&self) -> usize {
        self.patterns.iter().map(|p| p.state).max().unwrap_or(0)
    }
}

impl Pattern {
    fn new(pattern: String) -> Self {
        let bytes = pattern.into_bytes();
        let mut border = vec![0; bytes.len()];
        let mut matched = 0;
        for i in 1..bytes.len() {
            while matched > 0 && bytes[i] != bytes[matched] {
                matched = border[matched - 1];
            }
            matched += usize::from(bytes[i] == bytes[matched]);
            border[i] = matched;
        }
        Self {
            bytes,
            border,
            state: 0,
        }
    }

    /// Takes in one byte; true if it completes the pattern.
    fn step(&mut self, byte: u8) -> bool {
        while self.state > 0 && self.bytes[self.state] != byte {
            self.state = self.border[self.state - 1];
        }
        self.state += usize::from(self.bytes[self.state] == byte);
        let complete = self.state == self.bytes.len();
        if complete {
            self.state = self.border[self.state - 1];
        }
        complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(of: &[&str]) -> Stops {
        Stops::new(of.iter().map(|s| (*s).to_owned()).collect())
    }

    #[test]
    fn finds_what_spans_pieces_and_overlaps_itself() {
        let mut s = stops(&["aab"]);
        assert_eq!(s.feed("aaaa"), None);
        assert_eq!(s.held(), 2);
        assert_eq!(s.feed("bxx"), Some((1, 3)));

        let mut s = stops(&["abcabd"]);
        assert_eq!(s.feed("abcabcab"), None);
        assert_eq!(s.held(), 5);
        assert_eq!(s.feed("d"), Some((1, 6)));
    }

    #[test]
    fn the_first_to_complete_wins_then_the_longest() {
        assert_eq!(stops(&["abcd", "bc"]).feed("abcd"), Some((3, 2)));
        assert_eq!(stops(&["c", "abc"]).feed("abc"), Some((3, 3)));
        assert_eq!(stops(&["ab", "abc"]).feed("abc"), Some((2, 2)));
    }

    #[test]
    fn nothing_to_look_for() {
        let mut s = stops(&["", ""]);
        assert_eq!(s.feed("text"), None);
        assert_eq!(s.held(), 0);
    }
}
