"""The drafter head: one gated full-attention layer behind a fusing linear (`qwen3_5_mtp`).

Row p of a sequence fuses the embedding of token p+1 with the target's hidden p (after its final
norm) and predicts token p+2 through the target's own output head. The head's output stands in for
hidden p+1 when it drafts on: that is a chained row. Parameter names are those of the snapshot.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ops import attend, rope_tables, rotate
from quantize import dequantize, rounded
from target import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, ROPE_THETA

INTERMEDIATE = 2048
EPS = 1e-6  # not the target's


class Linear(nn.Linear):
    """A matrix that may compute as if it were quantized already, and learns all the same."""

    quantized = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.quantized:
            return F.linear(x, self.weight)
        # The value of the rounded weight with the gradient of the weight itself.
        return F.linear(x, self.weight + (rounded(self.weight) - self.weight).detach())


def _linear(inputs: int, outputs: int) -> Linear:
    return Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Projections of the gated attention; the query projection also makes the output gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = _linear(HIDDEN, 2 * HEADS * HEAD_DIM)
        self.k_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = _linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm = nn.RMSNorm(HEAD_DIM, EPS)
        self.k_norm = nn.RMSNorm(HEAD_DIM, EPS)

    def queries(self, h: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """h [B, n, HIDDEN] -> rotated queries [B, n, heads, D] and gates [B, n, heads * D]."""
        both = self.q_proj(h).unflatten(-1, (HEADS, 2 * HEAD_DIM))
        q, gate = both.float().chunk(2, -1)  # query and gate interleave head by head
        return rotate(self.q_norm(q), tables), gate.flatten(-2)

    def keys(self, h: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """h [B, n, HIDDEN] -> rotated keys and values, both [B, kv_heads, n, D]."""
        raw = self.k_proj(h).unflatten(-1, (KV_HEADS, HEAD_DIM))
        k = rotate(self.k_norm(raw.float()), tables).to(raw.dtype)
        v = self.v_proj(h).unflatten(-1, (KV_HEADS, HEAD_DIM))
        return k.transpose(1, 2), v.transpose(1, 2)


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = _linear(HIDDEN, INTERMEDIATE)
        self.up_proj = _linear(HIDDEN, INTERMEDIATE)
        self.down_proj = _linear(INTERMEDIATE, HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Layer(nn.Module):
    """The decoder layer's parts; `Head` runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.mlp = Mlp()


class Head(nn.Module):
    """The whole head; embedding and output matrix are the target's and live there."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(HIDDEN, EPS)
        self.pre_fc_norm_hidden = nn.RMSNorm(HIDDEN, EPS)
        self.fc = _linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Layer()])
        self.norm = nn.RMSNorm(HIDDEN, EPS)

    def quantize(self, on: bool) -> None:
        """Whether all matrices compute as they will once they are exported with 4 bits."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.quantized = on

    def fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Two tensors [B, n, HIDDEN] -> the layer's input, f32 [B, n, HIDDEN]."""
        both = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
        return self.fc(torch.cat(both, -1)).float()

    def finish(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        """Everything behind the attention: x [B, n, HIDDEN] -> the head's output, f32."""
        layer = self.layers[0]
        x = x + layer.self_attn.o_proj(mixed.float() * gate.sigmoid()).float()
        x = x + layer.mlp(layer.post_attention_layernorm(x)).float()
        return self.norm(x)

    def chained(
        self, embedding: Tensor, hidden: Tensor, first: int, steps: int, pad: Tensor | None = None
    ) -> list[Tensor]:
        """Drafts at every position at once, as if a round began at each row from `first` on.

        embedding and hidden [B, T, HIDDEN] hold row p's two inputs; `pad` [B] counts the leading
        columns that are no rows. Element k of the result is the output of draft step k (from 0)
        for the rows first+k .., [B, T-first-k, HIDDEN]. A query of step k at row r sees the true
        keys up to row r-k, then what a session would have appended since: the keys of steps
        1..k at rows r-k+1..r.
        """
        batch, total, _ = embedding.shape
        layer, attention = self.layers[0], self.layers[0].self_attn
        columns = torch.arange(total)
        offset = torch.zeros(batch, 1, dtype=torch.long) if pad is None else pad[:, None]
        positions = (columns - offset).clamp(min=0)
        real = (columns >= offset)[:, None, None, :]
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        key_rows: list[Tensor] = []
        for k in range(steps):
            start = first + k
            # Step 0 makes keys of all rows, the prompt's too; only rows from `first` on ask.
            low = 0 if k == 0 else start
            x = self.fuse(embedding[:, low:], hidden if k == 0 else outputs[-1][:, :-1])
            tables = rope_tables(positions[:, low:], HEAD_DIM, ROPE_THETA)
            h = layer.input_layernorm(x)
            new_keys, new_values = attention.keys(h, tables)
            keys.append(new_keys)
            values.append(new_values)
            key_rows.append(columns[low:])
            skip = start - low
            q, gate = attention.queries(h[:, skip:], [t[:, skip:] for t in tables])
            asking = columns[start:, None]
            seen = [((key_rows[0] <= asking - k) & real)]
            for m in range(1, k + 1):
                chain = key_rows[m] == asking - (k - m)
                seen.append(chain.expand(batch, 1, *chain.shape))
            mixed = attend(q, torch.cat(keys, 2), torch.cat(values, 2), torch.cat(seen, -1))
            outputs.append(self.finish(x[:, skip:], mixed, gate))
        return outputs


class Session:
    """The head on one sequence, step by step with a KV cache, as an engine runs it. f32."""

    def __init__(self, head: Head, embedding: Tensor) -> None:
        self.head, self.embedding = head, embedding
        self.k = self.v = torch.zeros(1, KV_HEADS, 0, HEAD_DIM)

    def trim(self, rows: int) -> None:
        """Forget all rows from `rows` on."""
        self.k, self.v = self.k[:, :, :rows], self.v[:, :, :rows]

    @torch.no_grad()
    def append(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Add rows from n tokens and hidden [n, HIDDEN]; returns their outputs [n, HIDDEN]."""
        layer, attention = self.head.layers[0], self.head.layers[0].self_attn
        begin = self.k.shape[2]
        rows = torch.arange(begin, begin + len(tokens))
        tables = rope_tables(rows[None], HEAD_DIM, ROPE_THETA)
        x = self.head.fuse(self.embedding[torch.tensor(tokens)][None], hidden[None])
        h = layer.input_layernorm(x)
        k, v = attention.keys(h, tables)
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        q, gate = attention.queries(h, tables)
        mask = torch.arange(begin + len(tokens)) <= rows[:, None]
        return self.head.finish(x, attend(q, self.k, self.v, mask[None, None]), gate)[0]


def load_snapshot(folder: Path) -> tuple[Head, Tensor]:
    """Read an exported head, dense or quantized; returns it in f32 with its draft vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if f"{module}.scales" not in tensors:
            state[name] = tensor.float()
        elif kind == "weight":
            scales, biases = tensors[f"{module}.scales"], tensors[f"{module}.biases"]
            state[name] = dequantize(tensor, scales, biases)
    head = Head()
    head.load_state_dict(state)
    ids = json.loads((folder / "draft_vocab.json").read_text())["ids"]
    return head.requires_grad_(False), torch.tensor(ids)
