//! What a plugin says through the crates `log` and `tracing` goes to the host's log.
//!
//! A library image has globals of its own: where the host's lines go, a plugin's don't, unless someone hands them on.
//! Lines are made on the plugin's side, whole; what crosses is a text. So a value that panics while it is shown
//! panics where any other code of the plugin would.

use std::fmt;
use std::sync::OnceLock;

use crate::abi::LogLevel;
use crate::host;

/// Whose lines these are.
#[derive(Debug)]
struct Plugin {
    name: &'static str,
    /// The crate, as lines of its own name it.
    root: &'static str,
}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();

/// Hands on all lines from now on, as those of the plugin `name`, whose code is below the crate of `module`.
///
/// Whatever set itself up before, such as a constructor of the library, keeps getting them.
pub(crate) fn install(name: &'static str, module: &'static str) {
    let root = root(module);
    if PLUGIN.set(Plugin { name, root }).is_ok() {
        #[cfg(feature = "log")]
        logging::install();
        #[cfg(feature = "tracing")]
        tracing::install();
    }
}

/// The crate of a module's path.
fn root(module: &str) -> &str {
    module.split_once("::").map_or(module, |(root, _)| root)
}

/// Hands on a line. One of another crate says where it comes from.
#[cfg_attr(not(any(feature = "log", feature = "tracing")), allow(dead_code))]
fn line(level: LogLevel, target: &str, text: &dyn fmt::Display) {
    let Some(plugin) = PLUGIN.get() else {
        return;
    };
    let text = match root(target) == plugin.root {
        true => text.to_string(),
        false => format!("{target}: {text}"),
    };
    host::log(level, plugin.name, &text);
}

#[cfg(feature = "log")]
mod logging {
    use ::log::{Level, LevelFilter, Log, Metadata, Record};

    use crate::abi::LogLevel;

    struct Forward;

    impl Log for Forward {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &Record<'_>) {
            let level = match record.level() {
                Level::Error => LogLevel::ERROR,
                Level::Warn => LogLevel::WARN,
                Level::Info => LogLevel::INFO,
                Level::Debug => LogLevel::DEBUG,
                Level::Trace => LogLevel::TRACE,
            };
            super::line(level, record.target(), record.args());
        }

        fn flush(&self) {}
    }

    pub(super) fn install() {
        if ::log::set_logger(&Forward).is_ok() {
            // What is wanted, only the host knows: it drops the rest.
            ::log::set_max_level(LevelFilter::Trace);
        }
    }
}

#[cfg(feature = "tracing")]
mod tracing {
    use std::fmt::{self, Write};

    use tracing_core::dispatcher::{Dispatch, set_global_default};
    use tracing_core::field::{Field, Visit};
    use tracing_core::span::{Attributes, Id, Record};
    use tracing_core::{Event, Level, Metadata, Subscriber};

    use crate::abi::LogLevel;

    /// Hands on events. Spans are let be: the host's log has lines and nothing around them.
    struct Forward;

    impl Subscriber for Forward {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let metadata = event.metadata();
            let level = match *metadata.level() {
                Level::ERROR => LogLevel::ERROR,
                Level::WARN => LogLevel::WARN,
                Level::INFO => LogLevel::INFO,
                Level::DEBUG => LogLevel::DEBUG,
                Level::TRACE => LogLevel::TRACE,
            };
            let mut text = Text::default();
            event.record(&mut text);
            super::line(level, metadata.target(), &text);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    /// An event's message and its fields.
    #[derive(Default)]
    struct Text {
        message: String,
        fields: String,
    }

    impl Visit for Text {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            // Writing into a string fails only where the value itself says so: it then stays half shown.
            let _ = match field.name() {
                "message" => write!(self.message, "{value:?}"),
                name => write!(self.fields, " {name}={value:?}"),
            };
        }
    }

    impl fmt::Display for Text {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(&self.message)?;
            f.write_str(&self.fields)
        }
    }

    pub(super) fn install() {
        // Fails where there is a subscriber already.
        let _ = set_global_default(Dispatch::new(Forward));
    }
}
