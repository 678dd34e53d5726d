//! Many requests from a file, answered together, one line per answer.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use mlxhost::engine::{DraftWith, EngineError, Event, Failure, Finish, Request, Running};
use mlxhost::text::{Message, Role};
use serde::Deserialize;
use serde_json::{Value, json};

use super::args::BatchArgs;
use super::error::CliError;
use super::generate::Interrupt;
use super::load::{self, Loaded, Needs};
use super::{generate, output, prompt};

/// Longer lines are refused.
const MAX_LINE: u64 = 64 << 20;

/// Between looks at Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(20);

/// One line of the input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// What the answer is called; else the number of the line.
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Spoken>>,
    prompt_tokens: Option<Vec<i32>>,
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    seed: Option<u64>,
    stop: Option<Vec<String>>,
    depth: Option<u32>,
    /// The name of a plugin, or `none`.
    drafter: Option<String>,
    /// Seconds from the time on that work could begin.
    deadline: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spoken {
    role: String,
    content: String,
}

/// A request that runs.
struct Job {
    id: Value,
    running: Running,
    tokens: Vec<i32>,
    text: String,
}

/// Answers what is not answered yet.
pub fn run(args: &BatchArgs) -> Result<(), CliError> {
    let mut answered = Answered::open(&args.output)?;
    let lines = count_lines(&args.input)?;
    let needs = Needs {
        limits: args.limits(),
        prefix: args.prefix.config(0),
        ids_alone: true,
        all_drafters: true,
    };
    let loaded = load::load(&args.models, needs)?;
    let interrupt = Interrupt::install()?;
    let bar = ProgressBar::new(lines);
    let style = ProgressStyle::with_template("{pos}/{len} answers {wide_bar} {msg} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let outcome = Batch {
        args,
        loaded: &loaded,
        answered: &mut answered,
        bar: &bar,
        jobs: BTreeMap::new(),
        tokens: 0,
        failed: 0,
    }
    .serve(&interrupt);
    bar.finish_and_clear();
    let (tokens, failed) = outcome?;
    let took = bar.elapsed().as_secs_f64();
    output::note(format_args!(
        "{lines} requests, {} answered before; {tokens} tokens in {took:.1} s ({:.1} tokens/s)",
        answered.before,
        tokens as f64 / took.max(1e-9)
    ));
    match failed {
        0 => Ok(()),
        n => Err(CliError::Failure(format!(
            "{n} requests could not be answered; {} says why",
            args.output.display()
        ))),
    }
}

struct Batch<'a> {
    args: &'a BatchArgs,
    loaded: &'a Loaded,
    answered: &'a mut Answered,
    bar: &'a ProgressBar,
    /// By the number of the line.
    jobs: BTreeMap<u64, Job>,
    tokens: u64,
    failed: u64,
}

impl Batch<'_> {
    /// Tokens that were generated, and requests that failed.
    fn serve(mut self, interrupt: &Interrupt) -> Result<(u64, u64), CliError> {
        let input = open(&self.args.input)?;
        let mut reader = BufReader::new(input);
        let mut number = 0;
        // As many as are worked on, and as many again that wait: the engine is never without work.
        let most = 2 * usize::from(self.args.concurrency);
        let mut at_end = false;
        loop {
            while !at_end && self.jobs.len() < most {
                match next_line(&mut reader, &self.args.input, number)? {
                    Some(line) => {
                        number += 1;
                        self.begin(number, &line)?;
                    }
                    None => at_end = true,
                }
            }
            if self.jobs.is_empty() {
                return Ok((self.tokens, self.failed));
            }
            self.listen()?;
            if interrupt.take() {
                // What is answered is in the file; the rest is asked again next time.
                return Err(CliError::Interrupted);
            }
        }
    }

    /// Starts on a line, unless it is empty or answered.
    fn begin(&mut self, number: u64, text: &str) -> Result<(), CliError> {
        if text.trim().is_empty() {
            self.bar.inc(1);
            return Ok(());
        }
        let line: Line = serde_json::from_str(text)
            .map_err(|e| self.refuse(number, &format!("no request: {e}")))?;
        let id = line.id.clone().unwrap_or_else(|| json!(number));
        match self.answered.ids.get(&id.to_string()) {
            None => {}
            Some(State::Asked) => {
                return Err(self.refuse(number, &format!("the id {id} comes twice")));
            }
            Some(State::Before) => {
                self.bar.inc(1);
                return Ok(());
            }
        }
        self.answered.ids.insert(id.to_string(), State::Asked);
        let request = self
            .request(line)
            .map_err(|e| self.refuse(number, &e.to_string()))?;
        match self.loaded.engine.submit(request) {
            Ok(running) => {
                let (tokens, text) = (Vec::new(), String::new());
                let job = Job {
                    id,
                    running,
                    tokens,
                    text,
                };
                self.jobs.insert(number, job);
                Ok(())
            }
            Err(error) => Err(self.refuse(number, &error.to_string())),
        }
    }

    fn refuse(&self, number: u64, problem: &str) -> CliError {
        let path = self.args.input.display();
        CliError::input(format!("{path}: line {number}: {problem}"))
    }

    /// A line as a request; what it does not say, the command line does.
    fn request(&self, line: Line) -> Result<Request, CliError> {
        let args = &self.args.answer;
        let given = [
            line.prompt.is_some(),
            line.messages.is_some(),
            line.prompt_tokens.is_some(),
        ];
        if given.iter().filter(|&&given| given).count() != 1 {
            let message = "needs one of `prompt`, `messages` and `prompt_tokens`";
            return Err(CliError::input(message));
        }
        let tokenizer = self.loaded.tokenizer.as_deref();
        let needs = || CliError::input("the model has no tokenizer; give `prompt_tokens`");
        let tokens = if let Some(tokens) = line.prompt_tokens {
            tokens
        } else if let Some(text) = line.prompt {
            prompt::encode(tokenizer.ok_or_else(needs)?, &text, args)?
        } else {
            let spoken = line.messages.unwrap_or_default();
            let messages = spoken.into_iter().map(|spoken| {
                let role = match spoken.role.as_str() {
                    "system" => Role::System,
                    "user" => Role::User,
                    "assistant" => Role::Assistant,
                    other => {
                        let shown: String = other.chars().take(40).collect();
                        return Err(CliError::input(format!("{shown:?} is no role")));
                    }
                };
                Ok(Message::new(role, spoken.content))
            });
            let messages = messages.collect::<Result<Vec<_>, _>>()?;
            prompt::encode_chat(tokenizer.ok_or_else(needs)?, &messages)?
        };
        let asked = (args, line.depth.or(self.args.models.depth));
        let mut request = generate::request(asked, &self.loaded.defaults, tokenizer, tokens);
        let sampling = &mut request.sampling;
        sampling.temperature = line.temperature.unwrap_or(sampling.temperature);
        sampling.top_p = line.top_p.unwrap_or(sampling.top_p);
        sampling.top_k = line.top_k.unwrap_or(sampling.top_k);
        sampling.min_p = line.min_p.unwrap_or(sampling.min_p);
        sampling.seed = line.seed.unwrap_or(sampling.seed);
        request.max_tokens = line.max_tokens.unwrap_or(request.max_tokens);
        request.stop = line.stop.unwrap_or(request.stop);
        request.draft_with = match line.drafter {
            None => DraftWith::Default,
            Some(name) if name == "none" => DraftWith::Nothing,
            Some(name) => DraftWith::Plugin(name),
        };
        request.deadline = match line.deadline {
            None => None,
            Some(seconds) => Some(
                Duration::try_from_secs_f64(seconds)
                    .map_err(|_| CliError::input("`deadline` must be seconds from 0 on"))?,
            ),
        };
        Ok(request)
    }

    /// Takes what the engine has to say, and writes down what is complete.
    fn listen(&mut self) -> Result<(), CliError> {
        let mut wait = PATIENCE;
        let numbers: Vec<u64> = self.jobs.keys().copied().collect();
        for number in numbers {
            while let Some(job) = self.jobs.get_mut(&number) {
                match job.running.next_event_or(wait) {
                    Ok(None) => break,
                    Ok(Some(Event::Token(token))) => {
                        self.tokens += 1;
                        job.tokens.push(token.id);
                        job.text.push_str(&token.text);
                    }
                    Ok(Some(Event::Done(answer))) => {
                        job.text.push_str(&answer.rest);
                        if answer.finish != Finish::Cancelled {
                            let mut line = output::to_json(&job.tokens, &job.text, &answer);
                            line["id"] = job.id.clone();
                            self.answered.write(&line)?;
                        }
                        self.end(number);
                    }
                    Ok(Some(Event::Failed(Failure::Hung(hang)))) => {
                        return Err(EngineError::Hung(hang).into());
                    }
                    Ok(Some(Event::Failed(why))) => {
                        let line = json!({"id": job.id, "error": why.to_string()});
                        self.answered.write(&line)?;
                        self.failed += 1;
                        self.end(number);
                    }
                    Err(error) => return Err(error.into()),
                }
                wait = Duration::ZERO;
            }
            wait = Duration::ZERO;
        }
        Ok(())
    }

    fn end(&mut self, number: u64) {
        self.jobs.remove(&number);
        self.bar.inc(1);
        let speed = self.tokens as f64 / self.bar.elapsed().as_secs_f64().max(1e-9);
        self.bar.set_message(format!("{speed:.1} tokens/s"));
    }
}

fn open(path: &Path) -> Result<File, CliError> {
    File::open(path).map_err(|e| CliError::input(format!("{}: {e}", path.display())))
}

fn count_lines(path: &Path) -> Result<u64, CliError> {
    let refuse = |e: std::io::Error| CliError::input(format!("{}: {e}", path.display()));
    let mut reader = BufReader::new(open(path)?);
    let mut count = 0;
    loop {
        let buffer = reader.fill_buf().map_err(refuse)?;
        if buffer.is_empty() {
            return Ok(count);
        }
        count += buffer.iter().filter(|&&byte| byte == b'\n').count() as u64;
        // The last line may have no end.
        let unended = u64::from(buffer.last() != Some(&b'\n'));
        let length = buffer.len();
        reader.consume(length);
        if unended == 1 && reader.fill_buf().map_err(refuse)?.is_empty() {
            return Ok(count + 1);
        }
    }
}

/// The next line, bounded; none at the end.
fn next_line(
    reader: &mut impl BufRead,
    path: &Path,
    before: u64,
) -> Result<Option<String>, CliError> {
    let refuse = |problem: &dyn std::fmt::Display| {
        let (path, number) = (path.display(), before + 1);
        CliError::input(format!("{path}: line {number}: {problem}"))
    };
    let mut line = Vec::new();
    let read = reader.take(MAX_LINE + 1).read_until(b'\n', &mut line);
    if read.map_err(|e| refuse(&e))? == 0 {
        return Ok(None);
    }
    if line.len() as u64 > MAX_LINE {
        return Err(refuse(&"longer than 64 MiB"));
    }
    match String::from_utf8(line) {
        Ok(line) => Ok(Some(line)),
        Err(_) => Err(refuse(&"not valid UTF-8")),
    }
}

/// The output: what is answered in it, and what is added.
struct Answered {
    file: File,
    path: std::path::PathBuf,
    /// By id as JSON text.
    ids: HashMap<String, State>,
    before: usize,
}

/// What became of an id.
enum State {
    /// Its answer was in the file.
    Before,
    /// The input has named it.
    Asked,
}

impl Answered {
    /// Opens or makes the file. A last line that an interruption cut off is taken away; requests that failed
    /// are asked again.
    fn open(path: &Path) -> Result<Self, CliError> {
        let refuse =
            |e: &dyn std::fmt::Display| CliError::input(format!("{}: {e}", path.display()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let mut file = file.map_err(|e| refuse(&e))?;
        let mut reader = BufReader::new(&mut file);
        let (mut ids, mut end, mut number) = (HashMap::new(), 0, 0);
        while let Some(line) = next_line(&mut reader, path, number)? {
            number += 1;
            if !line.ends_with('\n') {
                break;
            }
            end += line.len() as u64;
            if line.trim().is_empty() {
                continue;
            }
            let answer: Value = serde_json::from_str(&line).map_err(|_| {
                refuse(&format!(
                    "line {number} is no answer; name another file with --output"
                ))
            })?;
            if let Some(id) = answer.get("id").filter(|_| answer.get("error").is_none()) {
                ids.insert(id.to_string(), State::Before);
            }
        }
        file.set_len(end).map_err(|e| refuse(&e))?;
        file.seek(SeekFrom::Start(end)).map_err(|e| refuse(&e))?;
        Ok(Self {
            file,
            path: path.to_owned(),
            before: ids.len(),
            ids,
        })
    }

    fn write(&mut self, answer: &Value) -> Result<(), CliError> {
        let path = self.path.display();
        self.file
            .write_all(format!("{answer}\n").as_bytes())
            .map_err(|e| CliError::io(format!("can't write to {path}"), &e))
    }
}
