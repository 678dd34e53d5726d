//! The slot for self-attention over a cache: checks, and MLX's own kernels where the host has none
//! that fits.

use abi_stable::std_types::RVec;
use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::{Array, ops as mlx};
use plugin_api::abi::{self, RawTensor};

use super::handle::{Explain, Lent, OpResult, lent, lent_opt, ops};
use super::native;
use super::ops::{slice_array, slice_update_array};

/// The arguments of a call, as arrays.
pub(super) struct SelfAttention {
    pub q: Lent,
    pub k: Lent,
    pub v: Lent,
    pub keys: Lent,
    pub values: Lent,
    /// Weights for queries and keys, and epsilon.
    pub norms: Option<(Lent, Lent, f32)>,
    pub heads: i32,
    pub gated: bool,
    pub rope_dims: i32,
    pub rope_base: f32,
    pub rope_freqs: Option<Lent>,
    pub rope_scale: f32,
    pub offsets: Vec<i32>,
    pub window: i32,
    pub scale: f32,
}

impl SelfAttention {
    fn new(raw: &abi::Attend<'_>) -> OpResult<Self> {
        let norms = match (lent_opt(raw.q_norm)?, lent_opt(raw.k_norm)?) {
            (Some(q), Some(k)) => Some((q, k, raw.eps)),
            (None, None) => None,
            _ => return Err("one norm of two is absent".to_owned()),
        };
        let args = Self {
            q: lent(raw.q)?,
            k: lent(raw.k)?,
            v: lent(raw.v)?,
            keys: lent(raw.keys)?,
            values: lent(raw.values)?,
            norms,
            heads: raw.heads,
            gated: raw.gated,
            rope_dims: raw.rope_dims,
            rope_base: raw.rope_base,
            rope_freqs: lent_opt(raw.rope_freqs)?,
            rope_scale: raw.rope_scale,
            offsets: raw.offsets.to_vec(),
            window: raw.window,
            scale: raw.scale,
        };
        args.check(raw.kv_heads)?;
        Ok(args)
    }

    fn check(&self, kv_heads: i32) -> OpResult<()> {
        let shapes = || {
            format!(
                "attend of q {:?}, k {:?}, v {:?}, cached {:?} and {:?}, offsets {:?}",
                self.q.shape(),
                self.k.shape(),
                self.v.shape(),
                self.keys.shape(),
                self.values.shape(),
                self.offsets
            )
        };
        let (&[b, t, queries], &[_, heads, capacity, dim]) = (self.q.shape(), self.keys.shape())
        else {
            return Err(shapes());
        };
        let sides = if self.gated { 2 } else { 1 };
        let room = |&offset: &i32| offset >= 0 && offset <= capacity - t;
        let fits = heads == kv_heads
            && kv_heads > 0
            && self.heads > 0
            && self.heads % kv_heads == 0
            && i64::from(queries) == i64::from(self.heads) * i64::from(dim) * sides
            && self.k.shape() == [b, t, kv_heads * dim]
            && self.v.shape() == self.k.shape()
            && self.keys.shape()[0] == b
            && self.values.shape() == self.keys.shape()
            && self.offsets.len() == b as usize
            && self.offsets.iter().all(room)
            && self.rope_dims >= 0
            && self.rope_dims <= dim
            && self.rope_dims % 2 == 0
            && self.window >= 0;
        if fits { Ok(()) } else { Err(shapes()) }
    }

    /// Step by step.
    fn by_mlx(&self) -> OpResult<Vec<Array>> {
        let (b, t) = (self.q.shape()[0], self.q.shape()[1]);
        let (kv_heads, dim) = (self.keys.shape()[1], self.keys.shape()[3]);
        let by_head = |x: &Array, heads: i32| x.reshape(&[b, t, heads, -1]).explain();
        let mut q = by_head(&self.q, self.heads)?;
        let mut gate = None;
        if self.gated {
            let [from, to] = [[0, 0, 0, dim], [b, t, self.heads, 2 * dim]];
            let flat = [b, t, self.heads * dim];
            gate = Some(slice_array(&q, &from, &to)?.reshape(&flat).explain()?);
            q = slice_array(&q, &[0; 4], &[b, t, self.heads, dim])?;
        }
        let (mut k, v) = (by_head(&self.k, kv_heads)?, by_head(&self.v, kv_heads)?);
        if let Some((q_norm, k_norm, eps)) = &self.norms {
            q = fast::rms_norm(&q, Some(&**q_norm), *eps).explain()?;
            k = fast::rms_norm(&k, Some(&**k_norm), *eps).explain()?;
        }
        let offsets = Array::from_slice(&self.offsets, &[b]);
        let turned = |x: &Array| -> OpResult<Array> {
            let x = x.transpose_axes(&[0, 2, 1, 3]).explain()?;
            if self.rope_dims == 0 {
                return Ok(x);
            }
            let base = self.rope_freqs.is_none().then_some(self.rope_base);
            let freqs = self.rope_freqs.as_deref();
            let (dims, scale) = (self.rope_dims, self.rope_scale);
            fast::rope_dynamic(&x, dims, false, base, scale, &offsets, freqs).explain()
        };
        let (q, k) = (turned(&q)?, turned(&k)?);
        let v = v.transpose_axes(&[0, 2, 1, 3]).explain()?;
        let keys = self.written(&self.keys, &k)?;
        let values = self.written(&self.values, &v)?;
        let span = self.offsets.iter().max().copied().unwrap_or(0) + t;
        let seen = [b, kv_heads, span, dim];
        let mask = self.mask(span, t)?;
        let mixed = fast::scaled_dot_product_attention(
            &q,
            &slice_array(&keys, &[0; 4], &seen)?,
            &slice_array(&values, &[0; 4], &seen)?,
            self.scale,
            ScaledDotProductAttentionMask::Array(&mask),
            None,
        )
        .explain()?;
        let mixed = mixed.transpose_axes(&[0, 2, 1, 3]).explain()?;
        let mut mixed = mixed.reshape(&[b, t, self.heads * dim]).explain()?;
        if let Some(gate) = gate {
            let open = mlx::sigmoid(&gate).explain()?;
            mixed = mixed.multiply(&open).explain()?;
        }
        Ok(vec![mixed, keys, values])
    }

    /// The cache with a pass's columns at each row's offset.
    fn written(&self, cache: &Array, columns: &Array) -> OpResult<Array> {
        let first = self.offsets[0];
        if self.offsets.iter().all(|&offset| offset == first) {
            return slice_update_array(cache, columns, &[0, 0, first, 0]);
        }
        let mut cache = cache.clone();
        let &[_, heads, width, dim] = columns.shape() else {
            return Err("columns of another rank".to_owned());
        };
        for (row, &offset) in (0..).zip(&self.offsets) {
            let own = slice_array(columns, &[row, 0, 0, 0], &[row + 1, heads, width, dim])?;
            cache = slice_update_array(&cache, &own, &[row, 0, offset, 0])?;
        }
        Ok(cache)
    }

    /// `[B, 1, T, span]`, true where a query may look.
    fn mask(&self, span: i32, t: i32) -> OpResult<Array> {
        let rows = self.offsets.len() as i32;
        let keys = mlx::arange::<_, i32>(0, span, 1).explain()?;
        let columns = mlx::arange::<_, i32>(0, t, 1).explain()?;
        let columns = columns.reshape(&[1, 1, t, 1]).explain()?;
        let own = Array::from_slice(&self.offsets, &[rows, 1, 1, 1]);
        let own = own.add(&columns).explain()?;
        let keys = keys.reshape(&[1, 1, 1, span]).explain()?;
        let past = keys.le(&own).explain()?;
        if self.window == 0 {
            return Ok(past);
        }
        let first = own.subtract(Array::from_int(self.window)).explain()?;
        past.logical_and(&keys.gt(&first).explain()?).explain()
    }
}

pub(super) extern "C" fn attend(args: &abi::Attend<'_>) -> RVec<RawTensor> {
    ops(|| {
        let attention = SelfAttention::new(args)?;
        match native::attend(&attention) {
            Some(mixed) => mixed,
            None => attention.by_mlx(),
        }
    })
}
