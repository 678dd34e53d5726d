//! Quantized keys and values: rows of a head as words, to and fro.
//!
//! A row of `D` elements is `D * bits / 32` words of codes, the first element in the lowest bits, then a
//! word per group: in its low half the scale, in its high half the bias, both in half precision. An
//! element is `scale * code + bias`.

use half::f16;

/// The largest finite half.
pub const MOST: f32 = 65504.0;

/// By how much a scale grows and a bias falls before it is rounded to half precision, relative and
/// absolute: more than the rounding can take back. So codes reach from the least element of a group to
/// its largest whatever was rounded, and every element is within half a step of the *stored* scale.
pub const MARGIN: [f32; 2] = [1.0 / 1024.0, 1.0 / 16_777_216.0];

/// How rows are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Bits of a code: 4 or 8.
    pub bits: usize,
    /// Elements that share a scale and a bias: 32, 64 or 128.
    pub group: usize,
}

impl Packing {
    /// All there are.
    pub fn all() -> impl Iterator<Item = Self> {
        let bits = [4, 8].into_iter();
        bits.flat_map(|bits| [32, 64, 128].map(|group| Self { bits, group }))
    }

    /// The packing by which rows of `dim` elements take so many words: there is never more than one.
    pub fn find(words: usize, dim: usize) -> Option<Self> {
        Self::all().find(|packing| dim > 0 && packing.words(dim) == Some(words))
    }

    /// Words of a row, if whole groups make it up.
    pub fn words(self, dim: usize) -> Option<usize> {
        dim.is_multiple_of(self.group)
            .then_some(dim * self.bits / 32 + dim / self.group)
    }

    /// The largest code.
    pub fn most(self) -> f32 {
        ((1u32 << self.bits) - 1) as f32
    }

    /// Writes the row `x` as words. What is not finite becomes something finite.
    ///
    /// # Panics
    /// `to` is not of [`Packing::words`].
    #[allow(clippy::manual_clamp)] // of what is no number, these make one
    pub fn encode(self, x: &[f32], to: &mut [u32]) {
        assert_eq!(self.words(x.len()), Some(to.len()));
        let per_word = 32 / self.bits;
        let (codes, scales) = to.split_at_mut(x.len() / per_word);
        let codes = codes.chunks_exact_mut(self.group / per_word);
        for ((x, codes), stored) in x.chunks_exact(self.group).zip(codes).zip(scales) {
            let least = x.iter().copied().fold(f32::INFINITY, f32::min);
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let bias = least - least.abs() * MARGIN[0] - MARGIN[1];
            let bias = f16::from_f32(bias.max(-MOST).min(MOST));
            let step = (largest - bias.to_f32()) / self.most();
            let scale = f16::from_f32((step + step * MARGIN[0] + MARGIN[1]).max(0.0).min(MOST));
            *stored = u32::from(scale.to_bits()) | u32::from(bias.to_bits()) << 16;
            let (scale, bias) = (scale.to_f32(), bias.to_f32());
            for (code, x) in codes.iter_mut().zip(x.chunks_exact(per_word)) {
                *code = 0;
                for (place, x) in x.iter().enumerate() {
                    let q = ((x - bias) / scale).round_ties_even();
                    *code |= (q.max(0.0).min(self.most()) as u32) << (place * self.bits);
                }
            }
        }
    }

    /// The rows of `dim` elements that words stand for. Exact but for one rounding of the sum.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn decode(self, words: &[u32], dim: usize, to: &mut [f32]) {
        let width = self.words(dim).unwrap_or(0);
        assert!(dim > 0 && to.len().is_multiple_of(dim) && words.len() == to.len() / dim * width);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") {
                // SAFETY: the processor has it.
                return unsafe { self.decode_avx2(words, dim, to) };
            }
        }
        self.decode_lanes(words, dim, to);
    }

    /// Calls `unpack` with the codes of each group, its scale and bias, and where it goes.
    #[inline(always)]
    fn groups(
        self,
        words: &[u32],
        dim: usize,
        to: &mut [f32],
        unpack: impl Fn(&[u32], f32, f32, &mut [f32]),
    ) {
        let codes = dim * self.bits / 32;
        let rows = words.chunks_exact(codes + dim / self.group);
        for (words, to) in rows.zip(to.chunks_exact_mut(dim)) {
            let (codes, scales) = words.split_at(codes);
            let codes = codes.chunks_exact(self.group * self.bits / 32);
            for ((to, codes), stored) in to.chunks_exact_mut(self.group).zip(codes).zip(scales) {
                unpack(codes, half(*stored & 0xffff), half(*stored >> 16), to);
            }
        }
    }

    fn decode_lanes(self, words: &[u32], dim: usize, to: &mut [f32]) {
        let (per_word, most) = (32 / self.bits, (1 << self.bits) - 1);
        self.groups(words, dim, to, |codes, scale, bias, to| {
            for (to, word) in to.chunks_exact_mut(per_word).zip(codes) {
                for (place, x) in to.iter_mut().enumerate() {
                    let code = word >> (place * self.bits) & most;
                    *x = code as f32 * scale + bias;
                }
            }
        });
    }

    /// Eight codes at a time. What compilers make of the loop above is several times slower.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn decode_avx2(self, words: &[u32], dim: usize, to: &mut [f32]) {
        use std::arch::x86_64::*;
        // A product of code and scale has 19 bits at most, so that it does not matter whether it is
        // rounded before the sum.
        let widened = |codes: __m256i, scale: f32, bias: f32, to: &mut [f32; 8]| {
            let codes = _mm256_cvtepi32_ps(codes);
            let x = _mm256_fmadd_ps(codes, _mm256_set1_ps(scale), _mm256_set1_ps(bias));
            // SAFETY: there is room for eight.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) };
        };
        if self.bits == 4 {
            let places = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            let mask = _mm256_set1_epi32(0xf);
            self.groups(words, dim, to, |codes, scale, bias, to| {
                for (to, word) in to.as_chunks_mut::<8>().0.iter_mut().zip(codes) {
                    let word = _mm256_srlv_epi32(_mm256_set1_epi32(*word as i32), places);
                    widened(_mm256_and_si256(word, mask), scale, bias, to);
                }
            });
        } else {
            self.groups(words, dim, to, |codes, scale, bias, to| {
                let to = to.as_chunks_mut::<8>().0.iter_mut();
                for (to, pair) in to.zip(codes.as_chunks::<2>().0) {
                    // SAFETY: two words are eight bytes.
                    let pair = unsafe { _mm_loadl_epi64(pair.as_ptr().cast()) };
                    widened(_mm256_cvtepu8_epi32(pair), scale, bias, to);
                }
            });
        }
    }
}

/// The number that a finite half's bits stand for.
#[inline(always)]
fn half(bits: u32) -> f32 {
    // Its exponent is 112 less than a single's; exact for the smallest ones too.
    let size = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(size.to_bits() | (bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packings() -> impl Strategy<Value = Packing> {
        prop::sample::select(Packing::all().collect::<Vec<_>>())
    }

    fn round_trip(packing: Packing, x: &[f32]) -> (Vec<f32>, Vec<u32>) {
        let mut words = vec![0; packing.words(x.len()).unwrap()];
        packing.encode(x, &mut words);
        let mut back = vec![f32::NAN; x.len()];
        packing.decode(&words, x.len(), &mut back);
        // To the same bit on every processor.
        let mut plain = vec![f32::NAN; x.len()];
        packing.decode_lanes(&words, x.len(), &mut plain);
        assert_eq!(plain, back);
        (back, words)
    }

    #[test]
    fn words_tell_the_packing() {
        for packing in Packing::all() {
            for dim in (32..=1024).step_by(32) {
                if let Some(words) = packing.words(dim) {
                    assert_eq!(Packing::find(words, dim), Some(packing));
                }
            }
        }
        assert_eq!(Packing::find(0, 0), None);
        assert_eq!(Packing::find(17, 32), None);
    }

    #[test]
    fn halves_are_what_they_are() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            if x.is_finite() {
                assert_eq!(half(bits.into()).to_bits(), x.to_f32().to_bits());
            }
        }
    }

    proptest! {
        #[test]
        fn a_row_comes_back_within_half_a_step(
            packing in packings(),
            groups in 1usize..3,
            (center, exponent) in (-9.0f32..9.0, -12i32..5),
            seed in any::<u32>(),
        ) {
            let spread = 10f32.powi(exponent);
            let mut state = seed;
            let x: Vec<f32> = (0..groups * packing.group).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                center + spread * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
            }).collect();
            let (back, words) = round_trip(packing, &x);
            let scales = &words[x.len() * packing.bits / 32..];
            for (at, (x, back)) in x.iter().zip(&back).enumerate() {
                let scale = half(scales[at / packing.group] & 0xffff);
                // A single's own rounding comes on top.
                let bound = scale * 0.5001 + x.abs() * 2f32.powi(-23);
                prop_assert!((x - back).abs() <= bound, "{x} {back} {scale}");
                // The step is not much wider than it has to be.
                let least = (2.1 * spread + 0.003 * center.abs()) / packing.most() + 2e-7;
                prop_assert!(scale <= least, "{scale} {least}");
            }
        }

        #[test]
        fn anything_gives_something_finite(
            packing in packings(),
            wild in prop::collection::vec(any::<f32>(), 128),
        ) {
            let wild: Vec<f32> = wild.iter().zip(0..).map(|(x, i)| match i % 9 {
                0 => f32::NAN,
                1 => f32::INFINITY,
                2 => f32::NEG_INFINITY,
                _ => *x,
            }).collect();
            for x in [&wild[..], &[f32::NAN; 128], &[f32::INFINITY; 128], &[1e30; 128], &[-1e30; 128]] {
                let (back, _) = round_trip(packing, x);
                prop_assert!(back.iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        for packing in Packing::all() {
            assert_eq!(round_trip(packing, &[0.0; 128]).0, [0.0; 128]);
        }
    }
}
