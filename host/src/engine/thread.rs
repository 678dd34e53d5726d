//! The engine thread and the handle to it.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use plugin_api::TargetFacts;

use super::depth::Costs;
use super::request::{Event, Request, RequestError};
use super::scheduler::Scheduler;
use crate::backend;
use crate::checkpoint::Checkpoint;
use crate::error::LoadError;
use crate::model::{KvConfig, Model, TargetHandle};
use crate::plugin::{Drafter, DrafterSource};
use crate::text::Tokenizer;

/// What an engine serves.
pub struct EngineConfig {
    /// The target.
    pub checkpoint: Arc<Checkpoint>,
    /// The target's tokenizer, for text and stop strings; without one, answers are ids alone.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The drafter.
    pub drafter: Option<DrafterSource>,
    /// How the target's caches store keys and values.
    pub kv: KvConfig,
    /// Where to keep from run to run what rounds cost, by which depths are chosen.
    pub costs: Option<PathBuf>,
    /// How much is done at a time.
    pub limits: Limits,
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
    /// The engine thread has ended.
    #[error("the engine has stopped")]
    Stopped,
}

/// A handle to the engine thread, which ends when the handle is dropped.
pub struct Engine {
    commands: Option<Sender<Vec<Submission>>>,
    thread: Option<JoinHandle<()>>,
    facts: TargetFacts,
    weight_bytes: u64,
    drafter: Option<(String, u32)>,
    has_tokenizer: bool,
}

pub(super) type Submission = (Request, Sender<Event>, Arc<AtomicBool>);

/// A request that is being served. Dropping it cancels the request.
pub struct Running {
    events: Receiver<Event>,
    cancel: Arc<AtomicBool>,
}

/// What the thread tells when everything is loaded.
struct Ready {
    facts: TargetFacts,
    weight_bytes: u64,
    drafter: Option<(String, u32)>,
}

impl Engine {
    /// Starts the thread and waits until model and drafter are loaded. `progress` hears, on that
    /// thread, of every piece of weights in bytes.
    ///
    /// # Errors
    /// What could not be loaded, and why.
    pub fn start(
        config: EngineConfig,
        progress: impl Fn(u64) + Send + 'static,
    ) -> Result<Self, EngineError> {
        let has_tokenizer = config.tokenizer.is_some();
        let (commands, inbox) = mpsc::channel();
        let (report, ready) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || serve(config, progress, &report, &inbox))
            .map_err(|_| EngineError::Stopped)?;
        let ready = ready.recv().map_err(|_| EngineError::Stopped)??;
        Ok(Self {
            commands: Some(commands),
            thread: Some(thread),
            facts: ready.facts,
            weight_bytes: ready.weight_bytes,
            drafter: ready.drafter,
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

    /// The drafter's name and the depth it was made for.
    pub fn drafter(&self) -> Option<(&str, u32)> {
        self.drafter
            .as_ref()
            .map(|(name, depth)| (name.as_str(), *depth))
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
        }
        let (submissions, running): (Vec<_>, Vec<_>) = requests
            .into_iter()
            .map(|request| {
                let (sender, events) = mpsc::channel();
                let cancel = Arc::new(AtomicBool::new(false));
                let running = Running {
                    events,
                    cancel: cancel.clone(),
                };
                ((request, sender, cancel), running)
            })
            .unzip();
        let commands = self.commands.as_ref().ok_or(EngineError::Stopped)?;
        commands
            .send(submissions)
            .map_err(|_| EngineError::Stopped)?;
        Ok(running)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.commands.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Running {
    /// The next event; none after the last one.
    pub fn next_event(&self) -> Option<Event> {
        self.events.recv().ok()
    }

    /// The next event, or none after `wait` without one.
    ///
    /// # Errors
    /// There will be no more events.
    pub fn next_event_or(&self, wait: Duration) -> Result<Option<Event>, EngineError> {
        match self.events.recv_timeout(wait) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(EngineError::Stopped),
        }
    }

    /// Cancels the request at the end of its round; the last event says so.
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
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
    inbox: &Receiver<Vec<Submission>>,
) {
    backend::install();
    let loaded = backend::on_weights_read(progress, || load(&config));
    let (target, drafter) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            let _ = report.send(Err(error));
            return;
        }
    };
    let ready = Ready {
        facts: target.model().facts().clone(),
        weight_bytes: target.model().weight_bytes(),
        drafter: drafter
            .as_ref()
            .map(|drafter| (drafter.name().to_owned(), drafter.default_depth())),
    };
    if report.send(Ok(ready)).is_err() {
        return;
    }
    let _finish = backend::Finish;
    let costs = Costs::load(config.costs);
    Scheduler::new(target, drafter, config.tokenizer, costs, config.limits).run(inbox);
}

fn load(config: &EngineConfig) -> Result<(Rc<TargetHandle>, Option<Rc<Drafter>>), LoadError> {
    let vocabulary = config.tokenizer.as_ref().map(|t| t.table_digest());
    let model = Model::load_with(config.checkpoint.clone(), vocabulary, &config.kv)?;
    let drafter = match &config.drafter {
        Some(source) => Some(Drafter::load(source, &model)?),
        None => None,
    };
    Ok((Rc::new(TargetHandle::new(Rc::new(model))), drafter))
}
