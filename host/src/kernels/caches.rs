//! Where the keys and values of an attention layer lie: as they are, or quantized after some first
//! positions.

use std::marker::PhantomData;
use std::ops::Range;

use super::kv::Packing;
use super::lanes::Float;
use super::mix::{KeyHead, Lookup, widened};
use super::pool::Shared;

/// Rows that are widened together: what all queries pass over stays in the nearest cache.
const TILE: usize = 16;

/// Where positions of quantized caches lie.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// How rows are quantized.
    pub packing: Packing,
    /// Positions below stay as they are: `p` lies in column `p % first` of the buffers for them.
    /// The others are quantized: `p` lies in column `(p - start) % capacity`.
    pub start: usize,
    /// Columns of the buffers for the first positions.
    pub first: usize,
}

/// A buffer that is only read, or written to by pieces.
pub enum Buffer<'a, E> {
    /// It has everything.
    Read(&'a [E]),
    /// What is new goes in.
    Write(Shared<E>, PhantomData<&'a mut [E]>),
}

impl<'a, E> From<&'a [E]> for Buffer<'a, E> {
    fn from(all: &'a [E]) -> Self {
        Self::Read(all)
    }
}

impl<'a, E> From<&'a mut [E]> for Buffer<'a, E> {
    fn from(all: &'a mut [E]) -> Self {
        Self::Write(Shared::new(all), PhantomData)
    }
}

impl<E> Buffer<'_, E> {
    fn has(&self, len: usize, written: bool) -> bool {
        match self {
            Self::Read(all) => all.len() == len && !written,
            Self::Write(all, _) => all.len() == len && written,
        }
    }

    /// Some elements.
    ///
    /// # Safety
    /// Nobody writes to them.
    unsafe fn read(&self, at: usize, len: usize) -> &[E] {
        match self {
            Self::Read(all) => &all[at..at + len],
            // SAFETY: the caller's promise.
            Self::Write(all, _) => unsafe { all.read(at, len) },
        }
    }

    /// Some elements; none if the buffer is only read.
    ///
    /// # Safety
    /// Nobody else has a part that overlaps.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's promise
    unsafe fn slice(&self, at: usize, len: usize) -> &mut [E] {
        match self {
            Self::Read(_) => &mut [],
            // SAFETY: the caller's promise.
            Self::Write(all, _) => unsafe { all.slice(at, len) },
        }
    }
}

/// The keys, then the values, of all rows.
pub struct Caches<'a, T> {
    /// Columns of the buffers, beside those for first positions.
    pub capacity: usize,
    /// Everything, `[B, kv_heads, capacity, D]`, or first positions, `[B, kv_heads, first, D]`.
    pub exact: [Buffer<'a, T>; 2],
    /// Where what lies, and `[B, kv_heads, capacity, words]`.
    pub quantized: Option<(Places, [Buffer<'a, u32>; 2])>,
}

/// The keys and values of one head.
pub(super) enum Head<'a, T> {
    Exact(KeyHead<'a, T>),
    Quantized(QuantizedHead<'a, T>),
}

impl<'a, T: Float> Caches<'a, T> {
    /// Caches of which nothing is quantized.
    pub fn exact(capacity: usize, all: [impl Into<Buffer<'a, T>>; 2]) -> Self {
        Self {
            capacity,
            exact: all.map(Into::into),
            quantized: None,
        }
    }

    /// Whether they are caches of so many heads in all rows, of `dim` elements, to be written to or not.
    pub(super) fn fit(&self, heads: usize, dim: usize, written: bool) -> bool {
        let Some((places, packed)) = &self.quantized else {
            let len = heads * self.capacity * dim;
            return self.exact.iter().all(|x| x.has(len, written));
        };
        let first = heads * places.first * dim;
        let words = places.packing.words(dim);
        words.is_some_and(|words| {
            let len = heads * self.capacity * words;
            self.exact.iter().all(|x| x.has(first, written))
                && packed.iter().all(|x| x.has(len, written))
        })
    }

    /// Whether columns from these positions on fit: what is still to be seen must not be written over.
    pub(super) fn have_room(&self, offsets: &[i32], width: usize, window: usize) -> bool {
        let places = self.quantized.as_ref().map(|(places, _)| places);
        let first = places.map(|places| (places.start, places.first));
        fits(offsets, width, self.capacity, window, first)
    }

    /// Stores the key (`side` 0) or value (1) of a position of a head.
    ///
    /// # Safety
    /// Nobody else has a part of this head.
    pub(super) unsafe fn put(&self, side: usize, head: usize, position: usize, x: &[f32]) {
        let columns = match &self.quantized {
            Some((places, packed)) => match position.checked_sub(places.start) {
                Some(after) => {
                    let words = places.packing.words(x.len()).unwrap_or(0);
                    let at = (head * self.capacity + after % self.capacity) * words;
                    // SAFETY: the caller's promise.
                    return places
                        .packing
                        .encode(x, unsafe { packed[side].slice(at, words) });
                }
                None => places.first,
            },
            None => self.capacity,
        };
        let at = (head * columns + position % columns) * x.len();
        // SAFETY: the caller's promise.
        let to = unsafe { self.exact[side].slice(at, x.len()) };
        for (to, x) in to.iter_mut().zip(x) {
            *to = T::narrow(*x);
        }
    }

    /// The keys and values of a head.
    ///
    /// # Safety
    /// Nobody writes to them.
    pub(super) unsafe fn head(&self, head: usize, dim: usize) -> Head<'_, T> {
        let exact = |columns: usize| {
            let len = columns * dim;
            // SAFETY: the caller's promise.
            [0, 1].map(|side| unsafe { self.exact[side].read(head * len, len) })
        };
        let Some((places, packed)) = &self.quantized else {
            let [keys, values] = exact(self.capacity);
            return Head::Exact(KeyHead {
                keys,
                values,
                strides: [dim; 2],
                columns: self.capacity,
            });
        };
        let words = places.packing.words(dim).unwrap_or(0);
        let len = self.capacity * words;
        Head::Quantized(QuantizedHead {
            places: *places,
            words,
            columns: self.capacity,
            exact: exact(places.first),
            // SAFETY: the caller's promise.
            packed: [0, 1].map(|side| unsafe { packed[side].read(head * len, len) }),
        })
    }
}

/// Whether columns from these positions on fit caches: what is still to be seen must not be written over.
/// `first`: where some first positions lie elsewhere, those that do, and the columns for them.
pub fn fits(
    offsets: &[i32],
    width: usize,
    capacity: usize,
    window: usize,
    first: Option<(usize, usize)>,
) -> bool {
    let turns = |columns: usize| window > 0 && columns >= window + width;
    let (start, columns) = first.unwrap_or((0, 0));
    let fits = |&offset: &i32| {
        usize::try_from(offset).is_ok_and(|offset| {
            let end = offset + width;
            (turns(capacity) || end <= start.saturating_add(capacity))
                && (turns(columns) || end.min(start) <= columns)
        })
    };
    capacity > 0 && (columns > 0 || start == 0) && offsets.iter().all(fits)
}

/// Quantized keys and values of one head, and the exact ones of the first positions.
#[derive(Clone, Copy)]
pub(super) struct QuantizedHead<'a, T> {
    places: Places,
    words: usize,
    columns: usize,
    exact: [&'a [T]; 2],
    packed: [&'a [u32]; 2],
}

impl<T: Float> Lookup for QuantizedHead<'_, T> {
    #[inline(always)]
    fn run(&self, position: usize) -> usize {
        match position.checked_sub(self.places.start) {
            Some(after) => (self.columns - after % self.columns).min(TILE),
            None => {
                let columns = self.places.first;
                (columns - position % columns).min(self.places.start - position)
            }
        }
    }

    #[inline(always)]
    fn get<'t>(
        &'t self,
        side: usize,
        positions: Range<usize>,
        dim: usize,
        to: &'t mut Vec<f32>,
    ) -> (&'t [f32], usize) {
        let Some(after) = positions.start.checked_sub(self.places.start) else {
            let first = positions.start % self.places.first;
            let columns = first..first + positions.len();
            return widened(self.exact[side], dim, columns, dim, to);
        };
        let (first, count) = (after % self.columns, positions.len());
        let words = &self.packed[side][first * self.words..][..count * self.words];
        to.resize(count * dim, 0.0);
        self.places.packing.decode(words, dim, to);
        (to, dim)
    }
}

#[cfg(test)]
mod tests;
