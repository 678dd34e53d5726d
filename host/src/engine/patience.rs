//! Waiting for the engine thread, which a plugin that never returns would hold up for ever.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::thread::EngineError;
use crate::plugin::{Calls, Hang};

/// What a call of a plugin may usually take. Reading weights in it does not count.
pub const PLUGIN_TIMEOUT: Duration = Duration::from_secs(30);

/// What it may take when nobody wants what comes of it any more.
const GRACE: Duration = Duration::from_secs(1);

/// How often those who wait look at what the thread does.
const PACE: Duration = Duration::from_millis(50);

/// How long those who wait for an engine thread let its plugins take.
#[derive(Clone)]
pub(super) struct Patience {
    calls: Arc<Calls>,
    /// None: as long as they want.
    limit: Option<Duration>,
}

impl Patience {
    pub fn new(calls: Arc<Calls>, limit: Option<Duration>) -> Self {
        Self { calls, limit }
    }

    /// The call that takes too long. Before it does, the log speaks of it.
    fn hang(&self) -> Option<Hang> {
        let limit = self.limit?;
        self.calls.hang(limit / 3, limit)
    }

    /// The call that takes too long for nothing.
    pub fn hang_in_vain(&self) -> Option<Hang> {
        self.calls.hang(GRACE, GRACE)
    }

    /// What comes.
    ///
    /// # Errors
    /// The thread has ended, or a plugin holds it up.
    pub fn receive<T>(&self, from: &Receiver<T>) -> Result<T, EngineError> {
        let wait = Duration::MAX;
        let received = self.receive_within(wait, || false, from)?;
        received.ok_or(EngineError::Stopped)
    }

    /// What comes within `wait`. When `is_vain`, plugins have to hurry.
    ///
    /// # Errors
    /// As [`Patience::receive`].
    pub fn receive_within<T>(
        &self,
        wait: Duration,
        is_vain: impl Fn() -> bool,
        from: &Receiver<T>,
    ) -> Result<Option<T>, EngineError> {
        let begun = Instant::now();
        loop {
            let left = wait.saturating_sub(begun.elapsed());
            match from.recv_timeout(left.min(PACE)) {
                Ok(received) => return Ok(Some(received)),
                Err(RecvTimeoutError::Disconnected) => return Err(EngineError::Stopped),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let hang = match is_vain() {
                true => self.hang_in_vain(),
                false => self.hang(),
            };
            if let Some(hang) = hang {
                return Err(EngineError::Hung(hang));
            }
            if left <= PACE {
                return Ok(None);
            }
        }
    }
}
