"""The block drafter (`DFlashDraftModel`): two Qwen3 layers over the target's taps.

A block is the anchor, the newest token that the target has decided, and mask tokens behind it. The
slots of a block see each other and the context rows before the anchor; slot j predicts the token j
places after the anchor, all slots in one pass. A context row is made of what the layers TAPS of the
target put out at its position. Parameter names are those of the snapshot.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import shared  # noqa: F401  (makes the modules of the MTP recipe importable)
from ops import rope_tables, rotate
from quantize import dequantize
from target import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, ROPE_THETA

TAPS = (10, 20, 28)  # layers of the target, from 0; the last one may not be tapped
LAYERS = 2
BLOCK = 5  # slots: the anchor and at most four drafts
MASK = 16  # <empty_output>, a token that the target never says
EPS = 1e-6  # not the target's


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Queries come from the block, keys and values from the context and the block."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = _linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = _linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm = nn.RMSNorm(HEAD_DIM, EPS)
        self.k_norm = nn.RMSNorm(HEAD_DIM, EPS)

    def keys(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """h [..., HIDDEN] at positions [...] -> rotated keys and values, [..., kv_heads, D]."""
        k = self.k_norm(self.k_proj(h).unflatten(-1, (KV_HEADS, HEAD_DIM)))
        v = self.v_proj(h).unflatten(-1, (KV_HEADS, HEAD_DIM))
        return rotate(k, rope_tables(positions, HEAD_DIM, ROPE_THETA)), v

    def forward(
        self, h: Tensor, context: Tensor, positions: Tensor, visible: Tensor, first: int
    ) -> Tensor:
        """h [N, b, HIDDEN], N blocks over one context [T, HIDDEN]; visible bool [N, T].

        Only the slots from `first` on ask: [N, b - first, HIDDEN].
        """
        blocks, slots, rows = h.shape[0], h.shape[1] - first, context.shape[0]
        q = self.q_norm(self.q_proj(h[:, first:]).unflatten(-1, (HEADS, HEAD_DIM)))
        q = rotate(q, rope_tables(positions[:, first:], HEAD_DIM, ROPE_THETA)) * HEAD_DIM**-0.5
        # [kv_heads, N, group * b, D]: the query heads of one key head become further rows of it.
        q = q.unflatten(2, (KV_HEADS, -1)).permute(2, 0, 3, 1, 4).reshape(
            KV_HEADS, blocks, -1, HEAD_DIM
        )  # fmt: skip
        k, v = (a.transpose(0, 1) for a in self.keys(context, torch.arange(rows)))
        own_k, own_v = (a.permute(2, 0, 1, 3) for a in self.keys(h, positions))
        far = (q.flatten(1, 2) @ k.transpose(1, 2)).view(*q.shape[:3], rows)
        far = far.masked_fill(~visible[None, :, None], -torch.inf)
        near = q @ own_k.transpose(2, 3)
        shares = torch.cat([far, near], -1).softmax(-1)
        mixed = (shares[..., :rows].flatten(1, 2) @ v).view_as(q) + shares[..., rows:] @ own_v
        mixed = mixed.view(KV_HEADS, blocks, -1, slots, HEAD_DIM).permute(1, 3, 0, 2, 4)
        return self.o_proj(mixed.flatten(2))


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
    """A decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.mlp = Mlp()

    def forward(
        self, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor, first: int
    ) -> Tensor:
        h = self.input_layernorm(x)
        x = x[:, first:] + self.self_attn(h, context, positions, visible, first)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The whole drafter; embedding and output matrix are the target's and live there."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = _linear(len(TAPS) * HIDDEN, HIDDEN)
        self.hidden_norm = nn.RMSNorm(HIDDEN, EPS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)

    def forward(
        self, embedding: Tensor, taps: Tensor, ids: Tensor, anchors: Tensor, slots: int
    ) -> Tensor:
        """Run a block at each of the `anchors` [N], positions in one sequence `ids`.

        embedding is the target's [VOCAB, HIDDEN]; taps [T, len(TAPS) * HIDDEN] belong to the first
        T positions, of which a block sees those before its anchor. Returns what the target's
        output matrix takes, for the slots behind the anchor: [N, slots - 1, HIDDEN].
        """
        context = self.hidden_norm(self.fc(taps))
        visible = torch.arange(len(taps)) < anchors[:, None]
        positions = anchors[:, None] + torch.arange(slots)
        tokens = torch.full_like(positions, MASK)
        tokens[:, 0] = ids[anchors]
        x = embedding[tokens]
        for layer in self.layers:
            # Nobody asks what the last layer makes of the anchor.
            x = layer(x, context, positions, visible, int(layer is self.layers[-1]))
        return self.norm(x)


def load_snapshot(folder: Path) -> tuple[Drafter, Tensor]:
    """Read an exported drafter; returns it in f32 with its draft vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if f"{module}.scales" not in tensors:
            state[name] = tensor.float()
        elif kind == "weight":
            scales, biases = tensors[f"{module}.scales"], tensors[f"{module}.biases"]
            state[name] = dequantize(tensor, scales, biases)
    drafter = Drafter()
    drafter.load_state_dict(state)
    ids = json.loads((folder / "draft_vocab.json").read_text())["ids"]
    return drafter.requires_grad_(False), torch.tensor(ids)
