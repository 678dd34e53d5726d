//! `mlxhost bench`: how fast a model runs on this machine.

use std::sync::Arc;
use std::time::Instant;

use mlxhost::backend;
use mlxhost::checkpoint::Checkpoint;
use mlxhost::kernels::pool;
use mlxhost::model::Model;
use plugin_api::Tensor;
use plugin_api::layers::{LayerCache, Step};
use serde_json::{Map, Value, json};

use super::args::BenchArgs;
use super::error::CliError;
use super::output;

/// Tokens in the cache when decoding starts, and below the passes that are timed.
const PROMPT: usize = 64;
/// Prompt lengths.
const PREFILL: [usize; 3] = [64, 512, 2048];
/// Columns of timed passes.
const WIDTHS: [usize; 5] = [1, 2, 4, 8, 16];
/// Prompt tokens per pass, as the engine takes them.
const CHUNK: usize = 256;
/// Passes of a width that are timed.
const REPEATS: usize = 9;

/// One sequence.
struct Sequence<'a> {
    model: &'a Model,
    caches: Vec<LayerCache>,
    len: usize,
}

impl<'a> Sequence<'a> {
    fn new(model: &'a Model, expected: usize) -> Self {
        let mut caches = model.new_caches();
        caches.iter_mut().for_each(|cache| cache.expect(expected));
        Self {
            model,
            caches,
            len: 0,
        }
    }

    /// Processes some tokens in one pass, and draws a token after each of the last `drawn`.
    fn pass(&mut self, tokens: &[i32], drawn: usize) -> Result<Vec<i32>, CliError> {
        let width = tokens.len() as i32;
        let speculative = drawn > 1;
        let step = Step::new(&[self.len as i32], &[width], width, speculative)?;
        let ids = Tensor::from_slice(tokens, &[1, width])?;
        let pass = self.model.forward(&ids, &step, &mut self.caches, &[])?;
        let last = pass.hidden.slice(1, width - drawn as i32, width)?;
        let ids = self.model.logits(&last)?.argmax(-1)?.to_vec::<i32>()?;
        if !speculative {
            self.len += tokens.len();
        }
        Ok(ids)
    }

    /// Processes a prompt.
    fn prefill(&mut self, tokens: &[i32]) -> Result<i32, CliError> {
        let mut last = 0;
        for chunk in tokens.chunks(CHUNK) {
            last = self.pass(chunk, 1)?[0];
            let state: Vec<&Tensor> = self.caches.iter().flat_map(LayerCache::tensors).collect();
            Tensor::eval_all(&state)?;
        }
        Ok(last)
    }
}

/// Measures and prints.
pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    args.compute.apply();
    let begun = Instant::now();
    backend::install();
    let model = Model::load(Arc::new(Checkpoint::open(&args.model)?), None)?;
    let load = begun.elapsed().as_secs_f64();
    let vocab = model.facts().vocab_size;
    // What the tokens are makes no difference.
    let tokens: Vec<i32> = (0..PREFILL[2] as i32)
        .map(|i| (i * 7919 + 1) % vocab)
        .collect();
    Sequence::new(&model, 8).prefill(&tokens[..8])?;

    let mut prefill = Map::new();
    for length in PREFILL {
        let begun = Instant::now();
        Sequence::new(&model, length).prefill(&tokens[..length])?;
        let speed = length as f64 / begun.elapsed().as_secs_f64();
        prefill.insert(length.to_string(), json!(speed));
    }

    let mut sequence = Sequence::new(&model, PROMPT + usize::from(args.tokens));
    let mut next = sequence.prefill(&tokens[..PROMPT])?;
    let begun = Instant::now();
    for _ in 0..args.tokens {
        next = sequence.pass(&[next], 1)?[0];
    }
    let decode = args.tokens as f64 / begun.elapsed().as_secs_f64();

    let mut times: Vec<Vec<f64>> = vec![Vec::new(); WIDTHS.len()];
    let mut sequence = Sequence::new(&model, PROMPT + WIDTHS[WIDTHS.len() - 1]);
    sequence.prefill(&tokens[..PROMPT])?;
    for _ in 0..REPEATS {
        for (times, width) in times.iter_mut().zip(WIDTHS) {
            let begun = Instant::now();
            sequence.pass(&tokens[..width], width)?;
            times.push(1e3 * begun.elapsed().as_secs_f64());
            // Nothing is kept, so that all passes begin at the same place.
            if width > 1 {
                for cache in &mut sequence.caches {
                    cache.resolve(&[1])?;
                }
            }
            sequence.len = PROMPT;
        }
    }
    let mut passes = Map::new();
    for (mut times, width) in times.into_iter().zip(WIDTHS) {
        times.sort_by(f64::total_cmp);
        passes.insert(width.to_string(), json!(times[times.len() / 2]));
    }

    let report = json!({
        "load_s": load,
        "prefill": prefill,
        "decode": decode,
        "pass_ms": passes,
        "peak_bytes": peak_bytes(),
        "weight_bytes": model.weight_bytes(),
        "threads": pool::threads(),
    });
    let text = if args.json {
        format!("{report}\n")
    } else {
        table(&report)
    };
    output::write(&text)
}

/// For people.
fn table(report: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut text = format!("load      {:8.2} s\n", number(&report["load_s"]));
    for length in PREFILL {
        let speed = number(&report["prefill"][length.to_string()]);
        text += &format!("prefill   {speed:8.1} tokens/s, {length} tokens\n");
    }
    text += &format!("decode    {:8.1} tokens/s\n", number(&report["decode"]));
    for width in WIDTHS {
        let time = number(&report["pass_ms"][width.to_string()]);
        text += &format!("pass      {time:8.2} ms, {width} tokens\n");
    }
    if let Some(bytes) = report["peak_bytes"].as_f64() {
        text += &format!("peak      {:8.0} MiB\n", bytes / 1_048_576.0);
    }
    text
}

/// The most memory that the process ever had, where the system tells.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024)
}
