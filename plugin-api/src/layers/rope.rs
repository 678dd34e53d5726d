//! Rotary position embedding and its published scalings.

use crate::abi::RawTensor;
use crate::config::Config;
use crate::error::Result;
use crate::tensor::Tensor;

/// Rotates the first `dims` dimensions of each head, half-split pairs.
#[derive(Clone)]
pub struct Rope {
    dims: i32,
    base: f32,
    scale: f32,
    /// Divisors of the position, one per pair; they replace `base`.
    freqs: Option<Tensor>,
}

impl Rope {
    /// The plain form.
    pub fn new(dims: i32, base: f32) -> Self {
        Self {
            dims,
            base,
            scale: 1.0,
            freqs: None,
        }
    }

    /// Gemma's "proportional" form: all `dims` are paired, half-split, and of the pairs only the first
    /// `share` turn.
    pub fn proportional(dims: i32, base: f32, share: f32) -> Result<Self> {
        let turning = (dims as f32 * share) as usize / 2;
        let freqs = plain_freqs(dims, base).enumerate();
        let freqs: Vec<f32> = freqs
            .map(|(pair, freq)| if pair < turning { freq } else { f32::INFINITY })
            .collect();
        Ok(Self {
            freqs: Some(Tensor::from_slice(&freqs, &[dims / 2])?),
            ..Self::new(dims, base)
        })
    }

    /// Reads a text config: `rope_theta`, `partial_rotary_factor` and the scaling, either flat or
    /// inside `rope_parameters` / `rope_scaling`. A scaling that is not known is refused.
    pub fn from_config(config: &Config, head_dim: i32) -> Result<Self> {
        let parameters = match config.section("rope_parameters")? {
            Some(section) => Some(section),
            None => config.section("rope_scaling")?,
        };
        let number = |key: &str| -> Result<Option<f32>> {
            let nested = match &parameters {
                Some(section) => section.opt_float(key)?,
                None => None,
            };
            match nested {
                Some(value) => Ok(Some(value)),
                None => config.opt_float(key),
            }
        };
        // Peers disagree on the default theta, so it must be stated.
        let base = number("rope_theta")?.ok_or_else(|| config.error("rope_theta", "is missing"))?;
        let share = number("partial_rotary_factor")?.unwrap_or(1.0);
        let dims = (head_dim as f32 * share) as i32;
        if base <= 0.0 || dims < 2 || dims > head_dim || dims % 2 != 0 {
            let problem = format!(
                "and `partial_rotary_factor` give {dims} of {head_dim} dims at base {base}"
            );
            return Err(config.error("rope_theta", problem));
        }
        let mut rope = Self::new(dims, base);
        let Some(section) = parameters else {
            return Ok(rope);
        };
        let kind = match section.opt_str("rope_type")? {
            Some(kind) => kind,
            None => section.opt_str("type")?.unwrap_or("default"),
        };
        match kind {
            "default" | "mrope" => {}
            "linear" => rope.scale = 1.0 / section.float("factor")?,
            "llama3" => rope.freqs = Some(llama3_freqs(&section, dims, base)?),
            other => {
                let problem = format!("is {other}; supported: default, linear, llama3");
                return Err(section.error("rope_type", problem));
            }
        }
        Ok(rope)
    }

    /// The divisors of the position that a checkpoint carries as factors on the plain ones
    /// (`rope_freqs.weight` of GGUF files).
    pub fn with_factors(mut self, factors: &[f32]) -> Result<Self> {
        let pairs = self.dims as usize / 2;
        if factors.len() != pairs {
            return Err(crate::Error::invalid(format!(
                "{} rope factors for {pairs} pairs",
                factors.len()
            )));
        }
        let freqs: Vec<f32> = plain_freqs(self.dims, self.base)
            .zip(factors)
            .map(|(freq, factor)| freq * factor)
            .collect();
        self.freqs = Some(Tensor::from_slice(&freqs, &[self.dims / 2])?);
        Ok(self)
    }

    /// Dimensions that turn, base, divisors (or null) and factor, as the table takes them.
    pub(super) fn raw(&self) -> (i32, f32, RawTensor, f32) {
        let freqs = self.freqs.as_ref().map_or(RawTensor::NULL, Tensor::raw);
        (self.dims, self.base, freqs, self.scale)
    }
}

/// `base^(2j/dims)` for each pair `j`.
fn plain_freqs(dims: i32, base: f32) -> impl Iterator<Item = f32> {
    (0..dims / 2).map(move |j| base.powf((2 * j) as f32 / dims as f32))
}

/// The piecewise scaling of Llama 3.1: long wavelengths are stretched by `factor`, short ones kept,
/// those between blended.
fn llama3_freqs(section: &Config, dims: i32, base: f32) -> Result<Tensor> {
    let factor = section.float("factor")?;
    let low = section.float("low_freq_factor")?;
    let high = section.float("high_freq_factor")?;
    let context = section.float("original_max_position_embeddings")?;
    if low == high || low <= 0.0 || high <= 0.0 || factor <= 0.0 {
        return Err(section.error(
            "low_freq_factor",
            "and the other factors must be positive and differ",
        ));
    }
    let freqs: Vec<f32> = plain_freqs(dims, base)
        .map(|freq| {
            let wavelength = 2.0 * std::f32::consts::PI * freq;
            if wavelength > context / low {
                freq * factor
            } else if wavelength < context / high {
                freq
            } else {
                let smooth = (context / wavelength - low) / (high - low);
                freq / ((1.0 - smooth) / factor + smooth)
            }
        })
        .collect();
    Tensor::from_slice(&freqs, &[dims / 2])
}
