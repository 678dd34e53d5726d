//! The op table over MLX: the one place that knows mlx-rs.
//!
//! [`install`] fills [`HostApi`] and makes it known to this image, so that the host's own models
//! and every plugin use the same `Tensor`. All slots but `log` run on the engine thread, on MLX's default
//! stream.

mod attend;
mod delta;
mod experts;
mod handle;
mod kernels;
mod native;
mod ops;
mod project;
mod quantize;
mod stored;
mod weights;

use abi_stable::prefix_type::WithMetadata;
use abi_stable::std_types::RStr;
use plugin_api::abi::{HostApi, HostApiRef, LogLevel};
use plugin_api::{Tensor, guard};

pub(crate) use handle::fail_with;
pub use native::with_mlx_kernels;
pub use quantize::{Affine, bytes_of};
pub(crate) use weights::tensor;
pub use weights::{on_weights_read, share_checkpoint};

/// The table and its owner.
struct Table;

impl Table {
    abi_stable::staticref!(const API: WithMetadata<HostApi> = WithMetadata::new(HostApi {
        take_error: handle::take_error,
        log,
        memory_used,
        clone_tensor: ops::clone_tensor,
        drop_tensor: ops::drop_tensor,
        tensor_info: ops::tensor_info,
        from_bytes: ops::from_bytes,
        full: ops::full,
        arange: ops::arange,
        eval: ops::eval,
        read: ops::read,
        astype: ops::astype,
        reshape: ops::reshape,
        transpose: ops::transpose,
        broadcast_to: ops::broadcast_to,
        concat: ops::concat,
        slice: ops::slice,
        slice_update: ops::slice_update,
        take: ops::take,
        take_along_axis: ops::take_along_axis,
        unary: ops::unary,
        binary: ops::binary,
        select: ops::select,
        reduce: ops::reduce,
        sort: ops::sort,
        cumsum: ops::cumsum,
        softmax: ops::softmax,
        matmul: kernels::matmul,
        project: project::project,
        route: experts::route,
        experts: experts::experts,
        dequantize: kernels::dequantize,
        rms_norm: kernels::rms_norm,
        rope: kernels::rope,
        attention: kernels::attention,
        attend: attend::attend,
        gated_delta: delta::gated_delta,
        checkpoint_open: weights::checkpoint_open,
        checkpoint_drop: weights::checkpoint_drop,
        checkpoint_config: weights::checkpoint_config,
        checkpoint_names: weights::checkpoint_names,
        checkpoint_tensor: weights::checkpoint_tensor,
        checkpoint_bytes: weights::checkpoint_bytes,
        checkpoint_vocabulary: weights::checkpoint_vocabulary,
    }));
}

/// The host's table, the same one for every plugin and for the life of the process.
pub fn api() -> HostApiRef {
    HostApiRef(Table::API.as_prefix())
}

/// Bytes that MLX keeps of what was given back to it, where that is the system's memory: enough for the tensors
/// of a pass. Caches that have grown out of their buffers would be kept, too, and never used again.
const KEPT: usize = 4 << 20;

/// Makes the table known to this image; `Tensor`s work from then on.
pub fn install() {
    if native::enabled() {
        // A limit that can't be set costs memory, nothing else.
        let _ = mlx_rs::memory::set_cache_limit(KEPT);
    }
    plugin_api::install(api());
}

/// Arranges a loaded model's weights in memory for the kernels that will read them.
///
/// # Errors
/// There is no memory.
pub(crate) fn settle(weights: &[&Tensor]) -> plugin_api::Result<()> {
    if !native::enabled() {
        return Ok(());
    }
    let arrays = weights.iter().map(|tensor| handle::lent(tensor.raw()));
    let arrays = arrays.collect::<Result<Vec<_>, _>>();
    let settled = arrays.and_then(|arrays| {
        let arrays: Vec<_> = arrays.iter().map(|array| array.array()).collect();
        native::settle(&arrays)
    });
    settled.map_err(plugin_api::Error::failed)
}

/// While it lives, this thread may have work in the air; its end waits for that, as the end of the
/// process takes from MLX's threads what they work with. To be made after the first op: before, MLX
/// has no stream here and the binding no way to hear of that.
pub(crate) struct Finish;

impl Drop for Finish {
    fn drop(&mut self) {
        let stream = mlx_rs::Stream::thread_local_or_default();
        // SAFETY: a live stream. A failure was reported where the work was waited for, or to nobody.
        unsafe { mlx_sys::mlx_synchronize(stream.as_ptr()) };
    }
}

/// Ends the process now, whatever its other threads do. MLX's handlers at an exit would take from them what they
/// compute with; and where a plugin never returns, nobody can wait for them. Flush standard output before.
pub fn leave(code: i32) -> ! {
    // SAFETY: of the C library; it may be called at any time and from any thread.
    unsafe extern "C" {
        safe fn _exit(code: i32) -> !;
    }
    _exit(code)
}

/// Bytes that MLX holds for arrays now.
pub(crate) extern "C" fn memory_used() -> u64 {
    mlx_rs::memory::active_memory().unwrap_or(0) as u64
}

/// The most bytes that MLX has held for arrays since the start.
pub fn peak_memory() -> u64 {
    mlx_rs::memory::peak_memory().unwrap_or(0) as u64
}

/// Called from any thread.
extern "C" fn log(level: LogLevel, target: RStr<'_>, message: RStr<'_>) {
    // For the user's terminal: one line each, whatever is in it. Made only where the level is wanted: plugins
    // hand over all that they and their dependencies say.
    let line = || {
        let one_line = crate::text::one_line;
        format!("plugin {}: {}", one_line(&target), one_line(&message))
    };
    // A subscriber is code of whoever embeds the engine: a panic in it must not reach the plugin.
    let _ = guard::catch(|| match level {
        LogLevel::ERROR => tracing::error!("{}", line()),
        LogLevel::WARN => tracing::warn!("{}", line()),
        LogLevel::INFO => tracing::info!("{}", line()),
        LogLevel::DEBUG => tracing::debug!("{}", line()),
        _ => tracing::trace!("{}", line()),
    });
}

#[cfg(test)]
mod tests;
