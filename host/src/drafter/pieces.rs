//! The tensors of a split-off head, and what each is made of.

use std::collections::{BTreeMap, BTreeSet};

use plugin_api::{DType as OpType, Tensor};

use super::head::{Head, Norms};
use crate::backend;
use crate::checkpoint::{Checkpoint, DType, Quoted, TensorData, TensorSpec};
use crate::error::LoadError;

const HEAD_NORMS: [&str; 3] = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];
const LAYER_NORMS: [&str; 4] = [
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
];
const ATTENTION: [&str; 4] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
];
const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// Routers: converters leave them as they are, for a rounded one chooses other experts.
const ROUTERS: [&str; 2] = ["mlp.gate", "mlp.shared_expert_gate"];
const LEAVES: [&str; 4] = ["weight", "bias", "scales", "biases"];

/// A tensor of the head, by the names of the tensors it is made of.
pub(super) struct Piece {
    pub spec: TensorSpec,
    source: Source,
    /// Bytes that are read for it.
    pub reads: u64,
}

enum Source {
    /// One tensor as it is.
    Copy(String),
    /// One tensor and one.
    Shift(String),
    /// Experts that are stored one by one.
    Stack(Vec<String>),
    /// Of every expert in `[E, 2I, H]` the first or the second half of the rows.
    Half(String, usize),
}

/// All tensors of a head, in the layout of split-off ones.
pub(super) fn plan(head: &Head, norms: Norms) -> Result<Vec<Piece>, LoadError> {
    let mut plan = Plan {
        head,
        norms,
        pieces: Vec::new(),
        experts: BTreeMap::new(),
    };
    let names = head.checkpoint.names();
    for leaf in names.filter_map(|name| name.strip_prefix(head.prefix)) {
        plan.add(leaf)?;
    }
    plan.stack_experts()?;
    plan.require_all()?;
    Ok(plan.pieces)
}

struct Plan<'a> {
    head: &'a Head<'a>,
    norms: Norms,
    pieces: Vec<Piece>,
    /// By the module they become, the sources by expert.
    experts: BTreeMap<String, BTreeMap<u32, String>>,
}

impl Plan<'_> {
    /// Takes in one tensor of the checkpoint.
    fn add(&mut self, name: &str) -> Result<(), LoadError> {
        let Some((layer, rest)) = name.strip_prefix("layers.").and_then(|n| n.split_once('.'))
        else {
            let (module, leaf) = name.rsplit_once('.').unwrap_or((name, ""));
            let is_norm = HEAD_NORMS.contains(&module);
            if !(is_norm || module == "fc") || !LEAVES.contains(&leaf) {
                return Err(self.unknown(name));
            }
            return self.push(name, name, is_norm);
        };
        match layer.parse::<u64>() {
            Ok(layer) if layer < self.head.layers => {}
            Ok(_) => {
                let what = format!(
                    "tensor {} is of a layer that the config lacks: \"mtp_num_hidden_layers\" is {}",
                    Quoted(&self.source_name(name)),
                    self.head.layers
                );
                return Err(LoadError::mismatch(self.head.checkpoint.path(), what));
            }
            Err(_) => return Err(self.unknown(name)),
        }
        if let Some(expert) = rest.strip_prefix("mlp.experts.") {
            let target = format!("layers.{layer}.mlp.switch_mlp");
            return self.add_expert(name, expert, &target);
        }
        let (module, leaf) = rest.rsplit_once('.').unwrap_or((rest, ""));
        let is_norm = LAYER_NORMS.contains(&module);
        let in_mlp = ["mlp.", "mlp.shared_expert.", "mlp.switch_mlp."]
            .iter()
            .any(|prefix| {
                let projection = module.strip_prefix(prefix);
                projection.is_some_and(|module| PROJECTIONS.contains(&module))
            });
        let known = is_norm || in_mlp || ATTENTION.contains(&module) || ROUTERS.contains(&module);
        if !known || !LEAVES.contains(&leaf) {
            return Err(self.unknown(name));
        }
        self.push(name, name, is_norm)
    }

    /// A tensor of experts: all in one, or one by one.
    fn add_expert(&mut self, name: &str, expert: &str, target: &str) -> Result<(), LoadError> {
        match expert.strip_suffix(".weight").unwrap_or(expert) {
            "down_proj" => {
                self.fused(name)?;
                self.push(name, &format!("{target}.down_proj.weight"), false)
            }
            "gate_up_proj" => {
                let tensor = self.fused(name)?;
                let [experts, rows, width] = tensor.shape[..] else {
                    return Err(self.unknown(name));
                };
                if rows % 2 != 0 {
                    return Err(self.misshapen(name, &tensor, "an even number of rows"));
                }
                for (half, projection) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                    self.pieces.push(Piece {
                        spec: TensorSpec {
                            name: format!("{target}.{projection}.weight"),
                            dtype: tensor.dtype,
                            shape: vec![experts, rows / 2, width],
                        },
                        source: Source::Half(self.source_name(name), half),
                        reads: tensor.len() as u64 / 2,
                    });
                }
                Ok(())
            }
            one => {
                let Some((index, projection)) = one.split_once('.') else {
                    return Err(self.unknown(name));
                };
                let index = index.parse().map_err(|_| self.unknown(name))?;
                if !PROJECTIONS.contains(&projection) || !expert.ends_with(".weight") {
                    return Err(self.unknown(name));
                }
                let source = self.source_name(name);
                let stack = format!("{target}.{projection}.weight");
                self.experts.entry(stack).or_default().insert(index, source);
                Ok(())
            }
        }
    }

    /// A tensor `[E, .., ..]` of all experts.
    fn fused(&self, name: &str) -> Result<TensorData, LoadError> {
        let tensor = tensor(self.head.checkpoint, &self.source_name(name))?;
        let expected = self.head.size("num_experts");
        if tensor.shape.len() != 3 || expected.is_some_and(|n| n != tensor.shape[0]) {
            let expected = expected.map_or("E".to_owned(), |n| n.to_string());
            return Err(self.misshapen(name, &tensor, &format!("[{expected}, .., ..]")));
        }
        Ok(tensor)
    }

    fn stack_experts(&mut self) -> Result<(), LoadError> {
        for (name, sources) in std::mem::take(&mut self.experts) {
            let path = self.head.checkpoint.path();
            let count = self.head.size("num_experts").unwrap_or(sources.len());
            let complete = (0u32..).zip(sources.keys()).all(|(i, expert)| i == *expert);
            if !complete || sources.len() != count {
                let found = sources.len();
                let what = format!(
                    "{name} needs experts 0 to {count}, without the last; {found} are there"
                );
                return Err(LoadError::missing(path, what));
            }
            let sources: Vec<String> = sources.into_values().collect();
            let mut shape = Vec::new();
            let mut reads = 0;
            for source in &sources {
                let expert = tensor(self.head.checkpoint, source)?;
                reads += expert.len() as u64;
                let own = (expert.dtype, expert.shape);
                match shape.first() {
                    None if own.1.len() == 2 => shape.push(own),
                    Some(first) if *first == own => {}
                    _ => {
                        let what = format!(
                            "tensor {} is not shaped as the experts before it",
                            Quoted(source)
                        );
                        return Err(LoadError::malformed(path, what));
                    }
                }
            }
            if let Some((dtype, one)) = shape.pop() {
                let shape = [&[sources.len()], &one[..]].concat();
                self.pieces.push(Piece {
                    spec: TensorSpec { name, dtype, shape },
                    source: Source::Stack(sources),
                    reads,
                });
            }
        }
        Ok(())
    }

    /// A tensor that stays whole.
    fn push(&mut self, name: &str, target: &str, is_norm: bool) -> Result<(), LoadError> {
        let source = self.source_name(name);
        let tensor = tensor(self.head.checkpoint, &source)?;
        let shift = is_norm && self.norms == Norms::MinusOne;
        if shift && (tensor.shape.len() != 1 || op_type(tensor.dtype).is_none()) {
            return Err(self.misshapen(name, &tensor, "one axis of floating-point numbers"));
        }
        let reads = tensor.len() as u64;
        self.pieces.push(Piece {
            spec: TensorSpec {
                name: target.to_owned(),
                dtype: tensor.dtype,
                shape: tensor.shape,
            },
            source: if shift {
                Source::Shift(source)
            } else {
                Source::Copy(source)
            },
            reads,
        });
        Ok(())
    }

    /// Refuses a head that lacks tensors, naming the first of them.
    fn require_all(&self) -> Result<(), LoadError> {
        let mut needed = vec!["fc".to_owned()];
        needed.extend(HEAD_NORMS.map(String::from));
        let positive = |key| self.head.size(key).is_some_and(|n| n > 0);
        for layer in 0..self.head.layers {
            let mut need = |module: &str| needed.push(format!("layers.{layer}.{module}"));
            LAYER_NORMS
                .iter()
                .chain(&ATTENTION)
                .for_each(|module| need(module));
            let mut mlps = vec!["mlp"];
            if positive("num_experts") {
                mlps = vec!["mlp.switch_mlp"];
                need(ROUTERS[0]);
                if positive("shared_expert_intermediate_size") {
                    mlps.push("mlp.shared_expert");
                    need(ROUTERS[1]);
                }
            }
            for mlp in mlps {
                PROJECTIONS
                    .iter()
                    .for_each(|leaf| need(&format!("{mlp}.{leaf}")));
            }
        }
        let present: BTreeSet<&str> = self.pieces.iter().map(|p| p.spec.name.as_str()).collect();
        let missing: Vec<_> = needed
            .iter()
            .map(|module| format!("{module}.weight"))
            .filter(|name| !present.contains(name.as_str()))
            .map(|name| self.source_name(&name))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let shown = missing[..missing.len().min(3)].join(", ");
        let more = match missing.len().saturating_sub(3) {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let what = format!("missing tensors of its head: {shown}{more}");
        Err(LoadError::missing(self.head.checkpoint.path(), what)
            .remedy("the checkpoint is incomplete: download it again"))
    }

    fn source_name(&self, name: &str) -> String {
        format!("{}{name}", self.head.prefix)
    }

    fn unknown(&self, name: &str) -> LoadError {
        let name = self.source_name(name);
        let what = format!("tensor {} is none that a Qwen3.5 head has", Quoted(&name));
        LoadError::unsupported(self.head.checkpoint.path(), what)
    }

    fn misshapen(&self, name: &str, tensor: &TensorData, expected: &str) -> LoadError {
        let what = format!(
            "tensor {} has {} elements in shape {:?}, expected {expected}",
            Quoted(&self.source_name(name)),
            tensor.dtype,
            tensor.shape
        );
        LoadError::malformed(self.head.checkpoint.path(), what)
    }
}

impl Piece {
    /// Whether converters quantize it in groups of `group`.
    pub fn is_quantizable(&self, group: usize) -> bool {
        let TensorSpec { name, dtype, shape } = &self.spec;
        let Some(module) = name.strip_suffix(".weight") else {
            return false;
        };
        let routes = ROUTERS.iter().any(|router| module.ends_with(router));
        let matrix =
            matches!(shape[..], [rows, width] if rows > 0 && width > 0 && width % group == 0);
        matrix && !routes && op_type(*dtype).is_some()
    }

    /// Its elements.
    pub fn read(&self, checkpoint: &Checkpoint) -> Result<Vec<u8>, LoadError> {
        match &self.source {
            Source::Copy(name) => Ok(tensor(checkpoint, name)?.to_vec()),
            Source::Shift(name) => {
                let bytes = tensor(checkpoint, name)?.to_vec();
                let shifted = self
                    .tensor(&bytes)
                    .and_then(|tensor| tensor.shift(1.0))
                    .and_then(|tensor| backend::bytes_of(&tensor));
                shifted.map_err(|e| LoadError::failed(checkpoint.path(), e.message()))
            }
            Source::Stack(names) => {
                let mut all = Vec::new();
                for name in names {
                    all.extend(tensor(checkpoint, name)?.to_vec());
                }
                Ok(all)
            }
            Source::Half(name, half) => {
                let both = tensor(checkpoint, name)?.to_vec();
                let size = self.spec.shape[1..].iter().product::<usize>() * self.spec.dtype.size();
                let halves = both.chunks_exact(size.max(1));
                Ok(halves.skip(*half).step_by(2).flatten().copied().collect())
            }
        }
    }

    /// Its elements as a tensor for ops.
    pub fn tensor(&self, bytes: &[u8]) -> plugin_api::Result<Tensor> {
        let fail = || plugin_api::Error::invalid(format!("{}: no op takes it", self.spec.name));
        let dims = self.spec.shape.iter().map(|&n| i32::try_from(n).ok());
        let dims = dims.collect::<Option<Vec<_>>>().ok_or_else(fail)?;
        Tensor::from_bytes(bytes, &dims, op_type(self.spec.dtype).ok_or_else(fail)?)
    }
}

/// The type of floating-point elements in ops; `None` for others.
fn op_type(dtype: DType) -> Option<OpType> {
    match dtype {
        DType::F32 => Some(OpType::F32),
        DType::F16 => Some(OpType::F16),
        DType::BF16 => Some(OpType::BF16),
        _ => None,
    }
}

fn tensor(checkpoint: &Checkpoint, name: &str) -> Result<TensorData, LoadError> {
    let missing = || {
        let what = format!("tensor {} is missing", Quoted(name));
        LoadError::missing(checkpoint.path(), what)
    };
    checkpoint.tensor(name).ok_or_else(missing)?
}
