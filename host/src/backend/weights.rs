//! Slots that read checkpoints, for plugins and for the host's own models alike.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use abi_stable::std_types::{ROption, RStr, RString, RVec};
use plugin_api::abi::{DType, Fault, FaultCode, RawCheckpoint, RawTensor, Reply};
use plugin_api::{Tensor, guard};

use crate::checkpoint::{self, Checkpoint, TensorData};
use crate::error::LoadError;
use crate::text::Tokenizer;

use super::handle::{OpResult, op, take_error};
use super::native;

/// Hears the size of every piece of weights.
type Observer = Box<dyn Fn(u64)>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// While `body` runs, `observer` hears how many bytes of weights each read takes (on this thread).
pub fn on_weights_read<T>(observer: impl Fn(u64) + 'static, body: impl FnOnce() -> T) -> T {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            OBSERVER.with_borrow_mut(|slot| *slot = None);
        }
    }
    OBSERVER.with_borrow_mut(|slot| *slot = Some(Box::new(observer)));
    let _reset = Reset;
    body()
}

/// An open checkpoint for the host's own models, over the same table that plugins use.
pub fn share_checkpoint(checkpoint: Arc<Checkpoint>) -> plugin_api::Checkpoint {
    super::install();
    let path = checkpoint.path().to_string_lossy().into_owned();
    let raw = RawCheckpoint(Arc::into_raw(checkpoint).cast_mut().cast());
    // SAFETY: a live handle of this table, whose ownership moves into the result.
    unsafe { plugin_api::Checkpoint::from_raw(raw, path) }
}

/// The checkpoint that a caller lends.
fn lent<'a>(raw: RawCheckpoint) -> &'a Checkpoint {
    // SAFETY: handles come from `Arc::into_raw`, and the ABI says that a lent one is live for the
    // time of the call, which the result does not outlive.
    unsafe { &*raw.0.cast::<Checkpoint>() }
}

fn invalid(message: String) -> Fault {
    Fault {
        code: FaultCode::INVALID,
        message: message.into(),
    }
}

/// [`guard::catch`] for slots that reply with a fault.
fn reply<T>(body: impl FnOnce() -> Result<T, LoadError>) -> Reply<T> {
    match guard::catch(body) {
        Ok(outcome) => outcome.map_err(|e| invalid(e.to_string())).into(),
        Err(panic) => Reply::RErr(invalid(format!("panicked: {panic}"))),
    }
}

pub(super) extern "C" fn checkpoint_open(path: RStr<'_>) -> Reply<RawCheckpoint> {
    reply(|| {
        let checkpoint = Checkpoint::open(Path::new(path.as_str()))?;
        Ok(RawCheckpoint(
            Arc::into_raw(Arc::new(checkpoint)).cast_mut().cast(),
        ))
    })
}

pub(super) extern "C" fn checkpoint_drop(raw: RawCheckpoint) {
    // SAFETY: the caller owns the handle, which came from `Arc::into_raw`, and gives it up.
    drop(unsafe { Arc::from_raw(raw.0.cast::<Checkpoint>()) });
}

pub(super) extern "C" fn checkpoint_config(raw: RawCheckpoint) -> RString {
    lent(raw).config().to_string().into()
}

pub(super) extern "C" fn checkpoint_names(raw: RawCheckpoint) -> RVec<RString> {
    lent(raw).names().map(RString::from).collect()
}

pub(super) extern "C" fn checkpoint_tensor(raw: RawCheckpoint, name: RStr<'_>) -> RawTensor {
    op(|| {
        let checkpoint = lent(raw);
        let path = checkpoint.path().display();
        let tensor = checkpoint
            .tensor(name.as_str())
            .ok_or_else(|| format!("{path}: tensor {name} is missing"))?;
        let tensor = tensor.map_err(|e| e.to_string())?;
        OBSERVER.with_borrow(|observer| {
            if let Some(observer) = observer {
                observer(checkpoint.bytes_of(name.as_str()).unwrap_or(0));
            }
        });
        array(&tensor).map_err(|problem| format!("{path}: tensor {name}: {problem}"))
    })
}

pub(super) extern "C" fn checkpoint_bytes(raw: RawCheckpoint, prefix: RStr<'_>) -> u64 {
    let checkpoint = lent(raw);
    let names = checkpoint
        .names()
        .filter(|n| n.starts_with(prefix.as_str()));
    names.filter_map(|name| checkpoint.bytes_of(name)).sum()
}

/// A tensor of a file, in memory.
pub(crate) fn tensor(data: &TensorData) -> plugin_api::Result<Tensor> {
    // SAFETY: a handle of its own, which nobody else has.
    let tensor = unsafe { Tensor::from_raw(op(|| array(data))) };
    tensor.ok_or_else(|| plugin_api::Error::invalid(String::from(take_error())))
}

fn array(tensor: &TensorData) -> OpResult<mlx_rs::Array> {
    let dtype = match tensor.dtype {
        checkpoint::DType::F32 => DType::F32,
        checkpoint::DType::F16 => DType::F16,
        checkpoint::DType::BF16 => DType::BF16,
        checkpoint::DType::U8 => DType::U8,
        checkpoint::DType::U32 => DType::U32,
        checkpoint::DType::I32 => DType::I32,
        checkpoint::DType::Bool => DType::BOOL,
        checkpoint::DType::I64 => DType::I64,
        other => return Err(format!("elements of type {other} are not supported")),
    };
    let shape = tensor
        .shape
        .iter()
        .map(|&n| i32::try_from(n))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| format!("shape {:?} is too large", tensor.shape))?;
    native::filled(&shape, dtype, |out| tensor.write_to(out))
}

pub(super) extern "C" fn checkpoint_vocabulary(raw: RawCheckpoint) -> Reply<ROption<RString>> {
    reply(|| {
        let path = lent(raw).path();
        if !path.join("tokenizer.json").is_file() {
            return Ok(ROption::RNone);
        }
        let digest = Tokenizer::from_dir(path)?.table_digest();
        Ok(ROption::RSome(digest.into()))
    })
}
