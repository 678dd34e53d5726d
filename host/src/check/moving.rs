//! Tests of rows that leave, join and go on elsewhere.

use plugin_api::abi::FaultCode;

use super::report::{Finding, Outcome};
use super::stage::{Kept, Row, Stage};
use super::subject::Subject;

/// A whole life: every slot is called, most of them twice.
pub(super) fn life(stage: &Stage, seed: u64) -> plugin_api::Result<()> {
    let depth = stage.depth();
    let mut group = stage.begun(seed, 3)?;
    group.round(&[depth, depth, depth], &[1, 0, 2])?;
    group.plain(2)?;
    group.filter(&[0, 2])?;
    group.round(&[depth, 1], &[0, 1])?;
    let kept = group.capture(1)?;
    let mut more = match &kept {
        Some(kept) => stage.restored(kept)?,
        None => stage.begun(seed + 1, 1)?,
    };
    more.round(&[depth], &[1])?;
    group.append(more)?;
    group.round(&[depth, depth, depth], &[2, 0, 1])?;
    group.filter(&[1])?;
    group.round(&[depth], &[0])?;
    Ok(())
}

pub(super) fn slots(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    life(&stage, 1)?;
    life(&stage, 2)?;
    Ok(Finding::Passed(
        "load, info, pair and open; prefill, draft, commit, filter_rows, append, capture, restore, row_count and drop"
            .to_owned(),
    ))
}

/// A life in which the plugin had every occasion to print; who supervises has what it printed.
pub(super) fn output(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    life(&stage, 1)?;
    Ok(Finding::Passed("nothing printed".to_owned()))
}

pub(super) fn leaving(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.depth();
    let lens = [14, 6, 23, 9, 11, 17];
    let rows = lens.map(|len| Row::new(40 + len as u64, len, stage.vocab()));
    let mut group = stage.open(rows.to_vec())?;
    group.filter(&[0, 1, 2, 4, 5])?;
    group.prefill(&[5; 5])?;
    group.filter(&[0, 2, 3, 4])?;
    group.finish_prompts()?;
    // All stay: nothing may change.
    group.filter(&[0, 1, 2, 3])?;
    group.filter(&[1, 2, 3])?;
    group.round(&[depth; 3], &[0, 2, 1])?;
    group.filter(&[0, 2])?;
    group.round(&[depth; 2], &[1, 0])?;
    group.plain(3)?;
    group.filter(&[1])?;
    group.round(&[depth], &[2])?;
    group.round(&[depth], &[0])?;
    stage.each_alone(&group)?;
    Ok(Finding::Passed("six rows became one".to_owned()))
}

pub(super) fn joining(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.depth();
    let mut group = stage.begun(60, 2)?;
    // Before its first round, in the middle, and one that comes after many rounds.
    group.append(stage.begun(61, 1)?)?;
    group.round(&[depth; 3], &[0, 1, 2])?;
    let mut other = stage.begun(62, 2)?;
    other.round(&[depth; 2], &[2, 0])?;
    other.plain(4)?;
    group.append(other)?;
    group.round(&[depth; 5], &[1, 0, 2, 0, 1])?;
    group.filter(&[0, 2, 4])?;
    let mut old = stage.begun(63, 1)?;
    for round in 0..6 {
        old.round(&[depth], &[round % 3])?;
    }
    group.append(old)?;
    group.round(&[depth; 4], &[0, 3, 1, 0])?;
    group.round(&[depth; 4], &[1, 0, 0, 2])?;
    stage.each_alone(&group)?;
    let odd = odd_join(&stage)?;
    Ok(Finding::Passed(format!(
        "three joins, four rows at the end; rows without a prompt are {odd}"
    )))
}

/// Rows that nothing was told yet join rows that draft. Whoever refuses that must be as before.
fn odd_join(stage: &Stage) -> plugin_api::Result<&'static str> {
    let depth = stage.depth();
    let mut group = stage.begun(64, 2)?;
    group.round(&[depth; 2], &[1, 0])?;
    let fresh = stage.open(vec![Row::new(65, 8, stage.vocab())])?;
    match group.rows().append(fresh.into_rows()) {
        Ok(()) => Ok("taken in"),
        Err(error) if error.code() == FaultCode::PANICKED => {
            Err(error.context("append of rows without a prompt"))
        }
        Err(_) => {
            group.round(&[depth; 2], &[0, 2])?;
            group.round(&[depth; 2], &[1, 1])?;
            stage.each_alone(&group)?;
            Ok("refused, and nothing changes")
        }
    }
}

pub(super) fn resuming(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.depth();
    let rows = [21, 12].map(|len| Row::new(70 + len as u64, len, stage.vocab()));
    let mut group = stage.open(rows.to_vec())?;
    let mut kept: Vec<Option<Kept>> = Vec::new();
    // In the prompt, after it, and after rounds of every kind.
    group.prefill(&[8, 8])?;
    kept.push(group.capture(0)?);
    group.finish_prompts()?;
    kept.push(group.capture(0)?);
    for round in 0..3 {
        group.round(&[depth; 2], &[round, 1])?;
        kept.push(group.capture(0)?);
        group.plain(2)?;
        kept.push(group.capture(0)?);
    }
    group.filter(&[0])?;
    kept.push(group.capture(0)?);
    group.round(&[depth], &[1])?;
    group.round(&[depth], &[0])?;
    let states: Vec<&Kept> = kept.iter().flatten().collect();
    if states.len() < kept.len() {
        return Ok(Finding::Warning(
            "it wants hiddens and captures nothing: no row of it, or of its target, is ever resumed"
                .to_owned(),
        ));
    }
    for state in &states {
        stage.alone(&group.told[0], Some(state))?;
        // Together with others, too.
        let mut more = stage.restored(state)?;
        while !more.is_ready() {
            more.finish_prompts()?;
        }
        let mut host = stage.begun(80, 1)?;
        host.append(more)?;
        host.round(&[depth; 2], &[1, 1])?;
        stage.each_alone(&host)?;
    }
    let how = match states.iter().all(|state| state.draft.is_some()) {
        true => "captured",
        false => "by its tokens alone",
    };
    Ok(Finding::Passed(format!("{} states, {how}", states.len())))
}
