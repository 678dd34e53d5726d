//! Decoding: requests in, tokens out, drafted for where a drafter is mounted.
//!
//! One engine thread owns MLX and calls plugins; everything else talks to it through [`Engine`].

mod depth;
mod drafting;
mod group;
mod request;
mod round;
mod row;
mod scheduler;
mod stats;
mod thread;

pub use depth::Costs;
pub use group::Group;
pub use request::{Answer, Event, Finish, Request, RequestError, Token};
pub use stats::{Round, Stats};
pub use thread::{Engine, EngineConfig, EngineError, Limits, Running};
