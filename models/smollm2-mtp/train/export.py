"""Writing a head as a `qwen3_5_mtp` snapshot: the folder that an engine loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import target as smol
from head import EPS, INTERMEDIATE, Head
from quantize import BITS, GROUP, quantize
from tokens import EOS

WEIGHTS = "model.safetensors"


def config(vocabulary_size: int, steps: int, quantized: bool) -> dict[str, Any]:
    """The snapshot's config.json, for a head that was trained to draft `steps` tokens."""
    rope: dict[str, Any] = dict(rope_theta=smol.ROPE_THETA, partial_rotary_factor=1.0)
    text = dict(
        model_type="qwen3_5_text",
        hidden_size=smol.HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=smol.HEADS,
        num_key_value_heads=smol.KV_HEADS,
        head_dim=smol.HEAD_DIM,
        rms_norm_eps=EPS,
        vocab_size=smol.VOCAB,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        attn_output_gate=True,
        full_attention_interval=1,
        layer_types=["full_attention"],
        # There is no linear-attention layer, but readers of the format ask for its sizes.
        linear_num_value_heads=4,
        linear_num_key_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=8192,
        **rope,
        # Multimodal rope is plain rope for text; the sections only have to fill half a head.
        rope_parameters=dict(
            rope_type="default",
            type="default",
            **rope,
            mrope_section=[11, 11, 10],
            mrope_interleaved=True,
        ),
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS,
        dtype="bfloat16",
    )
    result: dict[str, Any] = dict(
        model_type="qwen3_5_mtp",
        architectures=["Qwen3_5MTPDraftModel"],
        block_size=steps + 1,  # the width of a verification pass: the bonus and the drafts
        tie_word_embeddings=True,
        text_config=text,
        mlxhost=dict(
            target="SmolLM2-135M-Instruct",
            target_file=smol.MODEL_FILE,
            hidden="post_final_norm",
            draft_vocab_file="draft_vocab.json",
            draft_vocab_size=vocabulary_size,
            trained_steps=steps,
        ),
    )
    if quantized:
        scheme = dict(group_size=GROUP, bits=BITS, mode="affine")
        result.update(quantization=scheme, quantization_config=scheme)
    return result


def export(folder: Path, head: Head, vocabulary: Tensor, steps: int, quantized: bool) -> None:
    """Write the head in bf16, or its matrices in 4 bits and its norms in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in head.state_dict().items():
        weight = parameter.to(torch.bfloat16).contiguous()
        if quantized and weight.dim() == 2:
            module = name.removesuffix(".weight")
            parts = quantize(weight)
            tensors.update(zip((name, f"{module}.scales", f"{module}.biases"), parts))
        else:
            tensors[name] = weight
    save_file(tensors, folder / WEIGHTS, metadata={"format": "mlx"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors leaves it readable by its owner only
    index = dict(
        metadata=dict(
            total_size=sum(t.nbytes for t in tensors.values()),
            total_parameters=sum(p.numel() for p in head.parameters()),
        ),
        weight_map={name: WEIGHTS for name in sorted(tensors)},
    )
    settings = config(len(vocabulary), steps, quantized)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=1))
    (folder / "draft_vocab.json").write_text(json.dumps(dict(ids=vocabulary.tolist())))
