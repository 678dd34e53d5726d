//! The slot for self-attention over a cache: checks, and MLX's own kernels where the host has none
//! that fits.

use abi_stable::std_types::RVec;
use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::{Array, Dtype, ops as mlx};
use plugin_api::abi::{self, RawTensor};

use super::handle::{Explain, Handle, Lent, OpResult, handles, lent, lent_opt, ops};
use super::native;
use super::ops::slice_array;
use super::stored::{Seen, Stored};
use crate::kernels::attend::{fits, fits_ends};
use crate::kernels::kv::Packing;

/// The arguments of a call, as arrays.
pub(super) struct SelfAttention {
    pub q: Option<Lent>,
    pub k: Option<Lent>,
    pub v: Option<Lent>,
    pub keys: Lent,
    pub values: Lent,
    /// Keys and values of the positions before `start`, where the others are quantized.
    pub first: Option<[Lent; 2]>,
    /// The first position in `keys` and `values`.
    pub start: i32,
    /// How keys and values are quantized, if they are.
    pub packing: Option<Packing>,
    /// Dimensions of a head.
    pub dim: i32,
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
        let (q, k, keys) = (lent_opt(raw.q)?, lent_opt(raw.k)?, lent(raw.keys)?);
        let last = |x: &Array| x.shape().last().copied().unwrap_or(0);
        let mut dim = last(&keys);
        let mut packing = None;
        if keys.dtype() == Dtype::Uint32 {
            // Words do not tell the dimensions; queries and new keys do.
            let words = dim;
            let sides = if raw.gated { 2 } else { 1 };
            dim = match (&q, &k) {
                (Some(q), _) => last(q).checked_div(raw.heads.saturating_mul(sides)),
                (None, Some(k)) => last(k).checked_div(raw.kv_heads),
                (None, None) => None,
            }
            .unwrap_or(0);
            packing = Packing::find(words.max(0) as usize, dim.max(0) as usize);
            if packing.is_none() {
                return Err(format!(
                    "attend over rows of {words} words for heads of {dim} dimensions"
                ));
            }
        }
        let args = Self {
            q,
            k,
            v: lent_opt(raw.v)?,
            keys,
            values: lent(raw.values)?,
            first: match (lent_opt(raw.first_keys)?, lent_opt(raw.first_values)?) {
                (Some(keys), Some(values)) => Some([keys, values]),
                _ => None,
            },
            start: raw.start,
            packing,
            dim,
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
                "attend of q {:?}, k {:?}, v {:?}, cached {:?} and {:?}, first {} {:?}, offsets {:?}, ends {:?}",
                self.q.as_deref().map(Handle::shape),
                self.k.as_deref().map(Handle::shape),
                self.v.as_deref().map(Handle::shape),
                self.keys.shape(),
                self.values.shape(),
                self.start,
                self.first.as_ref().map(|[keys, _]| keys.shape().to_vec()),
                self.offsets,
                self.ends
            )
        };
        let (Some(&[b, t, _]), &[_, heads, capacity, _]) =
            (self.columns().map(Handle::shape), self.keys.shape())
        else {
            return Err(shapes());
        };
        let dim = self.dim;
        let sides = if self.gated { 2 } else { 1 };
        let queries = |q: &Handle| match q.shape() {
            &[rows, columns, queries] => {
                let wanted = i64::from(self.heads) * i64::from(dim) * sides;
                rows == b && columns == t && i64::from(queries) == wanted
            }
            _ => false,
        };
        let alike = |x: &Handle| x.shape() == [b, t, kv_heads * dim];
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
            && self.values.dtype() == self.keys.dtype()
            && self.first_fit(b, kv_heads)
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
                self.first_columns()
                    .map(|columns| (self.start as usize, columns)),
            );
        if fits { Ok(()) } else { Err(shapes()) }
    }

    /// Whether there are places for first positions exactly where there have to be.
    fn first_fit(&self, b: i32, kv_heads: i32) -> bool {
        let Some([keys, values]) = &self.first else {
            return self.start == 0;
        };
        let fits = |x: &Array| matches!(*x.shape(), [rows, heads, _, dim] if [rows, heads, dim] == [b, kv_heads, self.dim]);
        self.packing.is_some()
            && self.start > 0
            && fits(keys)
            && keys.shape() == values.shape()
            && keys.dtype() == values.dtype()
            && keys.dtype().is_float()
    }

    /// The columns for first positions, where those lie elsewhere.
    pub fn first_columns(&self) -> Option<usize> {
        self.first
            .as_ref()
            .map(|[keys, _]| keys.shape()[2] as usize)
    }

    /// One of the projections, which tells rows and columns.
    pub fn columns(&self) -> Option<&Handle> {
        self.q.as_deref().or(self.k.as_deref())
    }

    /// Step by step.
    fn by_mlx(&self) -> OpResult<Vec<Array>> {
        let new = self.k.as_ref().map(|k| self.prepared(k)).transpose()?;
        let caches = Stored::of(self).with(self, new.as_ref())?;
        let mut all = Vec::with_capacity(5);
        if let Some(q) = &self.q {
            all.push(self.mixed(q, &caches)?);
        }
        if new.is_some() {
            all.extend(caches.into_arrays());
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
        let freqs = self.rope_freqs.as_deref().map(Handle::array);
        let (dims, scale) = (self.rope_dims, self.rope_scale);
        fast::rope_dynamic(&x, dims, false, base, scale, &positions, freqs).explain()
    }

    /// New keys and values as they are stored where that is exact, `[B, kv_heads, T, D]`.
    fn prepared(&self, k: &Array) -> OpResult<[Array; 2]> {
        let kv_heads = self.keys.shape()[1];
        let mut v = self.by_head(self.v.as_deref().map_or(k, Handle::array), kv_heads)?;
        if self.v_norm {
            v = fast::rms_norm(&v, None::<&Array>, self.eps).explain()?;
        }
        let v = v.transpose_axes(&[0, 2, 1, 3]).explain()?;
        let k = self.normed(self.by_head(k, kv_heads)?, self.k_norm.as_ref())?;
        Ok([self.turned(&k)?, v])
    }

    /// What queries find in the caches, `[B, T, heads * D]`.
    fn mixed(&self, q: &Array, caches: &Stored) -> OpResult<Array> {
        let (b, t) = (q.shape()[0], q.shape()[1]);
        let dim = self.dim;
        let mut q = self.by_head(q, self.heads)?;
        let mut gate = None;
        if self.gated {
            let [from, to] = [[0, 0, 0, dim], [b, t, self.heads, 2 * dim]];
            let flat = [b, t, self.heads * dim];
            gate = Some(slice_array(&q, &from, &to)?.reshape(&flat).explain()?);
            q = slice_array(&q, &[0; 4], &[b, t, self.heads, dim])?;
        }
        let q = self.turned(&self.normed(q, self.q_norm.as_ref())?)?;
        let Seen {
            keys,
            values,
            positions,
        } = caches.seen(self, t)?;
        // Quantized keys are widened to single precision, and mixed so.
        let (q, dtype) = (q.as_dtype(keys.dtype()).explain()?, q.dtype());
        let mixed = fast::scaled_dot_product_attention(
            &q,
            &keys,
            &values,
            self.scale,
            ScaledDotProductAttentionMask::Array(&self.mask(t, &positions)),
            None,
        )
        .explain()?;
        let mixed = mixed.as_dtype(dtype).explain()?;
        let mixed = mixed.transpose_axes(&[0, 2, 1, 3]).explain()?;
        let mut mixed = mixed.reshape(&[b, t, self.heads * dim]).explain()?;
        if let Some(gate) = gate {
            let open = mlx::sigmoid(&gate).explain()?;
            mixed = mixed.multiply(&open).explain()?;
        }
        Ok(mixed)
    }

    /// `[B, 1, T, columns]`, true where a query may look. `positions`: in each row, of every column the
    /// position that lies there; negative: none.
    fn mask(&self, t: i32, positions: &[Vec<i32>]) -> Array {
        let window = if self.window == 0 {
            i32::MAX
        } else {
            self.window
        };
        let span = positions.first().map_or(0, Vec::len);
        let mut mask = Vec::with_capacity(positions.len() * t as usize * span);
        for (row, (&offset, positions)) in self.offsets.iter().zip(positions).enumerate() {
            let end = self.ends.as_ref().map(|ends| ends[row]);
            for own in offset..offset + t {
                let own = end.map_or(own, |end| own.min(end - 1));
                let before = end.unwrap_or(own + 1);
                mask.extend(positions.iter().map(|&position| {
                    position >= 0 && position < before && own - position < window
                }));
            }
        }
        Array::from_slice(&mask, &[self.offsets.len() as i32, 1, t, span as i32])
    }
}

pub(super) extern "C" fn attend(args: &abi::Attend<'_>) -> RVec<RawTensor> {
    ops(|| {
        let attention = SelfAttention::new(args)?;
        match native::attend(&attention) {
            Some(mixed) => mixed,
            None => attention.by_mlx().map(handles),
        }
    })
}
