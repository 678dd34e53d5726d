//! Tests of drafts and of what follows them.

use plugin_api::sampling::Sampling;

use super::group::Group;
use super::report::{Broken, Finding, Outcome};
use super::stage::{Event, Random, Row, Stage};
use super::subject::Subject;

/// Rounds for each thing to try.
const ROUNDS: usize = 3;

/// Tokens that were drafted for the rows of a group.
fn drafted(group: &Group<'_>) -> usize {
    let events = group.told.iter().flat_map(|row| &row.events);
    events
        .map(|event| match event {
            Event::Drafted { ids, .. } => ids.len(),
            Event::Told { .. } => 0,
        })
        .sum()
}

/// Passed, or a warning where nothing was drafted: then nothing was seen.
fn seen(count: usize, what: String) -> Outcome {
    Ok(match count {
        0 => Finding::Warning(format!("{what}, but it drafted nothing here")),
        count => Finding::Passed(format!("{what}; {count} drafted tokens")),
    })
}

pub(super) fn depths(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let most = stage.drafter.max_depth();
    let mut group = stage.begun(2, 2)?;
    let mut tried = 0;
    // The largest first: it is what a plugin claims.
    for depth in (1..=most.min(32)).rev().chain([most]) {
        if tried > 0 && !subject.has_time() {
            break;
        }
        group.round(&[depth, depth.min(2)], &[depth as usize, 0])?;
        tried += 1;
    }
    let count = drafted(&group);
    seen(count, format!("{tried} depths, the largest {most}"))
}

pub(super) fn accepted(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.depth();
    let mut count = 0;
    for rows in [1, 3] {
        let mut group = stage.begun(3, rows)?;
        for round in 0..ROUNDS * (depth as usize + 1) {
            let accept: Vec<usize> = (0..rows)
                .map(|row| (round + 2 * row) % (depth as usize + 1))
                .collect();
            group.round(&vec![depth; rows], &accept)?;
        }
        stage.each_alone(&group)?;
        count += drafted(&group);
    }
    seen(
        count,
        format!("0 to {depth} accepted, for one row and for three"),
    )
}

pub(super) fn skipped(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.depth();
    let mut group = stage.begun(4, 2)?;
    for round in 0..ROUNDS {
        group.plain(1)?;
        group.plain(5)?;
        group.round(&[depth, depth], &[round, 1])?;
        // Nobody wants a draft: asked all the same.
        group.round(&[0, 0], &[0, 0])?;
        group.plain(2)?;
        group.round(&[depth, depth], &[usize::MAX, 0])?;
    }
    stage.each_alone(&group)?;
    let count = drafted(&group);
    seen(count, "one, two and five rounds without a draft".to_owned())
}

pub(super) fn idle_rows(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.depth();
    // Prompts of different lengths, in pieces: those that end first have no news.
    let rows = [3, 20, 9].map(|len| Row::new(len as u64, len, stage.vocab()));
    let mut group = stage.open(rows.to_vec())?;
    while !group.is_ready() {
        group.prefill(&[8, 4, 5])?;
    }
    for round in 0..2 * ROUNDS {
        let depths = match round % 3 {
            0 => [depth, 0, 1],
            1 => [0, depth, 0],
            _ => [1, 1, depth],
        };
        group.round(&depths, &[round % 2, usize::MAX, round % 4])?;
    }
    stage.each_alone(&group)?;
    let count = drafted(&group);
    seen(
        count,
        "no draft and no news for some of three rows".to_owned(),
    )
}

pub(super) fn neighbours(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.depth();
    let mut random = Random(5);
    let mut count = 0;
    for rows in [2, 5] {
        let mut group = stage.begun(rows as u64, rows)?;
        for _ in 0..2 * ROUNDS {
            let depths: Vec<u32> = (0..rows)
                .map(|_| random.below(depth as usize + 1) as u32)
                .collect();
            let accept: Vec<usize> = (0..rows).map(|_| random.below(4)).collect();
            group.round(&depths, &accept)?;
        }
        stage.each_alone(&group)?;
        count += drafted(&group);
    }
    seen(
        count,
        "rows of two groups draft alone as together".to_owned(),
    )
}

pub(super) fn repeatable(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let other = subject.stage_on(stage.target.clone())?;
    let sampled = Sampling {
        temperature: 0.9,
        top_p: 0.95,
        top_k: 40,
        seed: 7,
        ..Sampling::default()
    };
    let mut count = 0;
    for sampling in [Sampling::default(), sampled] {
        let first = story(&stage, sampling)?;
        for (whose, stage) in [("same", &stage), ("other", &other)] {
            let again = story(stage, sampling)?;
            if first != again {
                return Err(Broken(format!(
                    "the {whose} drafter, told the same again (temperature {}), drafts {}",
                    sampling.temperature,
                    difference(&first, &again)
                )));
            }
        }
        count += first.iter().map(Vec::len).sum::<usize>();
    }
    seen(
        count,
        "again, and by another drafter of the plugin".to_owned(),
    )
}

/// The drafts of one row's fixed life.
fn story(stage: &Stage, sampling: Sampling) -> Result<Vec<Vec<i32>>, Broken> {
    let row = Row::new(11, 12, stage.vocab()).sampled(sampling);
    let mut group = stage.open(vec![row])?;
    group.finish_prompts()?;
    let mut drafts = Vec::new();
    for accept in [0, 1, 2, 0, 5] {
        drafts.extend(group.round(&[stage.depth()], &[accept])?);
    }
    Ok(drafts)
}

fn difference(first: &[Vec<i32>], again: &[Vec<i32>]) -> String {
    let mut rounds = first.iter().zip(again);
    match rounds.find(|(first, again)| first != again) {
        Some((first, again)) => format!("{again:?} in place of {first:?}"),
        None => "another number of times".to_owned(),
    }
}
