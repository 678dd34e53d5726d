"""A model in the shape of Qwen3.5-0.8B with random weights of 4 bits: as fast as the real one, and made
here in seconds. What it says is noise.

Standard library only.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Iterator

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 1024, 3584, 24, 248320
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 256
DELTA_HEADS, DELTA_DIM, KERNEL = 16, 128, 4
INTERVAL, GROUP, BITS = 4, 64, 4

CONFIG = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "quantization": {"group_size": GROUP, "bits": BITS},
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "linear_num_value_heads": DELTA_HEADS,
        "linear_num_key_heads": DELTA_HEADS,
        "linear_key_head_dim": DELTA_DIM,
        "linear_value_head_dim": DELTA_DIM,
        "linear_conv_kernel_dim": KERNEL,
        "full_attention_interval": INTERVAL,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    },
}

# Name, dtype, shape and bytes.
Tensor = tuple[str, str, list[int], bytes]


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def constant(name: str, shape: list[int], value: float) -> Tensor:
    count = 1
    for length in shape:
        count *= length
    return name, "BF16", shape, bf16(value) * count


def packed(name: str, outputs: int, inputs: int, noise: random.Random) -> Iterator[Tensor]:
    """A matrix that leaves the size of what it multiplies about as it is."""
    # Sixteen levels around zero have a standard deviation of 4.6 steps.
    step = 1 / 4.6 / inputs**0.5
    groups = inputs // GROUP
    yield f"{name}.weight", "U32", [outputs, inputs * BITS // 32], noise.randbytes(outputs * inputs * BITS // 8)
    yield constant(f"{name}.scales", [outputs, groups], step)
    yield constant(f"{name}.biases", [outputs, groups], -7.5 * step)


def tensors() -> Iterator[Tensor]:
    noise = random.Random(1)
    model = "language_model.model"
    keys = values = DELTA_HEADS * DELTA_DIM
    channels = 2 * keys + values
    yield from packed(f"{model}.embed_tokens", VOCAB, HIDDEN, noise)
    yield constant(f"{model}.norm.weight", [HIDDEN], 1.0)
    for index in range(LAYERS):
        layer = f"{model}.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield constant(f"{layer}.{norm}.weight", [HIDDEN], 1.0)
        matrices = {
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        if (index + 1) % INTERVAL == 0:
            for norm in ("q_norm", "k_norm"):
                yield constant(f"{layer}.self_attn.{norm}.weight", [HEAD_DIM], 1.0)
            matrices["self_attn.q_proj"] = (2 * HEADS * HEAD_DIM, HIDDEN)
            matrices["self_attn.k_proj"] = (KV_HEADS * HEAD_DIM, HIDDEN)
            matrices["self_attn.v_proj"] = (KV_HEADS * HEAD_DIM, HIDDEN)
            matrices["self_attn.o_proj"] = (HIDDEN, HEADS * HEAD_DIM)
        else:
            yield constant(f"{layer}.linear_attn.conv1d.weight", [channels, KERNEL, 1], 0.25)
            yield constant(f"{layer}.linear_attn.A_log", [DELTA_HEADS], 1.0)
            yield constant(f"{layer}.linear_attn.dt_bias", [DELTA_HEADS], -4.0)
            yield constant(f"{layer}.linear_attn.norm.weight", [DELTA_DIM], 1.0)
            matrices["linear_attn.in_proj_qkv"] = (channels, HIDDEN)
            matrices["linear_attn.in_proj_z"] = (values, HIDDEN)
            matrices["linear_attn.in_proj_b"] = (DELTA_HEADS, HIDDEN)
            matrices["linear_attn.in_proj_a"] = (DELTA_HEADS, HIDDEN)
            matrices["linear_attn.out_proj"] = (HIDDEN, values)
        for name, (outputs, inputs) in matrices.items():
            yield from packed(f"{layer}.{name}", outputs, inputs, noise)


def write(folder: Path) -> None:
    header: dict[str, object] = {}
    end = 0
    with tempfile.TemporaryFile(dir=folder) as body:
        for name, dtype, shape, data in tensors():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
            body.write(data)
            end += len(data)
        body.seek(0)
        with open(folder / "model.safetensors", "wb") as file:
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            file.write(struct.pack("<Q", len(text)) + text)
            shutil.copyfileobj(body, file, 1 << 20)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")


def made(cache: Path) -> Path:
    """The model's folder; makes it when it isn't there."""
    folder = cache / "qwen3_5-0.8b-random-4bit"
    if not folder.is_dir():
        cache.mkdir(exist_ok=True)
        print(f"making {folder.name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as partial:
            whole = Path(partial) / "whole"
            whole.mkdir()
            write(whole)
            os.replace(whole, folder)
    return folder
