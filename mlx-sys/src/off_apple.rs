//! What mlx-rs expects of mlx-c and of the system, and only Apple's has.
#![allow(non_camel_case_types)]

use crate::{mlx_array, mlx_array_data_uint16, mlx_array_item_uint16};
use std::{
    ffi::c_int,
    time::{SystemTime, UNIX_EPOCH},
};

/// The bits of an IEEE half, as bindgen shows C's `__fp16`.
#[repr(transparent)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct float16_t(pub u16);

/// The bits of a bfloat16, as bindgen shows C's `__bf16`.
pub type bfloat16_t = u16;

/// # Safety
/// As [`mlx_array_item_uint16`].
pub unsafe fn mlx_array_item_float16(res: *mut float16_t, arr: mlx_array) -> c_int {
    // SAFETY: the caller's promise; the struct is transparent, and MLX copies the 16 bits without looking at the dtype.
    unsafe { mlx_array_item_uint16(res.cast(), arr) }
}

/// # Safety
/// As [`mlx_array_item_uint16`].
pub unsafe fn mlx_array_item_bfloat16(res: *mut bfloat16_t, arr: mlx_array) -> c_int {
    // SAFETY: as above.
    unsafe { mlx_array_item_uint16(res, arr) }
}

/// # Safety
/// As [`mlx_array_data_uint16`].
pub unsafe fn mlx_array_data_float16(arr: mlx_array) -> *const float16_t {
    // SAFETY: as above.
    unsafe { mlx_array_data_uint16(arr).cast() }
}

/// # Safety
/// As [`mlx_array_data_uint16`].
pub unsafe fn mlx_array_data_bfloat16(arr: mlx_array) -> *const bfloat16_t {
    // SAFETY: as above.
    unsafe { mlx_array_data_uint16(arr) }
}

/// The clock that mlx-rs seeds its random state with.
// SAFETY: no other library off Apple's systems has a symbol of this name.
#[unsafe(no_mangle)]
pub extern "C" fn mach_approximate_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |age| age.as_nanos() as u64)
}
