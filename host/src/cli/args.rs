//! What the user can say.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, Subcommand};
use mlxhost::engine::{Limits, PLUGIN_TIMEOUT};
use mlxhost::kernels::{self, pool};
use mlxhost::prefix::PrefixConfig;

use super::check::CheckArgs;
use super::kv::KvArgs;
use super::new::{self, NewArgs};

const EXAMPLES: &str = "\
Examples:
  mlxhost --plugin plugins/qwen_mtp.so --prompt 'Why is the sky blue?' --stats
      The bundled model, drafted by the bundled head.
  mlxhost --plugin plugins/qwen_mtp.so --model qwen3.5-0.8b --drafter qwen3.5-0.8b-mtp
      Your own model and drafter; without a prompt this is a chat.
  git diff | mlxhost --model M --system 'Write a commit message.' --no-draft
      The prompt from standard input, decoded without drafts.
  mlxhost batch --input requests.jsonl --output answers.jsonl --plugin plugins/qwen_mtp.so
      Many requests, several at a time; an interrupted run goes on where it stopped.
  mlxhost plugins inspect plugins/ngram.so
      What a plugin is, without running it.
  mlxhost plugins check plugins/ngram.so
      Whether it keeps the rules, each tried in a process of its own.
  mlxhost plugins new my_drafter
      The crate of a drafter of your own, to begin with.
  mlxhost drafter split --from Qwen3.5-0.8B --out qwen3.5-0.8b-mtp --bits 4
      The drafter inside a full checkpoint, as a small directory of its own.

A model is a directory with config.json and safetensors, or a GGUF file. A plugin never changes what
the model says, only how fast.";

/// Runs language models, made faster by drafter plugins.
#[derive(Parser)]
#[command(name = "mlxhost", version, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(flatten)]
    pub generate: GenerateArgs,
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Subcommand)]
pub enum Command {
    /// Answer many requests from a file, several at a time.
    Batch(Box<BatchArgs>),
    /// Measure how fast a model runs on this machine, alone.
    Bench(BenchArgs),
    /// Write a model's logits and hidden states to a file, to compare with other engines.
    Eval(EvalArgs),
    /// Look at plugins, and begin new ones.
    Plugins(PluginsArgs),
    /// Look at drafters, and take them out of full checkpoints.
    Drafter(DrafterArgs),
}

#[derive(clap::Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub models: ModelArgs,

    /// The prompt [default: a chat on a terminal, else standard input].
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    pub prompt: Option<String>,
    /// The prompt as token ids: 1,2,3 or @FILE. No template is applied.
    #[arg(
        long,
        value_name = "IDS",
        conflicts_with_all = ["prompt", "raw"],
        help_heading = "Prompt"
    )]
    pub prompt_tokens: Option<String>,

    #[command(flatten)]
    pub answer: AnswerArgs,

    #[command(flatten)]
    pub prefix: PrefixArgs,

    /// Say afterwards what the answer took.
    #[arg(long, help_heading = "Output")]
    pub stats: bool,
    /// Colour the tokens that came from the drafter.
    #[arg(long, conflicts_with = "json", help_heading = "Output")]
    pub show_drafts: bool,
    /// Print one JSON object instead of text.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

impl GenerateArgs {
    /// What every answer is to be like, and the depth of its drafts.
    pub fn ask(&self) -> (&AnswerArgs, Option<u32>) {
        (&self.answer, self.models.depth)
    }
}

/// What is remembered of prompts and answers.
#[derive(clap::Args)]
pub struct PrefixArgs {
    /// Memory for the states of earlier prompts and answers, in MiB: a prompt that begins like one of them
    /// goes on from there [default: 512 in a chat, else 0].
    #[arg(long, value_name = "MIB", help_heading = "Remembering")]
    pub prefix_memory: Option<u32>,
    /// Keep such states in this directory, too, for later runs.
    #[arg(long, value_name = "DIR", help_heading = "Remembering")]
    pub prefix_dir: Option<PathBuf>,
    /// The most that the directory may hold, in MiB; what was used longest ago goes.
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 4096,
        requires = "prefix_dir",
        help_heading = "Remembering"
    )]
    pub prefix_dir_size: u32,
}

impl PrefixArgs {
    /// As the engine takes it, with so many MiB of memory unless the user says otherwise.
    pub fn config(&self, usual: u32) -> PrefixConfig {
        PrefixConfig {
            memory_bytes: u64::from(self.prefix_memory.unwrap_or(usual)) << 20,
            dir: self.prefix_dir.clone(),
            dir_bytes: u64::from(self.prefix_dir_size) << 20,
        }
    }
}

/// What computes.
#[derive(Clone, clap::Args)]
pub struct ModelArgs {
    #[command(flatten)]
    pub plugins: PluginPaths,

    /// The target model: a directory or a .gguf file [default: the bundled SmolLM2].
    #[arg(long, value_name = "PATH", help_heading = "Models")]
    pub model: Option<PathBuf>,
    /// The drafter's checkpoint [default: the one inside or bundled with the model]. Repeatable: the others
    /// are for the requests of a batch that name their plugin.
    #[arg(long, value_name = "DIR", help_heading = "Models")]
    pub drafter: Vec<PathBuf>,
    /// The plugin that drafts, by its name, where several could.
    #[arg(
        long,
        value_name = "NAME",
        conflicts_with = "no_draft",
        help_heading = "Models"
    )]
    pub drafter_plugin: Option<String>,
    /// An option of the (first) drafter; `plugins inspect` lists them. Repeatable.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value, help_heading = "Models")]
    pub drafter_option: Vec<(String, String)>,
    /// Draft this many tokens per round [default: chosen round by round, by what pays].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=256), help_heading = "Models")]
    pub depth: Option<u32>,
    /// End a draft before the first token that the drafter is less sure of than this, 0 to 1; for
    /// drafters with a confidence head [default: as the drafter says].
    #[arg(long, value_name = "P", value_parser = probability, help_heading = "Models")]
    pub min_confidence: Option<f32>,
    /// Decode without drafts.
    #[arg(long, help_heading = "Models")]
    pub no_draft: bool,
    /// When the file of the plugin that drafts changes, take the new build for the requests that come then.
    #[arg(long, conflicts_with = "no_draft", help_heading = "Models")]
    pub watch: bool,
    /// Give up on a plugin that has been in a call for so many seconds, reading weights aside; 0: never.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = PLUGIN_TIMEOUT.as_secs() as u32,
        help_heading = "Plugins"
    )]
    pub plugin_timeout: u32,

    #[command(flatten)]
    pub kv: KvArgs,
    #[command(flatten)]
    pub compute: Compute,
}

impl ModelArgs {
    /// What a call of a plugin may take; none: as long as it wants.
    pub fn plugin_timeout(&self) -> Option<Duration> {
        let seconds = u64::from(self.plugin_timeout);
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }
}

/// What an answer is to be like.
#[derive(clap::Args)]
pub struct AnswerArgs {
    /// Instructions before the conversation.
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    pub system: Option<String>,
    /// Continue the text as it is, without the model's chat template.
    #[arg(long, conflicts_with = "system", help_heading = "Prompt")]
    pub raw: bool,

    /// The most tokens to generate [default: as the model says, else 512].
    #[arg(long, value_name = "N", help_heading = "Answer")]
    pub max_tokens: Option<usize>,
    /// End the answer before this text. Repeatable.
    #[arg(long, value_name = "TEXT", help_heading = "Answer")]
    pub stop: Vec<String>,
    /// Go on after the model's end-of-text tokens.
    #[arg(long, help_heading = "Answer")]
    pub ignore_eos: bool,
    /// 0 always takes the likeliest token [default: as the model says, else 0].
    #[arg(
        long,
        value_name = "X",
        allow_negative_numbers = true,
        help_heading = "Answer"
    )]
    pub temperature: Option<f32>,
    /// Keep the likeliest tokens that hold this much probability.
    #[arg(
        long,
        value_name = "P",
        allow_negative_numbers = true,
        help_heading = "Answer"
    )]
    pub top_p: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    #[arg(
        long,
        value_name = "K",
        allow_negative_numbers = true,
        help_heading = "Answer"
    )]
    pub top_k: Option<u32>,
    /// Keep tokens at least this fraction as likely as the likeliest.
    #[arg(
        long,
        value_name = "P",
        allow_negative_numbers = true,
        help_heading = "Answer"
    )]
    pub min_p: Option<f32>,
    /// The same seed gives the same answer, with any drafter or none [default: random].
    #[arg(long, value_name = "N", help_heading = "Answer")]
    pub seed: Option<u64>,
}

/// Requests in a file.
#[derive(clap::Args)]
pub struct BatchArgs {
    #[command(flatten)]
    pub models: ModelArgs,

    /// Requests, one JSON object per line: `prompt`, `messages` or `prompt_tokens`; and, where they differ from
    /// the options here, `id`, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `seed`, `stop`, `depth`,
    /// `deadline` in seconds.
    #[arg(long, value_name = "FILE", help_heading = "Batch")]
    pub input: PathBuf,
    /// Answers, one JSON object per line, in the order in which they are complete. What is answered there
    /// already is not asked again: an interrupted run goes on where it stopped.
    #[arg(long, value_name = "FILE", help_heading = "Batch")]
    pub output: PathBuf,
    /// Requests that are worked on together.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Batch")]
    pub concurrency: u16,
    /// Memory that their caches may take together, in MiB [default: no limit].
    #[arg(long, value_name = "MIB", help_heading = "Batch")]
    pub cache_memory: Option<u32>,

    #[command(flatten)]
    pub answer: AnswerArgs,

    #[command(flatten)]
    pub prefix: PrefixArgs,
}

impl BatchArgs {
    /// What the engine may do at a time.
    pub fn limits(&self) -> Limits {
        Limits {
            rows: usize::from(self.concurrency),
            cache_bytes: self
                .cache_memory
                .map_or(u64::MAX, |mib| u64::from(mib) << 20),
        }
    }
}

/// How a CPU computes.
#[derive(Clone, clap::Args)]
pub struct Compute {
    /// Threads of the CPU kernels [default: as many as the machine has cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Computing")]
    pub threads: Option<u16>,
    /// Multiply packed weights with activations as they are, not rounded to 16 bits. Slower.
    #[arg(long, help_heading = "Computing")]
    pub exact: bool,
}

impl Compute {
    /// Holds for the process; before the first model is loaded.
    pub fn apply(&self) {
        if let Some(threads) = self.threads {
            pool::set_threads(usize::from(threads));
        }
        kernels::set_exact(self.exact);
    }
}

#[derive(clap::Args)]
pub struct EvalArgs {
    /// The model: a directory or a .gguf file.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Token ids: 1,2,3 or @FILE.
    #[arg(long, value_name = "IDS")]
    pub prompt_tokens: String,
    /// The safetensors file to write: `logits` [N, V] and one `tap.<id>` [N, H] per tap, f32.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Hidden states to write too: layer numbers, `embedding`, `pre_norm`, `final`.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub taps: Vec<String>,
    #[command(flatten)]
    pub kv: KvArgs,
    #[command(flatten)]
    pub compute: Compute,
}

#[derive(clap::Args)]
pub struct BenchArgs {
    /// The model: a directory or a .gguf file.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Tokens to decode.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..))]
    pub tokens: u16,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub compute: Compute,
}

#[derive(clap::Args)]
pub struct PluginsArgs {
    #[command(subcommand)]
    pub command: PluginsCommand,
}

#[derive(Subcommand)]
pub enum PluginsCommand {
    /// Write the crate of a new plugin, which builds and drafts as it is.
    #[command(after_help = new::HELP)]
    New(NewArgs),
    /// List the plugins that a run with these options would have.
    List {
        #[command(flatten)]
        paths: PluginPaths,
        /// Tell of every place that was searched, and what became of every file.
        #[arg(long)]
        explain: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Allow the plugins that a run with these options would have, as they are now, and no others: their
    /// SHA-256 digests go into a lock file. Deleting that file allows all again.
    Lock {
        #[command(flatten)]
        paths: PluginPaths,
    },
    /// Say what a plugin is and whether this host can load it, without running it.
    Inspect {
        /// The plugin's library.
        path: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run a plugin through all that a host may do with it, and judge what it does.
    Check(CheckArgs),
}

#[derive(clap::Args)]
pub struct DrafterArgs {
    #[command(subcommand)]
    pub command: DrafterCommand,
}

#[derive(Subcommand)]
pub enum DrafterCommand {
    /// Take the prediction head out of a full Qwen3.5 checkpoint, into a directory of its own.
    #[command(after_help = SPLIT_HELP)]
    Split(SplitArgs),
    /// Say what drafter a directory holds, for which target, and which plugin serves it.
    #[command(after_help = INSPECT_HELP)]
    Inspect {
        /// A drafter, or a checkpoint with one inside.
        path: PathBuf,
        #[command(flatten)]
        paths: PluginPaths,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

const SPLIT_HELP: &str = "\
Published Qwen3.5 checkpoints have a drafter inside: the tensors mtp.*, which conversion for MLX strips.
Split off, it serves any conversion of the same model, quantized or not:
  mlxhost drafter split --from Qwen3.5-0.8B --out qwen3.5-0.8b-mtp --bits 4
  mlxhost --plugin plugins/qwen_mtp.so --model qwen3.5-0.8b-4bit --drafter qwen3.5-0.8b-mtp

The directory appears complete or not at all. A tensor at a time is in memory. Its format, qwen3_5_mtp, is
that of mlx-vlm.";

const INSPECT_HELP: &str = "\
Reads configs and the headers of weight files. No plugin is run; those at hand are named.";

#[derive(clap::Args)]
pub struct SplitArgs {
    /// The full checkpoint: a directory with config.json and safetensors.
    #[arg(long, value_name = "DIR")]
    pub from: PathBuf,
    /// The directory to make. It must not exist, or be empty.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Quantize matrices to 2, 3, 4, 5, 6 or 8 bits [default: they stay as they are].
    #[arg(long, value_name = "N", value_parser = one_of(&["2", "3", "4", "5", "6", "8"]))]
    pub bits: Option<u8>,
    /// Weights that share a scale: 32, 64 or 128.
    #[arg(
        long,
        value_name = "N",
        requires = "bits",
        default_value = "64",
        value_parser = one_of(&["32", "64", "128"])
    )]
    pub group_size: u8,
    /// How the checkpoint stores the head's norms [default: as its structure says].
    #[arg(long, value_name = "HOW")]
    pub norms: Option<StoredNorms>,
    /// Replace a head that was split off before.
    #[arg(long)]
    pub force: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub enum StoredNorms {
    /// Minus one, as Qwen3.5 is published.
    MinusOne,
    /// As they are used, as after a conversion.
    AsUsed,
}

#[derive(Clone, clap::Args)]
pub struct PluginPaths {
    /// A plugin's library. Repeatable; the first that serves the drafter is used, if --drafter-plugin names
    /// none.
    #[arg(long, value_name = "PATH", help_heading = "Plugins")]
    pub plugin: Vec<PathBuf>,
    /// A directory of plugins. Repeatable. Searched after these: MLXHOST_PLUGIN_PATH (files and directories,
    /// separated by colons), ~/.local/share/mlxhost/plugins, and lib/mlxhost/plugins of the installation.
    #[arg(long, value_name = "DIR", help_heading = "Plugins")]
    pub plugin_dir: Vec<PathBuf>,
    /// The file of the plugins that may be loaded; where it exists, no others are. `plugins lock` writes it
    /// [default: ~/.local/share/mlxhost/plugins.lock].
    #[arg(long, value_name = "FILE", help_heading = "Plugins")]
    pub plugin_lock: Option<PathBuf>,
    /// Take plugins, too, that anyone on this machine may write to or replace.
    #[arg(long, help_heading = "Plugins")]
    pub trust_writable_plugins: bool,
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("expected a number from 0 to 1".to_owned()),
    }
}

/// One of a few numbers.
fn one_of(values: &'static [&'static str]) -> impl TypedValueParser<Value = u8> {
    PossibleValuesParser::new(values).try_map(|text| text.parse::<u8>())
}

pub(super) fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }
}
