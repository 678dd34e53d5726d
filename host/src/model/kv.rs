//! How the caches of a target store keys and values.

use std::collections::BTreeMap;

use plugin_api::layers::QuantizedKv;
use plugin_api::{Error, Result};

/// Bits of a quantized key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvBits {
    /// 4 bits.
    Four,
    /// 8 bits.
    Eight,
}

impl KvBits {
    /// The number of bits.
    pub fn count(self) -> u8 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// How keys and values are stored; by default as they are. Everything here changes what a target says.
///
/// Whether a position is quantized depends on the position alone: those from `start` on are quantized when
/// they are written, and those before never are. So an answer does not depend on drafts, on the widths of
/// passes, or on what else is answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct KvConfig {
    /// Bits of all layers that `layers` says nothing of; none: exact.
    pub bits: Option<KvBits>,
    /// Elements that share a scale: 32, 64 or 128. None: 64, or what else divides the head dimension.
    pub group: Option<u8>,
    /// Positions below stay exact.
    pub start: u32,
    /// Bits of single layers.
    pub layers: BTreeMap<usize, Option<KvBits>>,
}

/// Groups, in the order in which they are tried.
const GROUPS: [u8; 3] = [64, 128, 32];

impl KvConfig {
    /// Whether nothing is quantized.
    pub fn is_exact(&self) -> bool {
        self.bits.is_none() && self.layers.values().all(Option::is_none)
    }

    /// How each layer that has a cache stores its keys and values. `head_dims`: of each layer of the model the
    /// dimensions of a head; none: it has no keys of its own.
    ///
    /// # Errors
    /// A setting does not fit the model.
    pub(super) fn of_layers(&self, head_dims: &[Option<i32>]) -> Result<Vec<Option<QuantizedKv>>> {
        for layer in self.layers.keys() {
            match head_dims.get(*layer) {
                Some(Some(_)) => {}
                Some(None) => {
                    return Err(Error::invalid(format!(
                        "layer {layer} has no keys and values of its own to be quantized"
                    )));
                }
                None => {
                    let count = head_dims.len();
                    return Err(Error::invalid(format!(
                        "there is no layer {layer} whose keys could be quantized: the model has {count}, from 0"
                    )));
                }
            }
        }
        let layers = head_dims.iter().enumerate();
        layers
            .map(|(layer, dim)| {
                let bits = self.layers.get(&layer).copied().unwrap_or(self.bits);
                match (bits, dim) {
                    (Some(bits), Some(dim)) => Ok(Some(QuantizedKv {
                        bits: bits.count().into(),
                        group: self.group_of(layer, *dim)?,
                        start: i32::try_from(self.start).unwrap_or(i32::MAX),
                    })),
                    _ => Ok(None),
                }
            })
            .collect()
    }

    fn group_of(&self, layer: usize, dim: i32) -> Result<i32> {
        let divides = |group: &u8| dim % i32::from(*group) == 0;
        match self.group {
            Some(group) if !GROUPS.contains(&group) => Err(Error::invalid(format!(
                "keys can't be quantized in groups of {group}: expected 32, 64 or 128"
            ))),
            Some(group) if !divides(&group) => Err(Error::invalid(format!(
                "layer {layer} has heads of {dim} dimensions, which groups of {group} do not divide"
            ))),
            Some(group) => Ok(group.into()),
            None => GROUPS
                .into_iter()
                .find(divides)
                .map(i32::from)
                .ok_or_else(|| {
                    Error::invalid(format!(
                        "layer {layer} has heads of {dim} dimensions, no multiple of 32: its keys can't be quantized"
                    ))
                }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eight() -> KvConfig {
        KvConfig {
            bits: Some(KvBits::Eight),
            ..KvConfig::default()
        }
    }

    #[test]
    fn groups_fit_heads_unless_they_are_named() {
        let dims = [Some(64), Some(32), None, Some(256), Some(96)];
        let groups = |config: &KvConfig| -> Result<Vec<_>> {
            let all = config.of_layers(&dims)?;
            Ok(all.iter().map(|kv| kv.map(|kv| kv.group)).collect())
        };
        let fitting = [Some(64), Some(32), None, Some(64), Some(32)];
        assert_eq!(groups(&eight()).unwrap(), fitting);
        let named = KvConfig {
            group: Some(64),
            ..eight()
        };
        let error = groups(&named).unwrap_err();
        assert!(
            error.message().contains("layer 1 has heads of 32"),
            "{error}"
        );
        let error = eight().of_layers(&[Some(80)]).unwrap_err();
        assert!(error.message().contains("heads of 80"), "{error}");
        assert!(KvConfig::default().of_layers(&[Some(80)]).is_ok());
    }

    #[test]
    fn layers_have_bits_of_their_own() {
        let mut config = eight();
        config.layers = BTreeMap::from([(0, None), (1, Some(KvBits::Four))]);
        let all = config.of_layers(&[Some(64); 3]).unwrap();
        let bits: Vec<_> = all.iter().map(|kv| kv.map(|kv| kv.bits)).collect();
        assert_eq!(bits, [None, Some(4), Some(8)]);
        assert!(config.of_layers(&[Some(64), None]).is_err());
        let error = config.of_layers(&[Some(64)]).unwrap_err();
        assert!(error.message().contains("no layer 1"), "{error}");
    }
}
