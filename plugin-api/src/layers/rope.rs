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
    ///
    /// With it comes a factor on products of queries and keys, which only YaRN has other than 1.
    pub fn from_config(config: &Config, head_dim: i32) -> Result<(Self, f32)> {
        Self::read(config, head_dim, None)
    }

    /// As [`Rope::from_config`], for layers that turn all dimensions whatever `partial_rotary_factor` says.
    pub fn full_from_config(config: &Config, head_dim: i32) -> Result<(Self, f32)> {
        Self::read(config, head_dim, Some(1.0))
    }

    fn read(config: &Config, head_dim: i32, share: Option<f32>) -> Result<(Self, f32)> {
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
        let share = match share {
            Some(share) => share,
            None => number("partial_rotary_factor")?.unwrap_or(1.0),
        };
        let dims = (head_dim as f32 * share) as i32;
        if base <= 0.0 || dims < 2 || dims > head_dim || dims % 2 != 0 {
            let problem = format!(
                "and `partial_rotary_factor` give {dims} of {head_dim} dims at base {base}"
            );
            return Err(config.error("rope_theta", problem));
        }
        let mut rope = Self::new(dims, base);
        let Some(section) = parameters else {
            return Ok((rope, 1.0));
        };
        let mut factor = 1.0;
        let kind = match section.opt_str("rope_type")? {
            Some(kind) => kind,
            None => section.opt_str("type")?.unwrap_or("default"),
        };
        match kind {
            "default" | "mrope" => {}
            "linear" => rope.scale = 1.0 / section.float("factor")?,
            "llama3" => rope.freqs = Some(llama3_freqs(&section, dims, base)?),
            "yarn" if dims == head_dim => {
                let (freqs, amplitude) = yarn(config, &section, dims, base)?;
                rope.freqs = Some(freqs);
                // Queries and keys are both longer by it.
                factor = amplitude * amplitude;
            }
            other => {
                let problem = format!(
                    "is {other}; supported: default, linear, llama3, yarn over whole heads"
                );
                return Err(section.error("rope_type", problem));
            }
        }
        Ok((rope, factor))
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

/// YaRN: fast pairs are kept, slow ones stretched by `factor`, those between blended; and how much longer
/// everything that turns becomes. Source: Peng et al., "YaRN" (2023), as transformers reads configs.
fn yarn(config: &Config, section: &Config, dims: i32, base: f32) -> Result<(Tensor, f32)> {
    let factor = section.float("factor")?;
    let trained = match section.opt_float("original_max_position_embeddings")? {
        Some(trained) => trained,
        None => config.float("max_position_embeddings")?,
    };
    let fast = section.opt_float("beta_fast")?.unwrap_or(32.0);
    let slow = section.opt_float("beta_slow")?.unwrap_or(1.0);
    if factor < 1.0 || trained <= 0.0 || slow <= 0.0 || fast <= slow || base <= 1.0 {
        return Err(section.error("factor", "and what else YaRN has make no sense"));
    }
    // The pair that turns so often over the trained length.
    let pair = |turns: f32| {
        let length = f64::from(trained) / (f64::from(turns) * 2.0 * std::f64::consts::PI);
        f64::from(dims) * length.ln() / (2.0 * f64::from(base).ln())
    };
    let whole = section.opt_bool("truncate")?.unwrap_or(true);
    let (low, high) = match whole {
        true => (pair(fast).floor(), pair(slow).ceil()),
        false => (pair(fast), pair(slow)),
    };
    let (low, mut high) = (low.max(0.0), high.min(f64::from(dims - 1)));
    if low == high {
        high += 0.001;
    }
    let freqs: Vec<f32> = plain_freqs(dims, base)
        .enumerate()
        .map(|(pair, freq)| {
            let stretched = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
            1.0 / (stretched / (factor * freq) + (1.0 - stretched) / freq)
        })
        .collect();
    let length = |scale: f32| 0.1 * scale * factor.ln() + 1.0;
    let amplitude = match section.opt_float("attention_factor")? {
        Some(stated) => stated,
        None => match (
            section.opt_float("mscale")?,
            section.opt_float("mscale_all_dim")?,
        ) {
            (Some(one), Some(all)) if one != 0.0 && all != 0.0 => length(one) / length(all),
            _ => length(1.0),
        },
    };
    Ok((Tensor::from_slice(&freqs, &[dims / 2])?, amplitude))
}
