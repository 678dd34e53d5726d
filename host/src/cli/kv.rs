//! What the user can say of how keys and values are stored.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use mlxhost::model::{KvBits, KvConfig};

use super::error::CliError;

/// How the target's caches store keys and values.
#[derive(Clone, clap::Args)]
pub struct KvArgs {
    /// Store the model's keys and values in 8 or 4 bits [default: as they are]. In f32, 8 bits take about a
    /// quarter of the memory and 4 an eighth, and long texts decode faster. 8 bits hardly change what the
    /// model says, 4 bits do. Drafts still change nothing.
    #[arg(long, value_name = "BITS", value_parser = bits(), help_heading = "Cache")]
    pub kv_bits: Option<KvBits>,
    /// Elements of a head that share a scale: 32, 64 or 128. Smaller groups are truer and take more memory
    /// [default: 64, or 32 where heads are no multiple of 64].
    #[arg(
        long,
        value_name = "N",
        value_parser = PossibleValuesParser::new(["32", "64", "128"]).try_map(|n| n.parse::<u8>()),
        help_heading = "Cache"
    )]
    pub kv_group_size: Option<u8>,
    /// Keep the first N tokens exact, for good [default: 0]. Others are quantized as they come. (mlx-lm
    /// converts the whole cache once it is longer than N: there, what a token is stored as depends on when
    /// one looks, and drafts would change answers.)
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(..=i64::from(i32::MAX)),
        help_heading = "Cache"
    )]
    pub quantized_kv_start: Option<u32>,
    /// Bits of one layer, counted from 0: 4, 8, or none for exact. Repeatable; goes before --kv-bits.
    #[arg(long, value_name = "LAYER=BITS", value_parser = layer, help_heading = "Cache")]
    pub kv_bits_layer: Vec<(usize, Option<KvBits>)>,
}

impl KvArgs {
    /// As the library has it.
    ///
    /// # Errors
    /// An option that would have no effect, or a layer twice.
    pub fn config(&self) -> Result<KvConfig, CliError> {
        let mut config = KvConfig {
            bits: self.kv_bits,
            group: self.kv_group_size,
            start: self.quantized_kv_start.unwrap_or(0),
            ..KvConfig::default()
        };
        for (layer, bits) in &self.kv_bits_layer {
            if config.layers.insert(*layer, *bits).is_some() {
                return Err(CliError::input(format!(
                    "--kv-bits-layer says twice what layer {layer} is to be"
                )));
            }
        }
        let details = [
            ("--kv-group-size", self.kv_group_size.is_some()),
            ("--quantized-kv-start", self.quantized_kv_start.is_some()),
        ];
        match details.into_iter().find(|(_, given)| *given) {
            Some((option, _)) if config.is_exact() => Err(CliError::input(format!(
                "{option} was given, but nothing is quantized\n  say how with --kv-bits 8 or --kv-bits 4"
            ))),
            _ => Ok(config),
        }
    }
}

fn named(bits: &str) -> Option<KvBits> {
    match bits {
        "4" => Some(KvBits::Four),
        "8" => Some(KvBits::Eight),
        _ => None,
    }
}

fn bits() -> impl TypedValueParser<Value = KvBits> {
    PossibleValuesParser::new(["4", "8"])
        .try_map(|text| named(&text).ok_or_else(|| "expected 4 or 8".to_owned()))
}

fn layer(text: &str) -> Result<(usize, Option<KvBits>), String> {
    let wrong = || "expected LAYER=BITS, with 4, 8 or none bits, as 0=8".to_owned();
    let (layer, bits) = text.split_once('=').ok_or_else(wrong)?;
    let layer = layer.parse().map_err(|_| wrong())?;
    match bits {
        "none" | "16" => Ok((layer, None)),
        _ => named(bits)
            .map(|bits| (layer, Some(bits)))
            .ok_or_else(wrong),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_with_their_bits() {
        assert_eq!(layer("3=8"), Ok((3, Some(KvBits::Eight))));
        assert_eq!(layer("0=4"), Ok((0, Some(KvBits::Four))));
        assert_eq!(layer("12=none"), Ok((12, None)));
        assert_eq!(layer("12=16"), Ok((12, None)));
        for wrong in ["", "3", "=4", "3=", "3=5", "-1=4", "x=8", "3=8=8"] {
            assert!(layer(wrong).is_err(), "{wrong}");
        }
    }
}
