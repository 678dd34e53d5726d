//! `mlxhost plugins check`: a plugin is led through all that a host may do, and its answers judged.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use mlxhost::check::{
    DRAFTER, FUZZ, Needs, Report, Subject, TESTS, Test, Verdict, supervise, write_target,
};
use mlxhost::checkpoint::Checkpoint;
use mlxhost::plugin::PluginFile;
use mlxhost::text::Tokenizer;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::args::key_value;
use super::error::CliError;
use super::{load, output};

/// What a model with a tokenizer is asked to continue where acceptance is counted.
const TEXTS: [&str; 4] = [
    "A computer program is a sequence of instructions that",
    "Count: one, two, three, four, five,",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "The capital of France is Paris. The capital of Italy is",
];

/// What is checked, and how.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct CheckArgs {
    /// The plugin's library.
    #[arg(required_unless_present = "list")]
    path: Option<PathBuf>,
    /// The drafter's checkpoint, for plugins whose drafters have one.
    #[arg(long, value_name = "DIR", requires = "model")]
    drafter: Option<PathBuf>,
    /// The target: a directory or a .gguf file [default: a tiny one with random weights].
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// An option of the drafter. Repeatable.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    drafter_option: Vec<(String, String)>,
    /// Seconds that a test may take.
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    timeout: u32,
    /// Run this test alone. Repeatable.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Repeat the random life that this seed stands for, alone.
    #[arg(long, value_name = "SEED", conflicts_with = "only")]
    reproduce: Option<u64>,
    /// List the tests, and what each checks.
    #[arg(long)]
    list: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// In a process of its own: the test that it runs, and where its report goes.
    #[arg(long, hide = true, requires = "report")]
    child: Option<String>,
    #[arg(long, hide = true)]
    report: Option<PathBuf>,
}

const HELP: &str = "\
Each test runs in a process of its own and ends as passed, warning, skipped, failed or crashed. The exit code is 0
when none failed or crashed, 1 otherwise, 2 where there is nothing to check.

  mlxhost plugins check plugins/ngram.so
  mlxhost plugins check plugins/qwen_mtp.so --model Qwen3.5-0.8B --drafter qwen3.5-0.8b-mtp

The plugin is run, with your rights.";

/// Checks a plugin, or is one of the processes that do.
pub fn run(args: &CheckArgs) -> Result<(), CliError> {
    if args.list {
        return list(args.json);
    }
    let Some(path) = &args.path else {
        return Err(CliError::input("no plugin was named"));
    };
    match (&args.child, &args.report) {
        (Some(name), Some(report)) => child(args, path, name, report),
        _ => check(args, path),
    }
}

fn list(json: bool) -> Result<(), CliError> {
    if json {
        let tests: Vec<_> = TESTS
            .iter()
            .map(|test| json!({"test": test.name, "about": test.about}))
            .collect();
        return output::write(&format!("{}\n", Value::Array(tests)));
    }
    TESTS
        .iter()
        .try_for_each(|test| output::write(&format!("{:15} {}\n", test.name, test.about)))
}

fn named(name: &str) -> Result<&'static Test, CliError> {
    Test::named(name).ok_or_else(|| {
        CliError::input(format!(
            "there is no test {name:?}\n  `mlxhost plugins check --list` lists them"
        ))
    })
}

/// What all tests are given.
struct Setup<'a> {
    args: &'a CheckArgs,
    plugin: PathBuf,
    model: PathBuf,
    drafter: Option<PathBuf>,
    /// Whether the plugin's drafters need a checkpoint and there is none.
    lacks_drafter: bool,
    dir: TempDir,
}

fn check(args: &CheckArgs, path: &Path) -> Result<(), CliError> {
    let file = PluginFile::read(path)?;
    let tests: Vec<&Test> = match (args.reproduce, args.only.as_slice()) {
        (Some(_), _) => vec![named(FUZZ)?],
        (None, []) => TESTS.iter().collect(),
        (None, only) => only
            .iter()
            .map(|name| named(name))
            .collect::<Result<_, _>>()?,
    };
    let setup = Setup::new(args, &file)?;
    let mut reports: Vec<Report> = Vec::new();
    for test in tests {
        let report = match setup.skips(test, &reports) {
            Some(why) => Report::new(test.name, Verdict::Skipped, why),
            None => setup.run(test)?,
        };
        if !args.json {
            let verdict = report.verdict.name();
            output::write(&format!("{verdict:8} {:15} {}\n", report.test, report.why))?;
        }
        reports.push(report);
    }
    let count = |verdict| reports.iter().filter(|r| r.verdict == verdict).count();
    let counts = [
        Verdict::Passed,
        Verdict::Warning,
        Verdict::Skipped,
        Verdict::Failed,
        Verdict::Crashed,
    ]
    .map(|verdict| (verdict.name(), count(verdict)));
    let manifest = file.manifest();
    if args.json {
        let tests: Vec<_> = reports.iter().map(Report::to_json).collect();
        let mut sheet = json!({
            "plugin": manifest.name,
            "version": manifest.version.to_string(),
            "path": file.path(),
            "tests": tests,
        });
        for (name, count) in counts {
            sheet[name] = json!(count);
        }
        output::write(&format!("{sheet}\n"))?;
    } else {
        let counts = counts.map(|(name, count)| format!("{count} {name}"));
        output::write(&format!("{}: {}\n", manifest.name, counts.join(", ")))?;
    }
    match reports.iter().filter(|r| r.verdict.is_bad()).count() {
        0 => Ok(()),
        bad => Err(CliError::Failure(format!(
            "plugin {} did not pass {bad} of {} tests",
            manifest.name,
            reports.len()
        ))),
    }
}

impl<'a> Setup<'a> {
    fn new(args: &'a CheckArgs, file: &PluginFile) -> Result<Self, CliError> {
        let dir = tempfile::tempdir();
        let dir = dir.map_err(|e| CliError::io("can't make a temporary directory", &e))?;
        let families = &file.manifest().families;
        let mut drafter = args.drafter.clone();
        let model = match &args.model {
            Some(path) => {
                let checkpoint = Checkpoint::open(path)?;
                let inside = families.contains(&load::model_type(&checkpoint));
                if inside && drafter.is_none() {
                    drafter = Some(path.clone());
                }
                path.clone()
            }
            None => {
                let path = dir.path().join("target");
                std::fs::create_dir(&path).map_err(|e| CliError::io(path.display(), &e))?;
                write_target(&path)?;
                path
            }
        };
        if let Some(path) = &drafter {
            Checkpoint::open(path)?;
        }
        Ok(Self {
            args,
            plugin: file.path().to_owned(),
            model,
            lacks_drafter: drafter.is_none() && !families.is_empty(),
            drafter,
            dir,
        })
    }

    /// Why a test can't be run.
    fn skips(&self, test: &Test, before: &[Report]) -> Option<&'static str> {
        if test.needs != Needs::Library && self.lacks_drafter {
            return Some("its drafters have a checkpoint: name one with --drafter DIR --model DIR");
        }
        if test.needs == Needs::Pair && self.args.model.is_none() {
            return Some("random weights say nothing of this: name a target with --model DIR");
        }
        let is_base = |report: &&Report| {
            report.test == DRAFTER || Test::named(report.test).is_some_and(Test::is_gate)
        };
        let base = before.iter().find(|r| is_base(r) && r.verdict.is_bad());
        base.map(|_| "there is no drafter to try, for the reason above")
    }

    /// Runs a test in a process of its own.
    fn run(&self, test: &Test) -> Result<Report, CliError> {
        let program = std::env::current_exe();
        let program = program.map_err(|e| CliError::io("can't find the program itself", &e))?;
        let limit = Duration::from_secs(u64::from(self.args.timeout));
        let report = supervise(test, self.dir.path(), limit, |report| {
            let mut command = Command::new(program);
            command
                .args(["plugins", "check", "--child", test.name, "--timeout"])
                .arg(self.args.timeout.to_string())
                .arg("--report")
                .arg(report)
                .arg("--model")
                .arg(&self.model)
                // What a plugin logs is no noise.
                .env("MLXHOST_LOG", "off");
            if let Some(drafter) = &self.drafter {
                command.arg("--drafter").arg(drafter);
            }
            for (key, value) in &self.args.drafter_option {
                command
                    .arg("--drafter-option")
                    .arg(format!("{key}={value}"));
            }
            if let Some(seed) = self.args.reproduce {
                command.arg("--reproduce").arg(seed.to_string());
            }
            command.arg("--").arg(&self.plugin);
            command
        });
        report.map_err(|e| CliError::io(format!("can't run the test {}", test.name), &e))
    }
}

/// Runs one test in this process.
fn child(args: &CheckArgs, path: &Path, name: &str, report: &Path) -> Result<(), CliError> {
    let limit = Duration::from_secs(u64::from(args.timeout));
    let Some(model) = &args.model else {
        return Err(CliError::input("a test has a model"));
    };
    let target = Arc::new(Checkpoint::open(model)?);
    let tokenizer = load::tokenizer(&target, true)?;
    let subject = Subject {
        plugin: path.to_owned(),
        drafter: args.drafter.clone(),
        options: args.drafter_option.clone(),
        vocabulary: tokenizer.as_ref().map(Tokenizer::table_digest),
        prompts: tokenizer.iter().flat_map(prompts).collect(),
        target,
        seed: args.reproduce,
        until: Subject::until(limit),
    };
    let written = named(name)?.run(&subject).write(report);
    written.map_err(|e| CliError::io("can't write the report", &e))
}

/// The texts as tokens, where they are more than a few.
fn prompts(tokenizer: &Tokenizer) -> Vec<Vec<i32>> {
    let encode = |text: &&str| tokenizer.encode(text, true).ok();
    let encoded = TEXTS.iter().filter_map(encode);
    encoded.filter(|tokens| tokens.len() > 2).collect()
}
