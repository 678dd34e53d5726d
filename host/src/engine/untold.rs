//! Rounds without a draft, which a drafter is told of only when it is to draft again.
//!
//! Following costs a drafter a pass of its own. While drafts do not pay, because many rows are decoded or because
//! what is drafted is wrong, that would be for nothing: rows that end before the next draft are never told of.

use plugin_api::{Result, Tensor};

use crate::plugin::Progress;

/// What is kept at most: tokens of a row, and bytes of taps. Then the drafter is told.
const MOST_TOKENS: usize = 1024;
const MOST_BYTES: usize = 32 << 20;

/// What happened to rows since the drafter heard of them, oldest first.
#[derive(Default)]
pub(super) struct Untold {
    pieces: Vec<Piece>,
    /// Of all pieces, as every round asks: tokens of all rows, the longest rows one after the other, bytes.
    tokens: usize,
    width: usize,
    bytes: usize,
}

/// Some tokens of every row, maybe none of some.
pub(super) struct Piece {
    pub tokens: Vec<Vec<i32>>,
    /// What follows them.
    pub next: Vec<i32>,
    /// `[B, T, hidden]` each.
    pub taps: Vec<Tensor>,
}

impl Piece {
    pub fn new(progress: &Progress<'_>) -> Self {
        Self {
            tokens: progress.tokens.iter().map(|row| row.to_vec()).collect(),
            next: progress.next.to_vec(),
            taps: progress.taps.to_vec(),
        }
    }

    /// Calls with what happened, as a drafter is told.
    pub fn told<T>(&self, body: impl FnOnce(&Progress<'_>) -> T) -> T {
        let tokens: Vec<&[i32]> = self.tokens.iter().map(Vec::as_slice).collect();
        body(&Progress {
            tokens: &tokens,
            next: &self.next,
            accepted: &vec![0; tokens.len()],
            taps: &self.taps,
        })
    }

    /// Tokens of all rows.
    pub fn count(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    fn width(&self) -> usize {
        self.tokens.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Whether all rows have as many tokens.
    fn is_even(&self) -> bool {
        self.tokens.iter().all(|row| row.len() == self.width())
    }

    pub fn bytes(&self) -> usize {
        let size = |tap: &Tensor| {
            let elements: i32 = tap.shape().iter().product();
            elements as usize * tap.dtype().size().unwrap_or(4)
        };
        self.taps.iter().map(size).sum()
    }

    /// The piece among `more` other rows: before them, or after them.
    fn beside(&self, more: usize, is_first: bool) -> Result<Self> {
        let around = |tap: &Tensor| {
            let shape = tap.shape();
            let empty = Tensor::full(&[more as i32, shape[1], shape[2]], 0.0, tap.dtype())?;
            match is_first {
                true => Tensor::concat(&[tap, &empty], 0),
                false => Tensor::concat(&[&empty, tap], 0),
            }
        };
        let before = if is_first { 0 } else { more };
        let after = more - before;
        let empty = |count: usize| std::iter::repeat_n(Vec::new(), count);
        Ok(Self {
            tokens: empty(before)
                .chain(self.tokens.iter().cloned())
                .chain(empty(after))
                .collect(),
            next: [&vec![0; before], &self.next[..], &vec![0; after]].concat(),
            taps: self.taps.iter().map(around).collect::<Result<_>>()?,
        })
    }

    pub fn filtered(&self, keep: &[u32], rows: &Tensor) -> Result<Self> {
        let taps = self.taps.iter().map(|tap| tap.take(rows, 0));
        Ok(Self {
            tokens: keep
                .iter()
                .map(|&row| self.tokens[row as usize].clone())
                .collect(),
            next: keep.iter().map(|&row| self.next[row as usize]).collect(),
            taps: taps.collect::<Result<_>>()?,
        })
    }
}

impl Untold {
    /// Every row got one token.
    pub fn push(&mut self, round: &Progress<'_>) {
        self.add(Piece::new(round));
    }

    fn add(&mut self, piece: Piece) {
        self.tokens += piece.count();
        self.width += piece.width();
        self.bytes += piece.bytes();
        self.pieces.push(piece);
    }

    /// Tokens of all rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether it is more than should be kept, beside so many bytes.
    pub fn is_much(&self, beside: usize) -> bool {
        self.width >= MOST_TOKENS || self.bytes + beside >= MOST_BYTES
    }

    /// All of it, in as few pieces as there can be; nothing is left.
    pub fn take(&mut self) -> Result<Vec<Piece>> {
        merged(&std::mem::take(self).pieces)
    }

    /// The given rows alone.
    pub fn filtered(&self, keep: &[u32]) -> Result<Self> {
        let rows: Vec<i32> = keep.iter().map(|&row| row as i32).collect();
        let rows = Tensor::from_slice(&rows, &[rows.len() as i32])?;
        let pieces = merged(&self.pieces)?;
        let pieces = pieces.iter().map(|piece| piece.filtered(keep, &rows));
        let mut pieces = pieces.collect::<Result<Vec<_>>>()?;
        pieces.retain(|piece| piece.width() > 0);
        computed(pieces)
    }

    /// Its rows, then those of another; `rows` says how many each has.
    pub fn joined(&self, other: &Self, rows: [usize; 2]) -> Result<Self> {
        let mut pieces = Vec::new();
        for piece in merged(&self.pieces)? {
            pieces.push(piece.beside(rows[1], true)?);
        }
        for piece in merged(&other.pieces)? {
            pieces.push(piece.beside(rows[0], false)?);
        }
        computed(pieces)
    }
}

/// Rounds of the same rows as one piece.
fn merged(pieces: &[Piece]) -> Result<Vec<Piece>> {
    let mut out = Vec::new();
    for run in pieces.chunk_by(|a, b| a.is_even() && b.is_even()) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            continue;
        };
        let rows = 0..first.tokens.len();
        let tokens = rows.map(|row| {
            run.iter()
                .flat_map(|piece| piece.tokens[row].clone())
                .collect()
        });
        let taps = (0..first.taps.len()).map(|tap| {
            let columns: Vec<&Tensor> = run.iter().map(|piece| &piece.taps[tap]).collect();
            Tensor::concat(&columns, 1)
        });
        out.push(Piece {
            tokens: tokens.collect(),
            next: last.next.clone(),
            taps: taps.collect::<Result<_>>()?,
        });
    }
    Ok(out)
}

/// What was made of others, no longer in need of them.
fn computed(pieces: Vec<Piece>) -> Result<Untold> {
    let taps: Vec<&Tensor> = pieces.iter().flat_map(|piece| &piece.taps).collect();
    Tensor::eval_all(&taps)?;
    let mut untold = Untold::default();
    pieces.into_iter().for_each(|piece| untold.add(piece));
    Ok(untold)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group of rows, and of each all tokens that nobody was told of.
    #[derive(Default)]
    struct Group {
        untold: Untold,
        rows: Vec<Vec<i32>>,
    }

    impl Group {
        fn of(rows: usize) -> Self {
            Self {
                untold: Untold::default(),
                rows: vec![Vec::new(); rows],
            }
        }

        /// A round: one token each, whose number is in its tap, too.
        fn round(&mut self, token: &mut i32) {
            let first = *token;
            *token += self.rows.len() as i32;
            let tokens: Vec<i32> = (first..*token).collect();
            let taps: Vec<f32> = tokens.iter().flat_map(|t| [*t as f32, 0.5]).collect();
            let next: Vec<i32> = tokens.iter().map(|token| -token).collect();
            self.untold.push(&Progress {
                tokens: &tokens.chunks(1).collect::<Vec<_>>(),
                next: &next,
                accepted: &vec![0; tokens.len()],
                taps: &[Tensor::from_slice(&taps, &[tokens.len() as i32, 1, 2]).unwrap()],
            });
            for (row, token) in self.rows.iter_mut().zip(tokens) {
                row.push(token);
            }
        }

        fn keep(&mut self, keep: &[u32]) {
            self.untold = self.untold.filtered(keep).unwrap();
            self.rows = keep
                .iter()
                .map(|&row| self.rows[row as usize].clone())
                .collect();
        }

        fn join(&mut self, mut other: Self) {
            let rows = [self.rows.len(), other.rows.len()];
            self.untold = self.untold.joined(&other.untold, rows).unwrap();
            self.rows.append(&mut other.rows);
        }

        /// What is told is what there was, row by row and in order, with its taps and what follows it.
        fn check(mut self) {
            assert_eq!(self.untold.tokens(), self.rows.concat().len());
            let pieces = self.untold.take().unwrap();
            for (row, tokens) in self.rows.iter().enumerate() {
                let mut told: Vec<i32> = Vec::new();
                for piece in &pieces {
                    let mine = &piece.tokens[row];
                    if let Some(last) = mine.last() {
                        assert_eq!(piece.next[row], -last);
                    }
                    let width = piece.taps[0].shape()[1] as usize;
                    let taps = piece.taps[0].to_vec::<f32>().unwrap();
                    let columns = taps[2 * row * width..].chunks(2);
                    let seen: Vec<i32> = columns.take(mine.len()).map(|c| c[0] as i32).collect();
                    assert_eq!(seen, *mine);
                    told.extend(mine);
                }
                assert_eq!(told, *tokens);
            }
            assert_eq!(self.untold.tokens(), 0);
        }
    }

    #[test]
    fn rows_that_come_and_go_are_told_of_in_full() {
        crate::backend::install();
        let mut token = 1;
        let mut rounds = |group: &mut Group, count: usize| {
            for _ in 0..count {
                group.round(&mut token);
            }
        };
        let (mut a, mut b) = (Group::of(3), Group::of(2));
        rounds(&mut a, 4);
        rounds(&mut b, 2);
        a.join(b);
        rounds(&mut a, 3);
        a.keep(&[0, 2, 4]);
        rounds(&mut a, 1);
        let mut c = Group::of(1);
        c.join(Group::of(2));
        rounds(&mut c, 2);
        a.join(c);
        a.keep(&[1, 2, 3, 5]);
        rounds(&mut a, 2);
        a.check();
        // Pieces of rows that have left go with them.
        let mut d = Group::of(1);
        rounds(&mut d, 2);
        let mut e = Group::of(1);
        e.join(d);
        e.keep(&[0]);
        assert!(e.untold.pieces.is_empty());
        e.check();
    }

    #[test]
    fn no_more_is_kept_than_is_allowed() {
        crate::backend::install();
        let (mut group, mut token) = (Group::of(2), 1);
        for _ in 0..MOST_TOKENS {
            assert!(!group.untold.is_much(0));
            group.round(&mut token);
        }
        assert!(group.untold.is_much(0));
        assert_eq!(group.untold.take().unwrap().len(), 1);
    }
}
