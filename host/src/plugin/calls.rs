//! The call of a plugin that a thread is in, and how long it takes. A plugin can't be interrupted; but whoever
//! waits for that thread can be told.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::text::one_line;

/// A plugin, as its users know it.
pub(super) struct Origin {
    pub name: String,
    /// Its library; none for a plugin that is linked into this program.
    pub path: Option<PathBuf>,
}

/// A plugin that does not return from a call. Nothing is known to be wrong; but nobody is answered meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hang {
    /// The plugin's name.
    pub plugin: String,
    /// Its library; none for a plugin that is linked into this program.
    pub path: Option<PathBuf>,
    /// The slot of the plugin's tables, such as `draft`.
    pub call: &'static str,
    /// For how long it has not returned.
    pub lasted: Duration,
}

impl Hang {
    /// What is known of it, on one line.
    fn facts(&self) -> String {
        let Self { plugin, call, .. } = self;
        let lasted = self.lasted.as_secs_f32();
        let path = self.path.as_ref().map(|path| path.display().to_string());
        let place = path.map_or_else(String::new, |path| format!(" ({})", one_line(&path)));
        format!("plugin {plugin} has been in `{call}` for {lasted:.1} s{place}")
    }
}

impl fmt::Display for Hang {
    /// Two lines, as of a [`crate::LoadError`]: the problem, then the remedy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remedy = "run without it (--no-draft) or with another build of it; --plugin-timeout lets it take longer";
        write!(f, "{}\n  {remedy}", self.facts())
    }
}

impl std::error::Error for Hang {}

/// What one thread calls of plugins, for other threads to look at.
#[derive(Default)]
pub(crate) struct Calls(Mutex<Option<Call>>);

struct Call {
    origin: Arc<Origin>,
    slot: &'static str,
    /// When it began, or last did what may take long.
    since: Instant,
    /// Whether it has been spoken of.
    told: bool,
}

thread_local! {
    static HERE: Arc<Calls> = Arc::default();
}

impl Calls {
    /// Those of the thread that asks.
    pub fn here() -> Arc<Self> {
        HERE.with(Arc::clone)
    }

    /// The call, if there is one, has just done something that may take long in all: its time begins anew.
    pub fn touch(&self) {
        if let Some(call) = &mut *self.lock() {
            call.since = Instant::now();
        }
    }

    /// The call that lasts longer than `limit`. One that lasts longer than `notice` is spoken of in the log, once.
    pub fn hang(&self, notice: Duration, limit: Duration) -> Option<Hang> {
        let mut now = self.lock();
        let call = now.as_mut()?;
        let lasted = call.since.elapsed();
        if lasted < notice.min(limit) {
            return None;
        }
        let hang = Hang {
            plugin: call.origin.name.clone(),
            path: call.origin.path.clone(),
            call: call.slot,
            lasted,
        };
        let is_news = !std::mem::replace(&mut call.told, true);
        // The log may be slow.
        drop(now);
        if is_news {
            tracing::warn!(
                "{}; it can't be interrupted: Ctrl-C ends the program",
                hang.facts()
            );
        }
        (lasted >= limit).then_some(hang)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Call>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs a call of a plugin's slot, so that others see it while it lasts.
pub(super) fn seen<T>(origin: &Arc<Origin>, slot: &'static str, call: impl FnOnce() -> T) -> T {
    HERE.with(|here| {
        *here.lock() = Some(Call {
            origin: origin.clone(),
            slot,
            since: Instant::now(),
            told: false,
        });
        let outcome = call();
        *here.lock() = None;
        outcome
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;
    const NEVER: Duration = Duration::MAX;

    fn origin(path: Option<&str>) -> Arc<Origin> {
        Arc::new(Origin {
            name: "slow".to_owned(),
            path: path.map(PathBuf::from),
        })
    }

    #[test]
    fn a_call_is_seen_by_other_threads_while_it_lasts() {
        let calls = Calls::here();
        let see = |limit| std::thread::scope(|s| s.spawn(|| calls.hang(limit, limit)).join());
        assert_eq!(see(NOW).unwrap(), None);
        let hang = seen(&origin(Some("/a\n/b.so")), "draft", || {
            assert_eq!(see(NEVER).unwrap(), None);
            see(NOW).unwrap().expect("a call")
        });
        assert_eq!(see(NOW).unwrap(), None);
        assert_eq!((hang.plugin.as_str(), hang.call), ("slow", "draft"));
        let text = hang.to_string();
        assert!(
            text.starts_with("plugin slow has been in `draft` for"),
            "{text}"
        );
        assert!(text.contains("(/a /b.so)\n  run without it"), "{text}");
    }

    #[test]
    fn a_call_that_shows_life_has_its_time_anew() {
        let calls = Calls::here();
        let limit = Duration::from_millis(20);
        seen(&origin(None), "open", || {
            std::thread::sleep(limit);
            assert!(calls.hang(limit, limit).is_some());
            calls.touch();
            // Generous: it has all of an hour left.
            let hour = Duration::from_secs(3600);
            assert!(calls.hang(hour, hour).is_none());
            assert!(calls.hang(NOW, NOW).unwrap().lasted < hour);
        });
        // With no call there is nothing to touch.
        calls.touch();
        assert!(calls.hang(NOW, NOW).is_none());
    }
}
