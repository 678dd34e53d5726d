"""SmolLM2-135M-Instruct in plain torch: the GGUF file dequantized, a llama forward, a KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader, dequantize
from torch import Tensor

from ops import attend, rope_tables, rotate

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_PATH = Path(__file__).resolve().parents[2] / "smollm2-135m-instruct" / MODEL_FILE

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 9, 3, 64
INTERMEDIATE, VOCAB = 1536, 49152
ROPE_THETA, EPS = 1e5, 1e-5

Weights = dict[str, Tensor]


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order, which interleaves the two halves of each head for its rope."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def load_weights(path: Path = MODEL_PATH) -> Weights:
    """All tensors of the GGUF file as f32, under their GGUF names, linear weights [out, in]."""
    if not path.exists():
        raise SystemExit(f"{path} is missing; models/fetch.py brings it.")
    weights: Weights = {}
    for tensor in GGUFReader(path).tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if tensor.name.endswith("attn_q.weight"):
            array = _half_split(array, HEADS)
        elif tensor.name.endswith("attn_k.weight"):
            array = _half_split(array, KV_HEADS)
        weights[tensor.name] = torch.from_numpy(np.ascontiguousarray(array))
    return weights


class Cache:
    """Keys and values of every layer, [B, kv_heads, columns, D], allocated once."""

    def __init__(self, batch: int, columns: int, dtype: torch.dtype) -> None:
        shape = (batch, KV_HEADS, columns, HEAD_DIM)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]

    def keep(self, rows: Tensor) -> None:
        """Drop all batch rows but `rows`."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]


class Target:
    """The model. Matrix products run in `dtype`; norms and the residual stream stay f32."""

    def __init__(self, weights: Weights, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.embedding = weights["token_embd.weight"]  # f32 [VOCAB, HIDDEN], tied
        self.output = self.embedding.to(dtype)
        self.final_norm = weights["output_norm.weight"]
        self.layers = []
        for i in range(LAYERS):
            w = {n: weights[f"blk.{i}.{n}.weight"] for n in ("attn_norm", "ffn_norm")}
            for n in ("attn_output", "ffn_down"):
                w[n] = weights[f"blk.{i}.{n}.weight"].to(dtype)
            # One wide product is faster than three narrow ones.
            qkv = [weights[f"blk.{i}.attn_{n}.weight"] for n in "qkv"]
            gate_up = [weights[f"blk.{i}.ffn_{n}.weight"] for n in ("gate", "up")]
            w["qkv"], w["gate_up"] = torch.cat(qkv).to(dtype), torch.cat(gate_up).to(dtype)
            self.layers.append(w)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Cache,
        column: int,
        rows: slice = slice(None),
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run tokens [B, n], writing cache columns column .. column+n.

        positions [B, n]; mask bool [B, 1, n, column+n]; `rows` are the cache rows in use; each
        key of `taps` is a layer whose output, f32 [B, n, HIDDEN], becomes its value. Returns the
        hidden after the final norm, f32 [B, n, HIDDEN].
        """
        batch, n = tokens.shape
        end = column + n
        # Turned into a bias once; attention would do so in every layer.
        bias = torch.zeros(mask.shape, dtype=self.dtype).masked_fill_(~mask, float("-inf"))
        x = self.embedding[tokens]
        tables = rope_tables(positions, HEAD_DIM, ROPE_THETA)
        for i, w in enumerate(self.layers):
            h = F.rms_norm(x, (HIDDEN,), w["attn_norm"], EPS)
            qkv = self._linear(h, w["qkv"]).float().view(batch, n, -1, HEAD_DIM)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
            keys, values = cache.keys[i], cache.values[i]
            keys[rows, :, column:end] = rotate(k, tables).transpose(1, 2).to(self.dtype)
            values[rows, :, column:end] = v.transpose(1, 2).to(self.dtype)
            q = rotate(q, tables)
            mixed = attend(q, keys[rows, :, :end], values[rows, :, :end], bias)
            x = x + self._linear(mixed, w["attn_output"]).float()
            h = F.rms_norm(x, (HIDDEN,), w["ffn_norm"], EPS)
            gate, up = self._linear(h, w["gate_up"]).chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, w["ffn_down"]).float()
            if taps is not None and i in taps:
                taps[i] = x
        return F.rms_norm(x, (HIDDEN,), self.final_norm, EPS)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., HIDDEN] -> f32 logits [..., VOCAB]."""
        return self._linear(hidden, self.output).float()

    def read(self, ids: list[int], taps: dict[int, Tensor] | None = None) -> Tensor:
        """The hidden of every position of one sequence, [n, HIDDEN]; `taps` as in `forward`."""
        n = len(ids)
        mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        cache = Cache(1, n, self.dtype)
        tokens, positions = torch.tensor([ids]), torch.arange(n)[None]
        return self.forward(tokens, positions, mask, cache, 0, taps=taps)[0]
