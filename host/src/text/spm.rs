//! SentencePiece BPE from scores: the pair whose union has the highest score is merged first.
//!
//! A list of merges, which is what the `tokenizers` crate has, can't say that two unions of equal
//! score go from left to right; so this is a model of its own.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};

use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Token};

use super::detokenize::byte_token;
use super::gguf_vocab::Kind;

/// The pieces of a SentencePiece model. Spaces are already `▁` in what it gets.
pub(super) struct Spm {
    tokens: Vec<String>,
    ids: HashMap<String, u32>,
    /// By id; `None` for what text never becomes by merging (control tokens, bytes).
    scores: Vec<Option<f32>>,
    /// The tokens for bytes of characters that are not in the vocabulary.
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
    /// The length of the longest piece in bytes: no longer union is looked up.
    longest: usize,
}

impl Spm {
    /// `scores` and `kinds` are as long as `tokens`; ids are positions.
    pub(super) fn new(tokens: &[String], scores: &[f32], kinds: &[Kind]) -> Self {
        let mut spm = Self {
            tokens: tokens.to_vec(),
            ids: HashMap::with_capacity(tokens.len()),
            scores: vec![None; tokens.len()],
            bytes: vec![None; 256],
            unknown: None,
            longest: 0,
        };
        for (id, (token, (score, kind))) in
            (0u32..).zip(tokens.iter().zip(scores.iter().zip(kinds)))
        {
            // The first of several with the same text is the one that text becomes.
            let id = *spm.ids.entry(token.clone()).or_insert(id);
            match kind {
                Kind::Normal | Kind::UserDefined | Kind::Unused => {
                    spm.scores[id as usize].get_or_insert(*score);
                    spm.longest = spm.longest.max(token.len());
                }
                Kind::Byte => {
                    if let Some(byte) = byte_token(token) {
                        spm.bytes[usize::from(byte)].get_or_insert(id);
                    }
                }
                Kind::Unknown => spm.unknown = spm.unknown.or(Some(id)),
                Kind::Control => {}
            }
        }
        spm
    }

    /// The id and score of a piece that merging can make.
    fn piece(&self, text: &str) -> Option<(u32, f32)> {
        if text.len() > self.longest {
            return None;
        }
        let id = *self.ids.get(text)?;
        Some((id, (*self.scores.get(id as usize)?)?))
    }

    /// The tokens of a character that is not in the vocabulary.
    fn fallback(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let bytes: Option<Vec<u32>> = text.bytes().map(|b| self.bytes[usize::from(b)]).collect();
        bytes
            .or_else(|| self.unknown.map(|id| vec![id]))
            .ok_or_else(|| format!("no token for {text:?}").into())
    }
}

/// A run of the text; runs are linked in order.
struct Symbol {
    start: usize,
    end: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that could become one. Stale once either has changed, which `end` tells.
struct Merge {
    score: f32,
    left: usize,
    right: usize,
    end: usize,
}

impl Ord for Merge {
    fn cmp(&self, other: &Self) -> Ordering {
        let score = self.score.total_cmp(&other.score);
        score.then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Merge {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Merge {}

impl Model for Spm {
    // Never used: nothing is trained here, but the trait wants one.
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol {
                start,
                end: start + c.len_utf8(),
                prev: i.checked_sub(1),
                next: Some(i + 1),
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut heap = BinaryHeap::new();
        let candidate = |symbols: &[Symbol], left: usize| {
            let right = symbols[left].next?;
            let end = symbols[right].end;
            let (_, score) = self.piece(&text[symbols[left].start..end])?;
            Some(Merge {
                score,
                left,
                right,
                end,
            })
        };
        heap.extend((0..symbols.len()).filter_map(|left| candidate(&symbols, left)));
        while let Some(Merge {
            left, right, end, ..
        }) = heap.pop()
        {
            if symbols[left].next != Some(right) || symbols[right].end != end {
                continue;
            }
            symbols[left].end = end;
            symbols[left].next = symbols[right].next;
            // The absorbed one must not look like anyone's neighbour again.
            symbols[right].next = None;
            symbols[right].end = symbols[right].start;
            if let Some(after) = symbols[left].next {
                symbols[after].prev = Some(left);
            }
            heap.extend(candidate(&symbols, left));
            if let Some(before) = symbols[left].prev {
                heap.extend(candidate(&symbols, before));
            }
        }
        let mut tokens = Vec::new();
        let mut at = (!symbols.is_empty()).then_some(0);
        while let Some(symbol) = at.and_then(|i| symbols.get(i)) {
            let (value, offsets) = (&text[symbol.start..symbol.end], (symbol.start, symbol.end));
            let ids = match self.piece(value) {
                Some((id, _)) => vec![id],
                None => self.fallback(value)?,
            };
            let token = |id| Token::new(id, value.to_owned(), offsets);
            tokens.extend(ids.into_iter().map(token));
            at = symbol.next;
        }
        Ok(tokens)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.get(id as usize).cloned()
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.ids.clone()
    }

    fn get_vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("not supported".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(pieces: &[(&str, f32)]) -> Spm {
        let tokens: Vec<String> = pieces.iter().map(|p| p.0.to_owned()).collect();
        let scores: Vec<f32> = pieces.iter().map(|p| p.1).collect();
        Spm::new(&tokens, &scores, &vec![Kind::Normal; pieces.len()])
    }

    fn pieces(spm: &Spm, text: &str) -> Vec<String> {
        let tokens = spm.tokenize(text).unwrap();
        tokens.into_iter().map(|t| t.value).collect()
    }

    #[test]
    fn the_best_score_first_then_the_leftmost() {
        let spm = model(&[("a", 0.), ("b", 0.), ("c", 0.), ("ab", -2.), ("bc", -1.)]);
        assert_eq!(pieces(&spm, "abc"), ["a", "bc"]);
        // Equal scores: a list of merges would prefer one pair everywhere.
        let spm = model(&[("a", 0.), ("aa", -1.), ("aaa", -1.)]);
        assert_eq!(pieces(&spm, "aaaa"), ["aaa", "a"]);
        assert_eq!(pieces(&spm, ""), [""; 0]);
    }

    #[test]
    fn what_has_no_piece_falls_back_or_is_an_error() {
        let mut spm = model(&[("a", 0.), ("<unk>", 0.)]);
        assert!(spm.tokenize("aé").is_err());
        spm.unknown = Some(1);
        let ids: Vec<u32> = spm.tokenize("aé").unwrap().iter().map(|t| t.id).collect();
        assert_eq!(ids, [0, 1]);
        (spm.bytes[0xc3], spm.bytes[0xa9]) = (Some(7), Some(8));
        let ids: Vec<u32> = spm.tokenize("aé").unwrap().iter().map(|t| t.id).collect();
        assert_eq!(ids, [0, 7, 8]);
    }

    /// The definition, without a heap.
    fn slowly(spm: &Spm, text: &str) -> Vec<String> {
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let mut best: Option<(f32, usize)> = None;
            for i in 1..parts.len() {
                if let Some((_, s)) = spm.piece(&(parts[i - 1].clone() + &parts[i]))
                    && best.is_none_or(|(b, _)| s > b)
                {
                    best = Some((s, i));
                }
            }
            let Some((_, i)) = best else { return parts };
            let right = parts.remove(i);
            parts[i - 1] += &right;
        }
    }

    proptest! {
        #[test]
        fn equals_the_definition(
            text in "[abc]{0,30}",
            vocabulary in prop::collection::btree_map("[abc]{2,4}", -4i8..0, 0..30),
        ) {
            let mut all = vec![("a", 0.), ("b", 0.), ("c", 0.)];
            all.extend(vocabulary.iter().map(|(p, s)| (p.as_str(), f32::from(*s))));
            let spm = model(&all);
            prop_assert_eq!(pieces(&spm, &text), slowly(&spm, &text));
        }
    }
}
