//! The slot for self-attention over a cache: checks, and MLX's own kernels where the host has none
//! that fits.

use abi_stable::std_types::RVec;
use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::{Array, ops as mlx};
use plugin_api::abi::{self, RawTensor};

use super::handle::{Explain, Lent, OpResult, lent, lent_opt, ops};
use super::native;
use super::ops::{slice_array, slice_update_array};
use crate::kernels::attend::{fits, fits_ends};

/// The arguments of a call, as arrays.
pub(super) struct SelfAttention {
    pub q: Option<Lent>,
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
    /// None: each column sees itself and what lies before it.
    pub ends: Option<Vec<i32>>,
    pub window: i32,
    pub scale: f32,
}

impl SelfAttention {
    fn new(raw: &abi::Attend<'_>) -> OpResult<Self> {
        let args = Self {
            q: lent_opt(raw.q)?,
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
            ends: (!raw.ends.is_empty()).then(|| raw.ends.to_vec()),
            window: raw.window,
            scale: raw.scale,
        };
        args.check(raw.kv_heads)?;
        Ok(args)
    }

    fn check(&self, kv_heads: i32) -> OpResult<()> {
        let shapes = || {
            format!(
                "attend of q {:?}, k {:?}, v {:?}, cached {:?} and {:?}, offsets {:?}, ends {:?}",
                self.q.as_deref().map(Array::shape),
                self.k.as_deref().map(Array::shape),
                self.v.as_deref().map(Array::shape),
                self.keys.shape(),
                self.values.shape(),
                self.offsets,
                self.ends
            )
        };
        let (Some(&[b, t, _]), &[_, heads, capacity, dim]) =
            (self.columns().map(Array::shape), self.keys.shape())
        else {
            return Err(shapes());
        };
        let sides = if self.gated { 2 } else { 1 };
        let queries = |q: &Array| match q.shape() {
            &[rows, columns, queries] => {
                let wanted = i64::from(self.heads) * i64::from(dim) * sides;
                rows == b && columns == t && i64::from(queries) == wanted
            }
            _ => false,
        };
        let alike = |x: &Array| x.shape() == [b, t, kv_heads * dim];
        let fits = heads == kv_heads
            && kv_heads > 0
            && self.heads > 0
            && self.heads % kv_heads == 0
            && self.q.as_deref().is_none_or(queries)
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
            && self
                .ends
                .as_deref()
                .is_none_or(|ends| fits_ends(ends, &self.offsets, t as usize))
            && fits(
                &self.offsets,
                t as usize,
                capacity as usize,
                self.window as usize,
            );
        if fits { Ok(()) } else { Err(shapes()) }
    }

    /// One of the projections, which tells rows and columns.
    pub fn columns(&self) -> Option<&Array> {
        self.q.as_deref().or(self.k.as_deref())
    }

    /// Step by step.
    fn by_mlx(&self) -> OpResult<Vec<Array>> {
        let caches = self.updated()?;
        let mut all = Vec::with_capacity(3);
        if let Some(q) = &self.q {
            all.push(self.mixed(q, &caches)?);
        }
        if self.k.is_some() {
            all.extend(caches);
        }
        Ok(all)
    }

    /// `[B, T, heads * D]` as `[B, T, heads, D]`.
    fn by_head(&self, x: &Array, heads: i32) -> OpResult<Array> {
        let shape = x.shape();
        x.reshape(&[shape[0], shape[1], heads, -1]).explain()
    }

    fn normed(&self, x: Array, weight: Option<&Lent>) -> OpResult<Array> {
        match weight {
            Some(weight) => fast::rms_norm(&x, Some(&**weight), self.eps).explain(),
            None => Ok(x),
        }
    }

    /// `[B, T, heads, D]` rotated, as `[B, heads, T, D]`.
    fn turned(&self, x: &Array) -> OpResult<Array> {
        let x = x.transpose_axes(&[0, 2, 1, 3]).explain()?;
        if self.rope_dims == 0 {
            return Ok(x);
        }
        let positions = Array::from_slice(&self.positions, &[self.positions.len() as i32]);
        let base = self.rope_freqs.is_none().then_some(self.rope_base);
        let freqs = self.rope_freqs.as_deref();
        let (dims, scale) = (self.rope_dims, self.rope_scale);
        fast::rope_dynamic(&x, dims, false, base, scale, &positions, freqs).explain()
    }

    /// The caches with what is new.
    fn updated(&self) -> OpResult<[Array; 2]> {
        let Some(k) = &self.k else {
            return Ok([Array::clone(&self.keys), Array::clone(&self.values)]);
        };
        let kv_heads = self.keys.shape()[1];
        let mut v = self.by_head(self.v.as_ref().unwrap_or(k), kv_heads)?;
        if self.v_norm {
            v = fast::rms_norm(&v, None::<&Array>, self.eps).explain()?;
        }
        let v = v.transpose_axes(&[0, 2, 1, 3]).explain()?;
        let k = self.normed(self.by_head(k, kv_heads)?, self.k_norm.as_ref())?;
        Ok([
            self.written(&self.keys, &self.turned(&k)?)?,
            self.written(&self.values, &v)?,
        ])
    }

    /// What queries find in the caches, `[B, T, heads * D]`.
    fn mixed(&self, q: &Array, caches: &[Array; 2]) -> OpResult<Array> {
        let (b, t) = (q.shape()[0], q.shape()[1]);
        let (kv_heads, dim) = (self.keys.shape()[1], self.keys.shape()[3]);
        let mut q = self.by_head(q, self.heads)?;
        let mut gate = None;
        if self.gated {
            let [from, to] = [[0, 0, 0, dim], [b, t, self.heads, 2 * dim]];
            let flat = [b, t, self.heads * dim];
            gate = Some(slice_array(&q, &from, &to)?.reshape(&flat).explain()?);
            q = slice_array(&q, &[0; 4], &[b, t, self.heads, dim])?;
        }
        let q = self.turned(&self.normed(q, self.q_norm.as_ref())?)?;
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
        Ok(mixed)
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
        for (row, &offset) in self.offsets.iter().enumerate() {
            let last = offset + t - 1;
            let end = self.ends.as_ref().map(|ends| ends[row]);
            for own in offset..=last {
                let own = end.map_or(own, |end| own.min(end - 1));
                mask.extend((0..span).map(|column| {
                    // The last position that was put there.
                    let position = last - (last - column).rem_euclid(capacity);
                    let before = end.unwrap_or(own + 1);
                    position >= 0 && position < before && own - position < window
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
