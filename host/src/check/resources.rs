//! Tests of what a drafter takes and leaves: threads, memory, time.

use std::time::{Duration, Instant};

use plugin_api::Tensor;
use plugin_api::layers::Step;

use super::moving::life;
use super::report::{Broken, Finding, Outcome};
use super::stage::{Row, Stage};
use super::subject::Subject;
use crate::model::TargetHandle;

/// Rounds in which nothing may add up, and those after which it is looked at for the first time.
const ROUNDS: usize = 2000;
const WARM: usize = 200;
/// Rounds of a group.
const LIFE: usize = 50;
/// Rounds of a single row, with drafts that are refused and without.
const LONG: usize = 300;
/// The depth of their drafts.
const DEPTH: u32 = 2;

/// Bytes of tensors that may be there after thousands of rounds and were not before.
const SLACK: u64 = 64 << 10;
/// Of the memory of the process: the system's allocator keeps some of what it was given back.
const RESIDENT_SLACK: u64 = 32 << 20;

/// A draft that takes as long as so many steps of the target can't pay.
const SLOW: f64 = 50.0;

pub(super) fn threads(subject: &Subject) -> Outcome {
    let target = subject.target()?;
    warm(&target)?;
    let Some(without) = count_threads() else {
        return Ok(Finding::Skipped(
            "threads are counted on Linux only".to_owned(),
        ));
    };
    let live = |seed| -> Result<(), Broken> {
        let stage = subject.stage_on(target.clone())?;
        Ok(life(&stage, seed)?)
    };
    live(1)?;
    let first = settled(without);
    live(2)?;
    live(3)?;
    let last = settled(first);
    if last > first {
        return Err(Broken(format!(
            "{} threads more stay after three drafters came and went than after one",
            last - first
        )));
    }
    Ok(match first.saturating_sub(without) {
        0 => Finding::Passed("no thread stays when a drafter is gone".to_owned()),
        more => Finding::Warning(format!(
            "{more} threads stay when a drafter is gone, however many there were"
        )),
    })
}

/// What the host's own threads for kernels are called; how many there are depends on what is computed.
const OURS: &str = "kernel-";

/// Lets the target compute, so that all threads which that takes are there.
fn warm(target: &TargetHandle) -> plugin_api::Result<()> {
    let model = target.model();
    let mut caches = model.new_caches();
    let step = Step::new(&[0], &[8], 8, false)?;
    let ids = Tensor::from_slice(&[1; 8], &[1, 8])?;
    let pass = model.forward(&ids, &step, &mut caches, &[])?;
    model.logits(&pass.hidden)?.argmax(-1)?.eval()
}

/// The threads of this process that are not the host's kernels'; Linux only.
fn count_threads() -> Option<usize> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    let names = tasks.filter_map(name);
    Some(names.filter(|name| !name.starts_with(OURS)).count())
}

/// The number of threads, once it is no more than `wanted` or stays: those that were told to end take a moment.
fn settled(wanted: usize) -> usize {
    let mut least = count_threads().unwrap_or(wanted);
    for _ in 0..50 {
        if least <= wanted {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        least = least.min(count_threads().unwrap_or(wanted));
    }
    least
}

/// Bytes of the process that are in memory and its own; Linux only.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

pub(super) fn memory(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let long = affordable(subject, &stage)?;
    let told = growth(&stage, 0, long)?;
    let drafted = growth(&stage, DEPTH, long)?;
    // A buffer may have to grow a step earlier: drafts are written beyond the text.
    if drafted > 2 * told + 8 * SLACK {
        return Err(Broken(format!(
            "a row grows by {drafted} bytes in {long} rounds whose drafts are refused, by {told} without drafts"
        )));
    }
    let mut rounds = 0;
    let mut first = None;
    while rounds < ROUNDS && (rounds <= WARM || subject.has_time()) {
        come_and_go(&stage)?;
        rounds += LIFE;
        if rounds == WARM {
            first = Some((plugin_api::memory_used(), resident()));
        }
    }
    let (tensors, process) = first.unwrap_or((plugin_api::memory_used(), resident()));
    let grown = plugin_api::memory_used().saturating_sub(tensors);
    if grown > SLACK {
        return Err(Broken(format!(
            "{grown} bytes of tensors more after {rounds} rounds than after {WARM}, and nobody holds a group"
        )));
    }
    let process = resident().zip(process);
    let process = process.map_or(0, |(now, then)| now.saturating_sub(then));
    if process > RESIDENT_SLACK {
        return Err(Broken(format!(
            "the process is {} MiB larger after {rounds} rounds than after {WARM}",
            process >> 20
        )));
    }
    Ok(Finding::Passed(format!(
        "{grown} bytes more after {rounds} rounds than after {WARM}; a row grows by {drafted} bytes in {long} rounds"
    )))
}

/// A group lives, and is gone.
fn come_and_go(stage: &Stage) -> plugin_api::Result<()> {
    let depth = DEPTH.min(stage.depth());
    let rows = [12, 20].map(|len| Row::new(len as u64, len, stage.vocab()));
    let mut group = stage.open(rows.to_vec())?;
    group.remembers = false;
    group.finish_prompts()?;
    const TOGETHER: usize = LIFE / 5;
    for round in 0..TOGETHER {
        group.round(&[depth, 1], &[round % 3, round % 2])?;
    }
    group.filter(&[1])?;
    for round in 0..LIFE - TOGETHER {
        group.round(&[depth], &[round % 3])?;
    }
    Ok(())
}

/// Rounds of a long row, fewer where the target is slow.
fn affordable(subject: &Subject, stage: &Stage) -> plugin_api::Result<usize> {
    const TRIED: usize = 5;
    let begun = Instant::now();
    growth(stage, DEPTH, TRIED)?;
    let round = begun.elapsed() / TRIED as u32;
    // Two such rows, and as much again for those that come and go.
    let left = subject.until.saturating_duration_since(Instant::now()) / 4;
    let count = left.as_secs_f64() / round.as_secs_f64().max(1e-6);
    Ok((count as usize).clamp(TRIED, LONG))
}

/// What a row's memory grows by, the target's included, in so many rounds of one token.
fn growth(stage: &Stage, depth: u32, rounds: usize) -> plugin_api::Result<u64> {
    let depth = depth.min(stage.depth());
    let mut group = stage.open(vec![Row::new(9, 16, stage.vocab())])?;
    group.remembers = false;
    group.finish_prompts()?;
    group.round(&[stage.depth()], &[0])?;
    let before = plugin_api::memory_used();
    for _ in 0..rounds {
        match depth {
            0 => group.plain(1)?,
            depth => {
                group.round(&[depth], &[0])?;
            }
        }
    }
    Ok(plugin_api::memory_used().saturating_sub(before))
}

pub(super) fn speed(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let depth = stage.drafter.default_depth();
    let mut group = stage.begun(90, 1)?;
    group.remembers = false;
    let (mut draft, mut step, mut tokens) = (Duration::ZERO, Duration::ZERO, 0);
    const TRIED: u32 = 20;
    for round in 0..TRIED + 2 {
        let begun = Instant::now();
        let drafts = group.draft(&[depth])?;
        let drafted = begun.elapsed();
        group.commit(&drafts, &[1])?;
        let begun = Instant::now();
        group.plain(1)?;
        // The first ones read weights and find memory.
        if round >= 2 {
            draft += drafted;
            step += begun.elapsed();
            tokens += drafts[0].len();
        }
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3 / f64::from(TRIED);
    let (draft, step) = (ms(draft), ms(step));
    let text = format!(
        "a draft of {:.1} tokens takes {draft:.2} ms, a plain step {step:.2} ms",
        tokens as f64 / f64::from(TRIED)
    );
    Ok(match draft > SLOW * step {
        true => Finding::Warning(text),
        false => Finding::Passed(text),
    })
}
