//! New builds of a drafter's plugin in a running program: `/swap` and `--watch`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use mlxhost::engine::Engine;

use super::args::ModelArgs;
use super::error::CliError;
use super::{load, output};

/// How often a file is looked at. One that changes is taken when it has not changed for as long.
const PAUSE: Duration = Duration::from_millis(300);

/// Puts the plugin at `path` in the place of the one that drafts. What there is now, in words.
pub fn swap(args: &ModelArgs, engine: &Engine, path: &Path) -> Result<String, CliError> {
    let drafter = load::replacement(args, path)?;
    let manifest = drafter.source.library.manifest();
    let build = &drafter.source.library.digest()[..12];
    let now = format!("{} {}, build {build}", manifest.name, manifest.version);
    if engine
        .drafters()
        .iter()
        .any(|there| there.build == drafter.source.library.digest())
    {
        return Ok(format!("{now}, drafts already"));
    }
    engine.swap(drafter)?;
    Ok(format!("{now}, drafts from the next request on"))
}

/// Swaps when the plugin's file changes, until it is dropped.
pub struct Watch {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Watches the file of the plugin that drafts.
    pub fn start(args: &ModelArgs, engine: &Arc<Engine>, path: &Path) -> Result<Self, CliError> {
        let (args, engine, path) = (args.clone(), engine.clone(), path.to_owned());
        let (end, ended) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || watch(&args, &engine, &path, &ended))
            .map_err(|e| CliError::io("can't watch the plugin", &e))?;
        Ok(Self {
            end: Some(end),
            thread: Some(thread),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What tells one state of a file from another.
type Stamp = Option<(u64, SystemTime, u64)>;

fn stamp(path: &PathBuf) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    let facts = std::fs::metadata(path).ok()?;
    Some((facts.ino(), facts.modified().ok()?, facts.len()))
}

fn watch(args: &ModelArgs, engine: &Engine, path: &PathBuf, ended: &Receiver<()>) {
    let (mut known, mut before) = (stamp(path), stamp(path));
    while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
        let now = stamp(path);
        let settled = now == before;
        before = now;
        // While a linker writes, the file is not there or grows.
        if now.is_none() || now == known || !settled {
            continue;
        }
        known = now;
        match swap(args, engine, path) {
            Ok(text) => output::note(format_args!("mlxhost: {text}")),
            Err(error) => {
                output::note(format_args!(
                    "mlxhost: not swapped, the old build goes on: {error}"
                ));
            }
        }
    }
}
