"""Where training starts: a head that is computed, not trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import target as smol
from data import Sample
from head import INTERMEDIATE, Head
from target import HEAD_DIM, HEADS, HIDDEN, Target, Weights


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


@torch.no_grad()
def initial_head(weights: Weights, target: Target, samples: list[Sample]) -> Head:
    """The target's last layer, fed by the linear map that best predicts that layer's input.

    Ridge regression from (embedding of token p+1, hidden p) to the residual stream in front of the
    last layer at p+1. Everything that adds to the stream is then divided by its rms: the norms undo
    that, and weights of ordinary size suit the optimizer.
    """
    torch.manual_seed(0)
    last = {n: weights[f"blk.{smol.LAYERS - 1}.{n}.weight"] for n in (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
        "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
    )}  # fmt: skip
    xx = torch.zeros(2 * HIDDEN, 2 * HIDDEN, dtype=torch.float64)
    xy = torch.zeros(2 * HIDDEN, HIDDEN, dtype=torch.float64)
    sizes: list[Tensor] = []  # rms of stream, queries and keys, per sample
    for sample in samples:
        taps = {smol.LAYERS - 2: torch.empty(0)}
        hidden = target.read(sample["ids"].tolist(), taps)
        embedding = target.embedding[sample["ids"]]
        # The first few positions have outsized hiddens that would rule the fit.
        x = torch.cat([_rms(embedding[1:]), _rms(hidden[:-1])], -1)[4:]
        y = taps[smol.LAYERS - 2][0, 5:]
        xx += (x.T @ x).double()
        xy += (x.T @ y).double()
        h = F.rms_norm(y, (HIDDEN,), last["attn_norm"], smol.EPS)
        heads = [(h @ last[n].T).unflatten(-1, (-1, HEAD_DIM)) for n in ("attn_q", "attn_k")]
        per_head = [a.square().mean(-1).sqrt().mean() for a in heads]
        sizes.append(torch.stack([y.square().mean().sqrt(), *per_head]))
    ridge = 1e-3 * xx.diagonal().mean() * torch.eye(2 * HIDDEN, dtype=torch.float64)
    fit = torch.linalg.solve(xx + ridge, xy).float().T
    stream, query_size, key_size = torch.stack(sizes).mean(0)

    head = Head()
    layer, attention = head.layers[0], head.layers[0].self_attn
    head.fc.weight.copy_(fit / stream)
    head.norm.weight.copy_(target.final_norm)
    layer.input_layernorm.weight.copy_(last["attn_norm"])
    layer.post_attention_layernorm.weight.copy_(last["ffn_norm"])
    q = last["attn_q"].view(HEADS, HEAD_DIM, HIDDEN)
    attention.q_proj.weight.copy_(torch.cat([q, 0.002 * torch.randn_like(q)], 1).flatten(0, 1))
    attention.k_proj.weight.copy_(last["attn_k"])
    attention.v_proj.weight.copy_(last["attn_v"])
    # The gate starts at sigmoid(0) = 1/2.
    attention.o_proj.weight.copy_(2 * last["attn_output"] / stream)
    # The target has no q/k norms: give ours the sizes that its queries and keys have.
    attention.q_norm.weight.fill_(query_size)
    attention.k_norm.weight.fill_(key_size)
    spare = INTERMEDIATE - smol.INTERMEDIATE
    for ours, theirs in ((layer.mlp.gate_proj, "ffn_gate"), (layer.mlp.up_proj, "ffn_up")):
        ours.weight.copy_(torch.cat([last[theirs], 0.01 * torch.randn(spare, HIDDEN)]))
    # New MLP units begin without effect.
    down = torch.cat([last["ffn_down"], torch.zeros(HIDDEN, spare)], 1)
    layer.mlp.down_proj.weight.copy_(down / stream)
    return head
