//! The host's table as this library image sees it, and the log.

use std::sync::OnceLock;

use crate::abi::{HostApiRef, LogLevel};
use crate::error::{Error, Result};

static HOST: OnceLock<HostApiRef> = OnceLock::new();

/// Makes the host's table known to this image. The first call wins: there is one host per process.
///
/// The host calls it for itself, [`crate::export_plugin!`] does for a plugin.
pub fn install(api: HostApiRef) {
    let _ = HOST.set(api);
}

/// The installed table.
///
/// # Panics
/// When no host is installed, which inside a loaded plugin cannot be.
#[inline]
pub(crate) fn api() -> HostApiRef {
    *HOST.get().expect("no host is installed in this image")
}

/// The error of an op that has just failed.
#[cold]
pub(crate) fn op_error(op: &str) -> Error {
    let message = api().take_error()();
    Error::failed(if message.is_empty() {
        format!("{op} failed")
    } else {
        format!("{op}: {message}")
    })
}

/// `Ok` when the op said yes.
pub(crate) fn check(op: &str, ok: bool) -> Result<()> {
    if ok { Ok(()) } else { Err(op_error(op)) }
}

/// Writes a line to the host's log; the target is the calling crate's name. From any thread. Without a host, such
/// as in a plugin's own tests, the line is dropped.
///
/// [`warn!`](crate::warn) and [`debug!`](crate::debug) write it in short.
pub fn log(level: LogLevel, target: &str, message: &str) {
    if let Some(api) = HOST.get() {
        api.log()(level, target.into(), message.into());
    }
}

/// Bytes of tensor memory now in use by the process.
pub fn memory_used() -> u64 {
    api().memory_used()()
}

/// Logs a warning through the host.
///
/// ```
/// plugin_api::warn!("{} of {} tensors are not used", 2, 14);
/// ```
#[macro_export]
macro_rules! warn {
    ($($arg:tt)*) => {
        $crate::log($crate::abi::LogLevel::WARN, env!("CARGO_PKG_NAME"), &format!($($arg)*))
    };
}

/// Logs a line for developers through the host, shown with `MLXHOST_LOG=debug`.
///
/// ```
/// plugin_api::debug!("drafting with {} ids", 8192);
/// ```
#[macro_export]
macro_rules! debug {
    ($($arg:tt)*) => {
        $crate::log($crate::abi::LogLevel::DEBUG, env!("CARGO_PKG_NAME"), &format!($($arg)*))
    };
}
