//! Why a drafter is seldom right: what can be found out from the host's side.

use half::{bf16, f16};
use plugin_api::{Result, Tap};

use super::report::{Finding, Outcome};
use super::stage::{Row, Stage};
use super::subject::Subject;
use crate::backend;
use crate::checkpoint::{Checkpoint, DType, TensorData};
use crate::drafter::{Kind, describe};
use crate::text::Tokenizer;

/// Prompts that are continued, and rounds of each.
const PROMPTS: u64 = 4;
const ROUNDS: usize = 16;

/// A smaller share of accepted tokens is called few.
const FEW: f64 = 0.1;

/// Names in a message.
const MOST_NAMES: usize = 3;

pub(super) fn acceptance(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let rows = rows(subject, &stage);
    let usual = Count::of(&stage, &rows)?;
    let mut notes = Vec::new();
    if usual.drafted == 0 {
        notes.push("it drafted nothing for these prompts".to_owned());
    } else if usual.share() < FEW {
        notes.push(format!("few: {usual}"));
        other_hidden(&stage, &rows, &usual, &mut notes)?;
    }
    if let Some(checkpoint) = subject.drafter_checkpoint()? {
        norms(&checkpoint, &mut notes)?;
        odd_tensors(&checkpoint, &mut notes);
        if usual.share() < FEW {
            vocabularies(subject, &checkpoint, &mut notes);
        }
    }
    if usual.share() >= FEW && !notes.is_empty() {
        notes.insert(0, usual.to_string());
    }
    Ok(Finding::noting(notes, usual.to_string()))
}

/// What the target continues: texts, or tokens at random where it has no tokenizer.
fn rows(subject: &Subject, stage: &Stage) -> Vec<Row> {
    let vocab = stage.vocab();
    if subject.prompts.is_empty() {
        let row = |seed| Row::new(500 + seed, 24, vocab);
        return (0..PROMPTS).map(row).collect();
    }
    let prompts = subject.prompts.iter();
    prompts.map(|prompt| Row::prompted(prompt, vocab)).collect()
}

/// Drafted tokens, and those that the target says itself.
struct Count {
    drafted: usize,
    accepted: usize,
    rounds: usize,
}

impl Count {
    /// Lets the target answer greedily, with drafts.
    fn of(stage: &Stage, rows: &[Row]) -> Result<Self> {
        let depth = stage.drafter.default_depth();
        let mut count = Self {
            drafted: 0,
            accepted: 0,
            rounds: 0,
        };
        for row in rows {
            let mut group = stage.open(vec![row.clone()])?;
            group.remembers = false;
            group.finish_prompts()?;
            // Away from the prompt, whose tokens nobody would say.
            for _ in 0..4 {
                group.verify(&[Vec::new()])?;
            }
            for _ in 0..ROUNDS {
                let drafts = group.draft(&[depth])?;
                count.drafted += drafts[0].len();
                count.accepted += group.verify(&drafts)?[0];
                count.rounds += 1;
            }
        }
        Ok(count)
    }

    fn share(&self) -> f64 {
        self.accepted as f64 / self.drafted.max(1) as f64
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} of {} drafted tokens accepted ({:.0}%), {:.2} tokens per pass",
            self.accepted,
            self.drafted,
            100.0 * self.share(),
            1.0 + self.accepted as f64 / self.rounds.max(1) as f64
        )
    }
}

/// Gives the drafter the hidden from the other side of the final norm.
fn other_hidden(stage: &Stage, rows: &[Row], usual: &Count, notes: &mut Vec<String>) -> Result<()> {
    let swapped = stage.taps.iter().map(|&tap| match tap {
        Tap::FINAL => Tap::PRE_NORM,
        Tap::PRE_NORM => Tap::FINAL,
        other => other,
    });
    let swapped: Vec<Tap> = swapped.collect();
    if swapped == stage.taps {
        return Ok(());
    }
    let wants_final = stage.taps.contains(&Tap::FINAL);
    let other = Stage {
        target: stage.target.clone(),
        drafter: stage.drafter.clone(),
        taps: swapped,
        _finish: backend::Finish,
    };
    let other = Count::of(&other, rows)?;
    if other.share() > FEW && other.share() > 2.0 * usual.share() {
        let side = if wants_final { "before" } else { "after" };
        notes.push(format!(
            "with the target's hidden from {side} its final norm it is better ({:.0}%): it was trained on that",
            100.0 * other.share()
        ));
    }
    Ok(())
}

/// Looks at how the weights of norms are stored: as they are used, they are near one.
fn norms(
    checkpoint: &Checkpoint,
    notes: &mut Vec<String>,
) -> std::result::Result<(), super::report::Broken> {
    // Inside a full checkpoint they are stored minus one, which its plugin knows.
    let kind = describe(checkpoint)?.map(|found| found.kind);
    if kind == Some(Kind::QwenMtpInside) {
        return Ok(());
    }
    let is_norm = |name: &&str| name.contains("norm") && name.ends_with("weight");
    let means = checkpoint.names().filter(is_norm).filter_map(|name| {
        let tensor = checkpoint.tensor(name)?.ok()?;
        let values = floats(&tensor).filter(|_| tensor.shape.len() == 1)?;
        Some(values.iter().sum::<f32>() / values.len().max(1) as f32)
    });
    let means: Vec<f32> = means.collect();
    if means.is_empty() {
        return Ok(());
    }
    let mean = means.iter().sum::<f32>() / means.len() as f32;
    if mean.abs() < 0.3 {
        notes.push(format!(
            "its norms are {mean:.2} on average, as where they are stored minus one: one was not added"
        ));
    } else if (1.7..2.5).contains(&mean) {
        notes.push(format!(
            "its norms are {mean:.2} on average, as where one was added twice"
        ));
    }
    Ok(())
}

/// Finds tensors that nothing was ever written to, or nonsense.
fn odd_tensors(checkpoint: &Checkpoint, notes: &mut Vec<String>) {
    let (mut constant, mut broken) = (Vec::new(), Vec::new());
    for name in checkpoint.names() {
        let Some(Ok(tensor)) = checkpoint.tensor(name) else {
            continue;
        };
        let Some(values) = floats(&tensor) else {
            continue;
        };
        if values.iter().any(|value| !value.is_finite()) {
            broken.push(name);
        } else if tensor.shape.len() > 1
            && values.len() > 1
            && values.iter().all(|value| *value == values[0])
            && !name.ends_with("biases")
        {
            constant.push(name);
        }
    }
    let list = |names: &[&str]| {
        let more = names.len().saturating_sub(MOST_NAMES);
        let shown = names[..names.len().min(MOST_NAMES)].join(", ");
        match more {
            0 => shown,
            more => format!("{shown} and {more} more"),
        }
    };
    if !constant.is_empty() {
        notes.push(format!(
            "all numbers are equal, as where none were stored, in {}",
            list(&constant)
        ));
    }
    if !broken.is_empty() {
        notes.push(format!(
            "there are numbers that are none in {}",
            list(&broken)
        ));
    }
}

/// The elements of a tensor, if they are floating point.
fn floats(tensor: &TensorData) -> Option<Vec<f32>> {
    let bytes = tensor.to_vec();
    let halves = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    Some(match tensor.dtype {
        DType::F32 => {
            let words = bytes.chunks_exact(4);
            words
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect()
        }
        DType::F16 => halves().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        DType::BF16 => halves().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        _ => return None,
    })
}

/// Compares token tables; without both there is nothing that would have refused the pair.
fn vocabularies(subject: &Subject, checkpoint: &Checkpoint, notes: &mut Vec<String>) {
    let own = Tokenizer::from_dir(checkpoint.path()).map(|tokenizer| tokenizer.table_digest());
    match (own, &subject.vocabulary) {
        (Ok(own), Some(theirs)) if own != *theirs => {
            notes.push("its token table is not the target's".to_owned());
        }
        (Ok(_), Some(_)) => {}
        (Err(_), _) => notes.push(format!(
            "{} has no tokenizer.json: whether its tokens are the target's, nothing says",
            checkpoint.path().display()
        )),
        (_, None) => notes.push(format!(
            "{} has no tokenizer: whether its tokens are the drafter's, nothing says",
            subject.target_path().display()
        )),
    }
}
