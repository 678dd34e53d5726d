//! Decoding: requests in, tokens out, drafted for where a drafter is mounted.
//!
//! One engine thread owns MLX and calls plugins; everything else talks to it through [`Engine`].

mod depth;
mod drafting;
mod group;
mod method;
mod patience;
mod prefix;
mod request;
mod round;
mod row;
mod scheduler;
mod stats;
mod thread;
mod totals;
mod untold;
mod waiting;

pub use depth::Costs;
pub use group::Group;
pub use method::Method;
pub use patience::PLUGIN_TIMEOUT;
pub use request::{Answer, DraftWith, Event, Failure, Finish, Request, RequestError, Token};
pub use stats::{Round, Stats};
pub use thread::{DrafterConfig, DrafterFacts, Engine, EngineConfig, EngineError, Limits, Running};
pub use totals::Totals;
