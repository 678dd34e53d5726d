//! The round: draft, verify in one target pass, keep exactly what the target itself says.
//!
//! The target's own draw at every position is what is delivered; a drafted token only saves the
//! pass that would have drawn it. Leviathan et al., "Fast Inference from Transformers via
//! Speculative Decoding" (2023), in the form where target and drafter share the random numbers.

use std::time::Instant;

use plugin_api::abi::{BinaryOp, Donor};
use plugin_api::layers::{LayerCache, Step};
use plugin_api::sampling::{self, Sampling};
use plugin_api::{DType, DonorKind, Result, Tensor};

use super::group::Group;
use super::row::Row;
use super::stats::Round;
use crate::model::Model;
use crate::plugin::{Draft, Progress};

/// What one row's verification gave.
struct Verdict {
    /// The target's tokens: the accepted drafts, then one more.
    tokens: Vec<i32>,
    /// Drafted tokens that the target confirmed.
    accepted: usize,
}

impl Group {
    /// One round for all rows.
    pub(super) fn round(&mut self) -> Result<()> {
        let rows = self.rows.len();
        let begun = Instant::now();
        let depths = self.depths();
        let pending: Vec<i32> = self.rows.iter().map(Row::pending).collect();
        let positions: Vec<u32> = self
            .rows
            .iter()
            .map(|row| row.processed as u32 + 1)
            .collect();
        let draft = match donors(&self.drafting.donors(), self.target.model(), &self.caches) {
            Some(donors) => self.drafting.draft(&depths, &pending, &positions, &donors),
            None => None,
        };
        if let Some(ids) = draft.as_ref().and_then(|draft| draft.ids.as_ref()) {
            // The drafts compute while the graph of the verification is built.
            Tensor::start_all(&[ids])?;
        }
        let drafted = draft
            .as_ref()
            .map_or_else(|| vec![0; rows], |draft| draft.lens.clone());
        let width = 1 + drafted.iter().copied().max().unwrap_or(0) as i32;

        let lens: Vec<i32> = drafted.iter().map(|&n| 1 + n as i32).collect();
        let step = Step::new(&self.offsets(), &lens, width, width > 1)?;
        let ids = self.verify_ids(&pending, draft.as_ref())?;
        let taps = self.drafting.taps();
        let model = self.model().clone();
        let pass = model.forward(&ids, &step, &mut self.caches, &taps)?;
        let sampling: Vec<Sampling> = self.rows.iter().map(|row| row.request.sampling).collect();
        let drawn = sampling::draw(&model.logits(&pass.hidden)?, &sampling, &positions)?;
        let (mut proposed, drawn) = read_back(draft, &drawn)?;
        for (proposed, &len) in proposed.iter_mut().zip(&drafted) {
            proposed.truncate(len as usize);
        }

        let vocab = model.facts().vocab_size;
        let verdicts: Vec<Verdict> = proposed
            .iter()
            .zip(&drawn)
            .map(|(proposed, drawn)| {
                if let Some(id) = proposed.iter().find(|id| !(0..vocab).contains(*id)) {
                    let why = format!("drafted the id {id}, outside the vocabulary of {vocab}");
                    self.drafting.give_up(&why);
                }
                verify(proposed, drawn)
            })
            .collect();

        // Cut at the end of the answer before anything is committed: what the caches keep is what
        // was delivered.
        let mut kept = Vec::with_capacity(rows);
        let mut finished = Vec::with_capacity(rows);
        let mut totals = self.method.totals.borrow_mut();
        for ((row, verdict), drafted) in self.rows.iter_mut().zip(&verdicts).zip(proposed) {
            let is_over = row.over;
            let delivered = row.deliver(&verdict.tokens, verdict.accepted);
            let round = Round {
                accepted: verdict.accepted.min(delivered.count),
                drafted,
            };
            if !is_over {
                totals.add_row(&round, delivered.count);
            }
            row.stats.rounds.push(round);
            row.stats.rows += rows;
            kept.push(delivered.count as i32);
            finished.push(delivered.finish);
        }
        let problem = totals.end_round();
        drop(totals);
        if let Some(problem) = problem {
            self.drafting.complain(&problem);
        }
        for cache in &mut self.caches {
            cache.resolve(&kept)?;
        }
        if finished.iter().any(Option::is_none) || self.store.is_some() {
            self.commit(&pending, &verdicts, &kept, &pass.taps, width > 1);
        }
        for (row, &kept) in self.rows.iter_mut().zip(&kept) {
            row.processed += kept as usize;
        }
        if self.drafting.max_depth() > 0 {
            let caught_up = self.drafting.take_caught_up();
            let mut costs = self.method.costs.borrow_mut();
            for ((row, &asked), &got) in self.rows.iter_mut().zip(&depths).zip(&drafted) {
                if asked > 0 {
                    let accepted = row.stats.rounds.last().map_or(0, |round| round.accepted);
                    row.acceptance.record(got as usize, accepted);
                    costs.learn(got as usize, accepted);
                }
            }
            let depth = drafted.iter().copied().max().unwrap_or(0);
            costs.record(rows, depth, begun.elapsed(), caught_up);
        }
        self.drop_finished(&finished);
        Ok(())
    }

    /// How much to draft for each row.
    fn depths(&self) -> Vec<u32> {
        let most = self.drafting.max_depth();
        if most == 0 {
            return vec![0; self.rows.len()];
        }
        let chosen = if self.rows.iter().any(|row| row.request.depth.is_none()) {
            let acceptance: Vec<_> = self.rows.iter().map(|row| &row.acceptance).collect();
            let limit = self.drafting.sensible_depth();
            let behind = self.drafting.behind();
            self.method
                .costs
                .borrow_mut()
                .choose(&acceptance, limit, behind)
        } else {
            0
        };
        let depth = |row: &Row| {
            // A draft beyond the last token that may be delivered would be wasted.
            let room = u32::try_from(row.remaining() - 1).unwrap_or(u32::MAX);
            row.request.depth.unwrap_or(chosen).min(most).min(room)
        };
        self.rows.iter().map(depth).collect()
    }

    /// `[pending, drafts…]` per row, `[B, 1 + W]`.
    fn verify_ids(&self, pending: &[i32], draft: Option<&Draft>) -> Result<Tensor> {
        let pending = Tensor::from_slice(pending, &[pending.len() as i32, 1])?;
        let Some(ids) = draft.and_then(|draft| draft.ids.as_ref()) else {
            return Ok(pending);
        };
        // Not yet read, so possibly outside the vocabulary: forced inside here, refused after.
        let limit = |value: i32| Tensor::from_slice(&[value], &[1, 1]);
        let last = limit(self.model().facts().vocab_size - 1)?;
        let ids = ids
            .binary(BinaryOp::MAX, &limit(0)?)?
            .binary(BinaryOp::MIN, &last)?;
        Tensor::concat(&[&pending, &ids], 1)
    }

    /// Tells the drafter what was kept: `[pending, tokens…]` per row, without the new pending one.
    fn commit(
        &mut self,
        pending: &[i32],
        verdicts: &[Verdict],
        kept: &[i32],
        taps: &[Tensor],
        drafted: bool,
    ) {
        let mut tokens = Vec::with_capacity(kept.len());
        let mut next = Vec::with_capacity(kept.len());
        let mut accepted = Vec::with_capacity(kept.len());
        for ((&pending, verdict), &kept) in pending.iter().zip(verdicts).zip(kept) {
            let kept = kept as usize;
            let mut row = vec![pending];
            row.extend(&verdict.tokens[..kept - 1]);
            tokens.push(row);
            next.push(verdict.tokens[kept - 1]);
            accepted.push(kept as u32 - 1);
        }
        let tokens: Vec<&[i32]> = tokens.iter().map(Vec::as_slice).collect();
        let progress = Progress {
            tokens: &tokens,
            next: &next,
            accepted: &accepted,
            taps,
        };
        self.drafting.commit(&progress, drafted);
    }
}

/// What the target lends a drafter; none if it lacks some of it.
fn donors(kinds: &[DonorKind], model: &Model, caches: &[LayerCache]) -> Option<Vec<Donor>> {
    let donor = |kind: &DonorKind| model.donor(*kind, caches);
    kinds.iter().map(donor).collect()
}

/// The longest prefix in which the target draws what was drafted, and the draw after it.
fn verify(proposed: &[i32], drawn: &[i32]) -> Verdict {
    let accepted = proposed
        .iter()
        .zip(drawn)
        .take_while(|(proposed, drawn)| proposed == drawn)
        .count();
    Verdict {
        tokens: drawn[..=accepted].to_vec(),
        accepted,
    }
}

/// Token ids, one list per row.
type Lists = Vec<Vec<i32>>;

/// Drafts and draws, in one transfer, as lists per row.
fn read_back(draft: Option<Draft>, drawn: &Tensor) -> Result<(Lists, Lists)> {
    let [rows, width] = drawn.dims()?;
    let split = |flat: &[i32], width: usize| -> Lists {
        match width {
            0 => vec![Vec::new(); rows as usize],
            _ => flat.chunks(width).map(<[i32]>::to_vec).collect(),
        }
    };
    let Some(ids) = draft.and_then(|draft| draft.ids) else {
        return Ok((split(&[], 0), split(&drawn.to_vec()?, width as usize)));
    };
    debug_assert_eq!(ids.dtype(), DType::I32);
    let both = Tensor::concat(&[&ids, drawn], 1)?.to_vec::<i32>()?;
    let both = split(&both, (2 * width - 1) as usize);
    Ok(both
        .iter()
        .map(|row| {
            let (ids, drawn) = row.split_at(width as usize - 1);
            (ids.to_vec(), drawn.to_vec())
        })
        .unzip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_the_longest_agreeing_prefix_and_one_more() {
        let tokens = |proposed: &[i32], drawn: &[i32]| {
            let verdict = verify(proposed, drawn);
            (verdict.tokens, verdict.accepted)
        };
        assert_eq!(tokens(&[1, 2, 3], &[1, 2, 9, 4]), (vec![1, 2, 9], 2));
        assert_eq!(tokens(&[1, 2], &[1, 2, 7]), (vec![1, 2, 7], 2));
        assert_eq!(tokens(&[5], &[6, 7]), (vec![6], 0));
        assert_eq!(tokens(&[], &[6]), (vec![6], 0));
    }
}
