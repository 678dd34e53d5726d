//! The host's own CPU kernels as nodes of MLX's graph: the Rust side of `primitive.cpp`.

use std::ffi::{c_int, c_void};

use mlx_rs::{Array, Dtype};
use plugin_api::guard;

use crate::backend::handle::OpResult;

/// A kernel with everything it knows when the graph is built. It runs later, on the stream's thread.
pub(super) trait Kernel: Send + Sync + 'static {
    /// Computes the outputs.
    ///
    /// # Safety
    /// The buffers are those of the arrays that [`node`] was given, in the same order.
    unsafe fn run(&self, buffers: &Buffers<'_>);
}

/// The buffers of a running kernel.
pub(super) struct Buffers<'a> {
    inputs: &'a [*const c_void],
    strides: &'a [*const i64],
    outputs: &'a [*mut c_void],
}

impl Buffers<'_> {
    /// The first `len` elements of an input.
    ///
    /// # Safety
    /// The input has elements of type `T`, at least `len` of them from its first one on.
    pub unsafe fn input<T>(&self, index: usize, len: usize) -> &[T] {
        // SAFETY: the caller's promise; MLX aligns buffers, and keeps them while the kernel runs.
        unsafe { std::slice::from_raw_parts(self.inputs[index].cast(), len) }
    }

    /// The strides of an input in elements; none when it is row-contiguous.
    ///
    /// # Safety
    /// The input has `N` axes.
    pub unsafe fn strides<const N: usize>(&self, index: usize) -> Option<[i64; N]> {
        let strides = self.strides[index];
        // SAFETY: not null, hence one entry per axis.
        (!strides.is_null()).then(|| unsafe { *strides.cast::<[i64; N]>() })
    }

    /// The first `len` elements of an output.
    ///
    /// # Safety
    /// The output has `len` elements of type `T`, and no other slice of it is alive.
    #[allow(clippy::mut_from_ref)] // the buffers are disjoint, and the caller takes each once
    pub unsafe fn output<T>(&self, index: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller's promise; as above.
        unsafe { std::slice::from_raw_parts_mut(self.outputs[index].cast(), len) }
    }
}

/// What a kernel makes.
pub(super) struct Output<'a> {
    pub shape: &'a [i32],
    pub dtype: Dtype,
    /// The input whose content it starts with, in the same buffer if nobody else holds that.
    pub from: Option<usize>,
}

#[repr(C)]
struct RawOutput {
    shape: *const c_int,
    rank: usize,
    dtype: c_int,
    in_place: c_int,
}

type Run = unsafe extern "C" fn(
    *const c_void,
    *const *const c_void,
    *const *const i64,
    *const *mut c_void,
);

unsafe extern "C" {
    fn mlxhost_primitive(
        handles: *mut *mut c_void,
        outputs: *const RawOutput,
        output_count: usize,
        inputs: *const *mut c_void,
        input_count: usize,
        strided: u64,
        run: Run,
        params: *mut c_void,
        drop: unsafe extern "C" fn(*mut c_void),
    ) -> c_int;
}

/// What the other side hands back to `run`.
struct Params<K> {
    kernel: K,
    inputs: usize,
    outputs: usize,
}

unsafe extern "C" fn run<K: Kernel>(
    params: *const c_void,
    inputs: *const *const c_void,
    strides: *const *const i64,
    outputs: *const *mut c_void,
) {
    // SAFETY: `params` is the box that `node` made for this very K, and the three lists have as many
    // entries as it says.
    let outcome = guard::catch(|| unsafe {
        let params = &*params.cast::<Params<K>>();
        params.kernel.run(&Buffers {
            inputs: std::slice::from_raw_parts(inputs, params.inputs),
            strides: std::slice::from_raw_parts(strides, params.inputs),
            outputs: std::slice::from_raw_parts(outputs, params.outputs),
        });
    });
    if let Err(panic) = outcome {
        // The outputs are not what they should be, and there is no way to tell the graph.
        eprintln!("mlxhost: a kernel panicked: {panic}");
        std::process::abort();
    }
}

unsafe extern "C" fn drop_params<K>(params: *mut c_void) {
    // SAFETY: called once with the box that `node` made.
    drop(unsafe { Box::from_raw(params.cast::<Params<K>>()) });
}

/// A graph node that runs a kernel. Inputs whose bit is set in `strided` may come strided, as long as
/// their last axis is contiguous; the others are packed first.
pub(super) fn node<K: Kernel>(
    kernel: K,
    inputs: &[&Array],
    strided: u64,
    outputs: &[Output<'_>],
) -> OpResult<Vec<Array>> {
    let raw_inputs: Vec<_> = inputs.iter().map(|array| array.as_ptr().ctx).collect();
    let raw_outputs: Vec<_> = outputs
        .iter()
        .map(|output| RawOutput {
            shape: output.shape.as_ptr(),
            rank: output.shape.len(),
            dtype: output.dtype as c_int,
            in_place: output.from.map_or(-1, |index| index as c_int),
        })
        .collect();
    let params = Box::new(Params {
        kernel,
        inputs: inputs.len(),
        outputs: outputs.len(),
    });
    let mut handles = vec![std::ptr::null_mut(); outputs.len()];
    // SAFETY: live arrays, lists of the stated lengths, and a box that `run` and `drop_params` of the
    // same K understand.
    let status = unsafe {
        mlxhost_primitive(
            handles.as_mut_ptr(),
            raw_outputs.as_ptr(),
            raw_outputs.len(),
            raw_inputs.as_ptr(),
            raw_inputs.len(),
            strided,
            run::<K>,
            Box::into_raw(params).cast(),
            drop_params::<K>,
        )
    };
    if status != 0 {
        return Err("MLX refused a kernel".to_owned());
    }
    // SAFETY: new arrays, handed over.
    let own = |ctx| unsafe { Array::from_ptr(mlx_sys::mlx_array { ctx }) };
    Ok(handles.into_iter().map(own).collect())
}
