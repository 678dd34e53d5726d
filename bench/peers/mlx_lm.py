"""One sample of mlx-lm.

A folder is read as it is. mlx-lm reads no GGUF: such a file is converted once, into bench/.cache, without
requantizing: a block of
Q4_0, Q4_1 or Q8_0 is a group of 32 in MLX's affine scheme, `weight = scale * q + bias`. Scales and
biases become f32, for f16 would round their sums.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent
# This folder holds files named like the packages they import: look one folder higher instead.
sys.path[0] = str(BENCH)

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

import sample  # noqa: E402

CACHE = BENCH / ".cache"
GROUP = 32

# Slow on a CPU, so little of it.
PLAN = sample.Plan(prefill=(64,), decode=16, widths=(1, 2, 4), passes=3)
QUICK = sample.Plan(prefill=(64,), decode=4, widths=(1, 4), passes=1)
# What comes as a folder is larger than the demo model: seconds for a token.
FOLDER = sample.Plan(prefill=(1,), decode=2, widths=(1,), passes=1)

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def module_name(tensor: str) -> str:
    """`blk.3.attn_q.weight` is the module `model.layers.3.self_attn.q_proj`."""
    stem, _, kind = tensor.rpartition(".")
    prefix = ""
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"model.layers.{layer}."
    if kind != "weight" or stem not in NAMES:
        raise SystemExit(f"{tensor}: no such tensor in mlx-lm's llama")
    return prefix + NAMES[stem]


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF orders the rows of q and k for interleaved rope; back to the halves that mlx-lm turns."""
    halves = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def affine(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Rows of GGUF blocks as MLX's packed words, scales, biases, and the bits of one value."""
    rows = blocks.shape[0]
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks = blocks.reshape(rows, -1, size)

    def half(at: int) -> np.ndarray:
        values = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
        return values[..., 0].astype(np.float32)

    scales = half(0)
    if kind == "Q8_0":
        # Signed bytes; MLX's are unsigned.
        packed, bits, biases = blocks[..., 2:] ^ 0x80, 8, -128 * scales
    else:
        start = size - GROUP // 2
        bits, biases = 4, half(2) if kind == "Q4_1" else -8 * scales
        # Byte j holds values j and j + 16, MLX's byte holds neighbours; low nibble first in both.
        data = blocks[..., start:]
        values = np.concatenate([data & 15, data >> 4], axis=-1)
        packed = values[..., 0::2] | values[..., 1::2] << 4
    words = np.ascontiguousarray(packed).reshape(rows, -1).view("<u4")
    return words, scales, biases, bits


def convert(path: Path, folder: Path) -> None:
    """Write the model at `path` as an MLX checkpoint, having compared every dequantized value."""
    import gguf

    reader = gguf.GGUFReader(path)

    def fact(key: str, default: object = None) -> object:
        field = reader.get_field(key)
        if field is None and default is None:
            raise SystemExit(f"{path}: has no {key}")
        return default if field is None else field.contents()

    if (family := fact("general.architecture")) != "llama":
        raise SystemExit(f"{path}: is a {family} model; the conversion for mlx-lm knows only llama")
    heads, kv_heads = fact("llama.attention.head_count"), fact("llama.attention.head_count_kv")
    weights: dict[str, mx.array] = {}
    quantization: dict[str, object] = {"group_size": GROUP, "bits": 4}
    for tensor in reader.tensors:
        name, kind, data = module_name(tensor.name), tensor.tensor_type.name, tensor.data
        if kind not in ("F32", "F16", "Q4_0", "Q4_1", "Q8_0"):
            raise SystemExit(f"{tensor.name}: can't convert {kind}")
        right = gguf.quants.dequantize(data, tensor.tensor_type).astype(np.float32)
        # Rows are quantized each for itself, so they can move as they are.
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if name.endswith(part):
                data, right = unpermute(data, count), unpermute(right, count)
        if kind in ("F32", "F16"):
            weights[f"{name}.weight"] = mx.array(right)
            continue
        *arrays, bits = affine(data, kind)
        words, scales, biases = map(mx.array, arrays)
        ours = mx.dequantize(words, scales, biases, group_size=GROUP, bits=bits)
        if not np.array_equal(np.array(ours), right):
            raise SystemExit(f"{tensor.name}: the conversion is not exact")
        weights |= {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": biases}
        quantization[name] = {"group_size": GROUP, "bits": bits}

    config = {
        "model_type": "llama",
        "hidden_size": fact("llama.embedding_length"),
        "num_hidden_layers": fact("llama.block_count"),
        "intermediate_size": fact("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": fact("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": fact("llama.rope.freq_base", 10000.0),
        "vocab_size": fact("llama.vocab_size"),
        "max_position_embeddings": fact("llama.context_length"),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "quantization": quantization,
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def converted(path: Path) -> Path:
    """The folder with the converted model; makes it when it isn't there."""
    stat = path.stat()
    folder = CACHE / f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(exist_ok=True)
    # Unwind when told to end, so that no half of a model stays.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="partial-") as partial:
        # A process of its own, or its memory would count in this one's peak.
        command = [sys.executable, __file__, "--model", path, "--threads", "1", "--convert", partial]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(1)
        whole = Path(partial) / "whole"
        whole.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.move(Path(partial) / name, whole / name)
        os.replace(whole, folder)
    return folder


class MlxLm:
    """A `sample.Engine`."""

    def __init__(self, folder: Path) -> None:
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
        from mlx_lm.utils import load_model

        self.model, config = load_model(folder)
        self.vocab = config.get("text_config", config)["vocab_size"]
        self.fresh = lambda: make_prompt_cache(self.model)
        self.cache = self.fresh()
        self.can_trim, self.trim = can_trim_prompt_cache, trim_prompt_cache

    def forward(self, tokens: list[int], all_rows: bool = False) -> int:
        if not all_rows and len(tokens) > 1:
            # As mlx-lm reads prompts: no logits but for the last token.
            self.model(mx.array([tokens[:-1]]), cache=self.cache)
            mx.eval([cache.state for cache in self.cache])
            tokens = tokens[-1:]
        logits = self.model(mx.array([tokens]), cache=self.cache)
        mx.eval(logits)
        return mx.argmax(logits[0, -1]).item()

    def rollback(self, length: int) -> None:
        if length == 0:
            self.cache = self.fresh()
        elif self.can_trim(self.cache):
            self.trim(self.cache, self.cache[0].offset - length)
        # Else it is recurrent and stays: passes start some tokens later, which costs them little.


def main() -> None:
    parser = sample.arguments(__doc__.splitlines()[0])
    parser.add_argument("--convert", type=Path, metavar="DIR", help="only convert, into DIR")
    args = parser.parse_args()
    if args.convert:
        return convert(args.model, args.convert)
    folder = args.model if args.model.is_dir() else converted(args.model)
    import mlx_lm.utils  # noqa: F401  # not part of loading the model

    plan = FOLDER if args.model.is_dir() else QUICK if args.quick else PLAN
    return sample.report(lambda: MlxLm(folder), plan, args.threads)


if __name__ == "__main__":
    main()
