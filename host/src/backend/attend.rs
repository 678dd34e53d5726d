//! The slot for self-attention over a cache: checks, and MLX's own kernels where the host has none
//! that fits.

use abi_stable::std_types::RVec;
use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::{Array, ops as mlx};
use plugin_api::abi::{self, RawTensor};

use super::handle::{Explain, Lent, OpResult, lent, lent_opt, ops};
use super::native;
use super::ops::{slice_array, slice_update_array};
use crate::kernels::attend::fits;

/// The arguments of a call, as arrays.
pub(super) struct SelfAttention {
    pub q: Lent,
    pub k: Option<Lent>,
    pub v: Option<Lent>,
    pub keys: Lent,
    pub values: Lent,
    pub q_norm: Option<Lent>,
    pub k_norm: Option<Lent>,
    pub v_norm: bool,
    pub eps: f32,
    pub heads: i32,
    pub gated: bool,
    pub rope_dims: i32,
    pub rope_base: f32,
    pub rope_freqs: Option<Lent>,
    pub rope_scale: f32,
    pub positions: Vec<i32>,
    pub offsets: Vec<i32>,
    pub window: i32,
    pub scale: f32,
}

impl SelfAttention {
    fn new(raw: &abi::Attend<'_>) -> OpResult<Self> {
        let args = Self {
            q: lent(raw.q)?,
            k: lent_opt(raw.k)?,
            v: lent_opt(raw.v)?,
            keys: lent(raw.keys)?,
            values: lent(raw.values)?,
            q_norm: lent_opt(raw.q_norm)?,
            k_norm: lent_opt(raw.k_norm)?,
            v_norm: raw.v_norm,
            eps: raw.eps,
            heads: raw.heads,
            gated: raw.gated,
            rope_dims: raw.rope_dims,
            rope_base: raw.rope_base,
            rope_freqs: lent_opt(raw.rope_freqs)?,
            rope_scale: raw.rope_scale,
            positions: raw.positions.to_vec(),
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
                self.k.as_deref().map(Array::shape),
                self.v.as_deref().map(Array::shape),
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
        let alike = |x: &Array| x.shape() == [b, t, kv_heads * dim];
        let fits = heads == kv_heads
            && kv_heads > 0
            && self.heads > 0
            && self.heads % kv_heads == 0
            && i64::from(queries) == i64::from(self.heads) * i64::from(dim) * sides
            && self.k.as_deref().is_none_or(alike)
            && self.v.as_deref().is_none_or(alike)
            && (self.k.is_some() || self.v.is_none())
            && self.keys.shape()[0] == b
            && self.values.shape() == self.keys.shape()
            && self.offsets.len() == b as usize
            && self.positions.len() == b as usize
            && self.rope_dims >= 0
            && self.rope_dims <= dim
            && self.rope_dims % 2 == 0
            && self.window >= 0
            && fits(
                &self.offsets,
                t as usize,
                capacity as usize,
                self.window as usize,
            );
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
        let normed = |x: Array, weight: &Option<Lent>| match weight {
            Some(weight) => fast::rms_norm(&x, Some(&**weight), self.eps).explain(),
            None => Ok(x),
        };
        q = normed(q, &self.q_norm)?;
        let positions = Array::from_slice(&self.positions, &[b]);
        let turned = |x: &Array| -> OpResult<Array> {
            let x = x.transpose_axes(&[0, 2, 1, 3]).explain()?;
            if self.rope_dims == 0 {
                return Ok(x);
            }
            let base = self.rope_freqs.is_none().then_some(self.rope_base);
            let freqs = self.rope_freqs.as_deref();
            let (dims, scale) = (self.rope_dims, self.rope_scale);
            fast::rope_dynamic(&x, dims, false, base, scale, &positions, freqs).explain()
        };
        let q = turned(&q)?;
        let mut caches = vec![Array::clone(&self.keys), Array::clone(&self.values)];
        if let Some(k) = &self.k {
            let mut v = by_head(self.v.as_ref().unwrap_or(k), kv_heads)?;
            if self.v_norm {
                v = fast::rms_norm(&v, None::<&Array>, self.eps).explain()?;
            }
            let v = v.transpose_axes(&[0, 2, 1, 3]).explain()?;
            let k = turned(&normed(by_head(k, kv_heads)?, &self.k_norm)?)?;
            caches = vec![
                self.written(&self.keys, &k)?,
                self.written(&self.values, &v)?,
            ];
        }
        let (span, mask) = self.mask(t)?;
        let seen = [b, kv_heads, span, dim];
        let mixed = fast::scaled_dot_product_attention(
            &q,
            &slice_array(&caches[0], &[0; 4], &seen)?,
            &slice_array(&caches[1], &[0; 4], &seen)?,
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
        let mut all = vec![mixed];
        if self.k.is_some() {
            all.append(&mut caches);
        }
        Ok(all)
    }

    /// The cache with a pass's columns at each row's offset.
    fn written(&self, cache: &Array, columns: &Array) -> OpResult<Array> {
        let &[_, heads, width, dim] = columns.shape() else {
            return Err("columns of another rank".to_owned());
        };
        let (first, capacity) = (self.offsets[0], cache.shape()[2]);
        if first + width <= capacity && self.offsets.iter().all(|&offset| offset == first) {
            return slice_update_array(cache, columns, &[0, 0, first, 0]);
        }
        let mut cache = cache.clone();
        for (row, &offset) in (0..).zip(&self.offsets) {
            // Up to the last column of the cache, then on from its first one.
            let at = offset % capacity;
            let split = width.min(capacity - at);
            for (from, to, at) in [(0, split, at), (split, width, 0)] {
                if from < to {
                    let (start, stop) = ([row, 0, from, 0], [row + 1, heads, to, dim]);
                    let part = slice_array(columns, &start, &stop)?;
                    cache = slice_update_array(&cache, &part, &[row, 0, at, 0])?;
                }
            }
        }
        Ok(cache)
    }

    /// How many columns of the caches there are to look at, and `[B, 1, T, columns]`, true where a query
    /// may look.
    fn mask(&self, t: i32) -> OpResult<(i32, Array)> {
        let capacity = self.keys.shape()[2];
        let longest = self.offsets.iter().max().copied().unwrap_or(0) + t;
        let span = longest.min(capacity);
        let window = if self.window == 0 {
            i32::MAX
        } else {
            self.window
        };
        let mut mask = Vec::with_capacity(self.offsets.len() * (t * span) as usize);
        for &offset in &self.offsets {
            let last = offset + t - 1;
            for own in offset..=last {
                mask.extend((0..span).map(|column| {
                    // The last position that was put there.
                    let position = last - (last - column).rem_euclid(capacity);
                    position >= 0 && position <= own && own - position < window
                }));
            }
        }
        let shape = [self.offsets.len() as i32, 1, t, span];
        Ok((span, Array::from_slice(&mask, &shape)))
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
