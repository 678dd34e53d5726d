//! The engine thread and the handle to it.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use plugin_api::TargetFacts;

use super::method::Methods;
use super::patience::Patience;
use super::request::{DraftWith, Event, Failure, Request, RequestError};
use super::scheduler::Scheduler;
use super::totals::Totals;
use crate::backend;
use crate::checkpoint::Checkpoint;
use crate::error::LoadError;
use crate::model::{KvConfig, Model, TargetHandle};
use crate::plugin::{Calls, DrafterSource, Hang};
use crate::prefix::{PrefixConfig, PrefixStore};
use crate::text::Tokenizer;

/// What an engine serves.
pub struct EngineConfig {
    /// The target.
    pub checkpoint: Arc<Checkpoint>,
    /// The target's tokenizer, for text and stop strings; without one, answers are ids alone.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The drafters, each of another plugin; the first is the default.
    pub drafters: Vec<DrafterConfig>,
    /// How the target's caches store keys and values.
    pub kv: KvConfig,
    /// How much is done at a time.
    pub limits: Limits,
    /// Where the states of rows are kept.
    pub prefix: PrefixConfig,
    /// How long a call of a plugin may take, reading weights aside; none: as long as it wants. It can't be
    /// interrupted. When it has taken longer, whoever waits for the engine is told ([`Hang`]) and waits no more.
    pub plugin_timeout: Option<Duration>,
}

/// A drafter of an engine.
#[derive(Clone)]
pub struct DrafterConfig {
    /// What makes it.
    pub source: DrafterSource,
    /// Where to keep from run to run what rounds cost, by which depths are chosen.
    pub costs: Option<PathBuf>,
}

/// How much an engine does at a time; what is beyond waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests that are worked on together, at least one.
    pub rows: usize,
    /// Bytes that the caches of their models may take, each at the longest that its request allows. A single
    /// request may take more.
    pub cache_bytes: u64,
}

impl Default for Limits {
    /// Eight requests, however long.
    fn default() -> Self {
        Self {
            rows: 8,
            cache_bytes: u64::MAX,
        }
    }
}

/// The engine cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model or the drafter could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A request cannot be served.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A plugin does not return from a call. Should it do so after all, the engine goes on.
    #[error(transparent)]
    Hung(#[from] Hang),
    /// The engine thread has ended.
    #[error("the engine has stopped")]
    Stopped,
}

/// A handle to the engine thread, which ends when the handle is dropped. Dropping it waits for that, but for no
/// plugin that is in a call for more than a second: that thread ends when the plugin lets it.
pub struct Engine {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
    patience: Patience,
    facts: TargetFacts,
    weight_bytes: u64,
    drafters: Mutex<Vec<DrafterFacts>>,
    has_tokenizer: bool,
}

pub(super) type Submission = (Request, Sender<Event>, Arc<AtomicBool>);

/// What the thread is told.
pub(super) enum Command {
    /// Requests that come at the same time.
    Serve(Vec<Submission>),
    /// A drafter to take the place of another, and who hears what there is then.
    Swap(
        Box<DrafterConfig>,
        Sender<Result<Vec<DrafterFacts>, LoadError>>,
    ),
    /// Who wants to know what each way of decoding has come to.
    Totals(Sender<Vec<(Option<String>, Totals)>>),
}

/// A request that is being served. Dropping it cancels the request.
pub struct Running {
    events: Receiver<Event>,
    cancel: Arc<AtomicBool>,
    patience: Patience,
    /// It was told that a plugin holds the engine up, which was the last event.
    hung: Cell<bool>,
}

/// What an engine tells of one of its drafters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrafterFacts {
    /// The plugin's name, by which requests name it.
    pub plugin: String,
    /// SHA-256 of the plugin's library: which build of it this is.
    pub build: String,
    /// The drafter's own name.
    pub name: String,
    /// The depth that it was made for.
    pub depth: u32,
}

/// What the thread tells when everything is loaded.
struct Ready {
    facts: TargetFacts,
    weight_bytes: u64,
    drafters: Vec<DrafterFacts>,
}

impl Engine {
    /// Starts the thread and waits until model and drafter are loaded. `progress` hears, on that
    /// thread, of every piece of weights in bytes.
    ///
    /// # Errors
    /// What could not be loaded, and why; or a drafter's plugin does not return.
    pub fn start(
        config: EngineConfig,
        progress: impl Fn(u64) + Send + 'static,
    ) -> Result<Self, EngineError> {
        let has_tokenizer = config.tokenizer.is_some();
        let limit = config.plugin_timeout;
        let (commands, inbox) = mpsc::channel();
        let (report, ready) = mpsc::channel();
        let (introduce, calls) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                let _ = introduce.send(Calls::here());
                serve(config, progress, &report, &inbox);
            })
            .map_err(|_| EngineError::Stopped)?;
        let calls = calls.recv().map_err(|_| EngineError::Stopped)?;
        let patience = Patience::new(calls, limit);
        let ready = patience.receive(&ready)??;
        Ok(Self {
            commands: Some(commands),
            thread: Some(thread),
            patience,
            facts: ready.facts,
            weight_bytes: ready.weight_bytes,
            drafters: Mutex::new(ready.drafters),
            has_tokenizer,
        })
    }

    /// The target's facts.
    pub fn facts(&self) -> &TargetFacts {
        &self.facts
    }

    /// Bytes of the target's weights in memory.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// The drafters, the default first.
    pub fn drafters(&self) -> Vec<DrafterFacts> {
        self.known_drafters().clone()
    }

    /// Puts a drafter in the place of the one of the same plugin, else of the default, while requests are
    /// served: those that come from now on use it, the others end with the old one. It is loaded,
    /// checked and tried first. No answer changes, and none breaks off.
    ///
    /// Load the plugin's library before, with [`crate::plugin::Library::load`]: that needs no engine.
    ///
    /// # Errors
    /// The new one can't be used, or does not return from a call: the old one stays in its place. Or the engine
    /// has stopped.
    pub fn swap(&self, drafter: DrafterConfig) -> Result<(), EngineError> {
        let (report, outcome) = mpsc::channel();
        self.send(Command::Swap(Box::new(drafter), report))?;
        let now = self.patience.receive(&outcome)??;
        *self.known_drafters() = now;
        Ok(())
    }

    /// Serves one request.
    ///
    /// # Errors
    /// The request is invalid, or the engine has stopped.
    pub fn submit(&self, request: Request) -> Result<Running, EngineError> {
        let mut running = self.submit_all(vec![request])?;
        running.pop().ok_or(EngineError::Stopped)
    }

    /// Serves several requests that come at the same time. They give what each gives alone.
    ///
    /// # Errors
    /// A request is invalid (then none is served), or the engine has stopped.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Running>, EngineError> {
        for request in &requests {
            request.validate(self.facts.vocab_size, self.has_tokenizer)?;
            if let DraftWith::Plugin(name) = &request.draft_with {
                self.require_drafter(name)?;
            }
        }
        let (submissions, running): (Vec<_>, Vec<_>) = requests
            .into_iter()
            .map(|request| {
                let (sender, events) = mpsc::channel();
                let cancel = Arc::new(AtomicBool::new(false));
                let running = Running {
                    events,
                    cancel: cancel.clone(),
                    patience: self.patience.clone(),
                    hung: Cell::new(false),
                };
                ((request, sender, cancel), running)
            })
            .unzip();
        self.send(Command::Serve(submissions))?;
        Ok(running)
    }

    /// What decoding with each drafter has come to, by the plugin's name; last and without a name, that without
    /// drafters. A drafter that was swapped in begins at nothing. Answered between two rounds.
    ///
    /// # Errors
    /// A plugin does not return from a call, or the engine has stopped.
    pub fn totals(&self) -> Result<Vec<(Option<String>, Totals)>, EngineError> {
        let (report, totals) = mpsc::channel();
        self.send(Command::Totals(report))?;
        self.patience.receive(&totals)
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        let commands = self.commands.as_ref().ok_or(EngineError::Stopped)?;
        commands.send(command).map_err(|_| EngineError::Stopped)
    }

    fn known_drafters(&self) -> std::sync::MutexGuard<'_, Vec<DrafterFacts>> {
        self.drafters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn require_drafter(&self, name: &str) -> Result<(), RequestError> {
        let drafters = self.known_drafters();
        if drafters.iter().any(|drafter| drafter.plugin == name) {
            return Ok(());
        }
        let there: Vec<&str> = drafters.iter().map(|d| d.plugin.as_str()).collect();
        Err(RequestError::NoDrafter {
            name: name.to_owned(),
            there: match there.as_slice() {
                [] => "none".to_owned(),
                names => names.join(", "),
            },
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.commands.take());
        let Some(thread) = self.thread.take() else {
            return;
        };
        while !thread.is_finished() {
            if self.patience.hang_in_vain().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = thread.join();
    }
}

impl Running {
    /// The next event; none after the last one.
    pub fn next_event(&self) -> Option<Event> {
        self.next_event_or(Duration::MAX).ok().flatten()
    }

    /// The next event, or none after `wait` without one.
    ///
    /// # Errors
    /// There will be no more events.
    pub fn next_event_or(&self, wait: Duration) -> Result<Option<Event>, EngineError> {
        if self.hung.get() {
            return Err(EngineError::Stopped);
        }
        let is_vain = || self.is_cancelled();
        match self.patience.receive_within(wait, is_vain, &self.events) {
            Err(EngineError::Hung(hang)) => {
                // Should the plugin return after all, there is nothing to go on with.
                self.cancel();
                self.hung.set(true);
                Ok(Some(Event::Failed(Failure::Hung(hang))))
            }
            other => other,
        }
    }

    /// Cancels the request at the end of its round; the last event says so, or that a plugin holds that round up.
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}

impl Iterator for Running {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.next_event()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancel();
    }
}

fn serve(
    config: EngineConfig,
    progress: impl Fn(u64) + 'static,
    report: &Sender<Result<Ready, LoadError>>,
    inbox: &Receiver<Command>,
) {
    backend::install();
    let read = move |bytes| {
        progress(bytes);
        Calls::here().touch();
    };
    let loaded = backend::on_weights_read(read, || load(&config));
    let (target, methods, store) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            let _ = report.send(Err(error));
            return;
        }
    };
    let ready = Ready {
        facts: target.model().facts().clone(),
        weight_bytes: target.model().weight_bytes(),
        drafters: methods.facts(),
    };
    if report.send(Ok(ready)).is_err() {
        return;
    }
    let _finish = backend::Finish;
    let scheduler = Scheduler::new(target, methods, config.tokenizer, store, config.limits);
    backend::on_weights_read(|_| Calls::here().touch(), || scheduler.run(inbox));
}

type Loaded = (Rc<TargetHandle>, Methods, Option<PrefixStore>);

fn load(config: &EngineConfig) -> Result<Loaded, LoadError> {
    let vocabulary = config.tokenizer.as_ref().map(|t| t.table_digest());
    let store = PrefixStore::open(&config.prefix)?;
    let model = Model::load_with(config.checkpoint.clone(), vocabulary, &config.kv)?;
    let identity = config
        .prefix
        .identity(config.checkpoint.path(), &config.kv)?;
    let target = Rc::new(TargetHandle::new(Rc::new(model)));
    let methods = Methods::load(&target, config.prefix.clone(), identity, &config.drafters)?;
    Ok((target, methods, store))
}
