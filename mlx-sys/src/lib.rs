//! Raw bindings to mlx-c, over the MLX of the official wheels. See the README for how they are found and linked.

#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
pub use bindings::*;

#[cfg(not(target_vendor = "apple"))]
mod off_apple;
#[cfg(not(target_vendor = "apple"))]
pub use off_apple::*;
