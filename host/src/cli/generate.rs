//! The main job: a prompt in, an answer out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use mlxhost::backend;
use mlxhost::engine::{Answer, DraftWith, Engine, Event, Failure, Finish, Limits, Request};
use mlxhost::text::{GenerationDefaults, Tokenizer};
use plugin_api::sampling::Sampling;

use super::args::{AnswerArgs, GenerateArgs};
use super::chat;
use super::error::CliError;
use super::load::{self, Needs};
use super::output::{self, Printer};
use super::prompt::{self, Prompt};

const DEFAULT_MAX_TOKENS: usize = 512;

/// MiB for the states of a conversation.
const CHAT_MEMORY: u32 = 512;

/// Answers one prompt, or chats.
pub fn run(args: &GenerateArgs) -> Result<(), CliError> {
    let prompt = prompt::find(args)?;
    let usual = match prompt {
        Prompt::Chat => CHAT_MEMORY,
        _ => 0,
    };
    let needs = Needs {
        limits: Limits::default(),
        prefix: args.prefix.config(usual),
        ids_alone: args.prompt_tokens.is_some(),
        all_drafters: false,
    };
    let loaded = load::load(&args.models, needs)?;
    let interrupt = Interrupt::install()?;
    let no_tokenizer = || CliError::input("the model has no tokenizer; give --prompt-tokens");
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens,
        Prompt::Text(text) => {
            let tokenizer = loaded.tokenizer.as_deref().ok_or_else(no_tokenizer)?;
            prompt::encode(tokenizer, &text, &args.answer)?
        }
        Prompt::Chat => return chat::run(args, &loaded, &interrupt),
    };
    let tokenizer = loaded.tokenizer.as_deref();
    let request = request(args.ask(), &loaded.defaults, tokenizer, tokens);
    let mut printer = (!args.json).then(|| Printer::new(args.show_drafts));
    let (ids, text, answer) = answer(&loaded.engine, request, printer.as_mut(), &interrupt)?;
    if args.json {
        output::write(&format!("{}\n", output::to_json(&ids, &text, &answer)))?;
    }
    if args.stats {
        output::print_stats(&answer.stats);
    }
    match answer.finish {
        Finish::Cancelled => Err(CliError::Interrupted),
        _ => Ok(()),
    }
}

/// Ctrl-C: ends the running answer; a second one ends the program.
pub struct Interrupt {
    pressed: Arc<AtomicBool>,
}

impl Interrupt {
    pub fn install() -> Result<Self, CliError> {
        let pressed = Arc::new(AtomicBool::new(false));
        let flag = pressed.clone();
        ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::Relaxed) {
                // Nothing to clean up: plugins' copies are gone since they were mapped.
                backend::leave(130);
            }
        })
        .map_err(|e| CliError::Failure(format!("can't watch for Ctrl-C: {e}")))?;
        Ok(Self { pressed })
    }

    /// Whether it was pressed; asking forgets it.
    pub fn take(&self) -> bool {
        self.pressed.swap(false, Ordering::Relaxed)
    }

    fn is_pressed(&self) -> bool {
        self.pressed.load(Ordering::Relaxed)
    }
}

/// What the user and the model's own files ask for, at that depth.
pub fn request(
    (args, depth): (&AnswerArgs, Option<u32>),
    defaults: &GenerationDefaults,
    tokenizer: Option<&Tokenizer>,
    prompt: Vec<i32>,
) -> Request {
    let sampled = defaults.do_sample == Some(true);
    let of_model = |value: Option<f32>, otherwise: f32| match value {
        Some(value) if sampled => value,
        _ => otherwise,
    };
    let plain = Sampling::default();
    let temperature = if sampled {
        of_model(defaults.temperature, 1.0)
    } else {
        0.0
    };
    let sampling = Sampling {
        temperature: args.temperature.unwrap_or(temperature),
        top_p: args.top_p.unwrap_or(of_model(defaults.top_p, plain.top_p)),
        min_p: args.min_p.unwrap_or(of_model(defaults.min_p, plain.min_p)),
        top_k: args.top_k.unwrap_or(match defaults.top_k {
            Some(k) if sampled => k,
            _ => plain.top_k,
        }),
        seed: args.seed.unwrap_or_else(random_seed),
    };
    let limit = defaults.max_new_tokens.map(|n| n as usize);
    Request {
        prompt,
        sampling,
        max_tokens: args.max_tokens.or(limit).unwrap_or(DEFAULT_MAX_TOKENS),
        stop_ids: match tokenizer {
            Some(tokenizer) if !args.ignore_eos => tokenizer.eos_ids().to_vec(),
            _ => Vec::new(),
        },
        stop: args.stop.clone(),
        draft_with: DraftWith::Default,
        depth,
        deadline: None,
    }
}

fn random_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |age| age.as_nanos() as u64)
}

/// Runs a request to its end, printing as it goes. Returns the tokens, the text and the rest.
pub fn answer(
    engine: &Engine,
    request: Request,
    mut printer: Option<&mut Printer>,
    interrupt: &Interrupt,
) -> Result<(Vec<i32>, String, Answer), CliError> {
    let running = engine.submit(request)?;
    let (mut ids, mut text) = (Vec::new(), String::new());
    loop {
        let event = running.next_event_or(std::time::Duration::from_millis(50));
        if interrupt.is_pressed() {
            running.cancel();
        }
        match event {
            Ok(None) => {}
            Ok(Some(Event::Token(token))) => {
                if let Some(printer) = printer.as_deref_mut() {
                    printer.token(&token)?;
                }
                ids.push(token.id);
                text.push_str(&token.text);
            }
            Ok(Some(Event::Done(answer))) => {
                if let Some(printer) = printer {
                    printer.end(&answer.rest)?;
                }
                text.push_str(&answer.rest);
                return Ok((ids, text, answer));
            }
            Ok(Some(Event::Failed(why))) => {
                if let Some(printer) = printer {
                    printer.end("")?;
                }
                // The log has said what holds the round up that was to end the answer.
                if matches!(why, Failure::Hung(_)) && interrupt.is_pressed() {
                    return Err(CliError::Interrupted);
                }
                return Err(CliError::Failure(format!("the answer broke off: {why}")));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
