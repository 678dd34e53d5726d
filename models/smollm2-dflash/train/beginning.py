"""Where training starts: a drafter that is computed, not trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import shared  # noqa: F401  (makes the modules of the MTP recipe importable)
import target as smol
from data import Sample
from target import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Weights

from drafter import EPS, MASK, TAPS, Drafter

POINTER_PAIRS = slice(2, 10)  # rotary pairs that tell neighbours apart, but not too sharply
POINTER_SIZE = 1.4  # norm weight of pointing queries and keys
SHARP = 6.0  # scale of matrices in front of a norm: the larger, the slower they turn
CAUTION = 0.5  # scale of the first scores: guesses are less certain than the target
FIRST = 5  # the positions before have outsized streams that would rule every fit


def _size(x: Tensor) -> Tensor:
    """Root mean square of the last dimension, averaged."""
    return x.square().mean(-1).sqrt().mean()


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def _fit(x: Tensor, y: Tensor) -> Tensor:
    """Ridge regression, y = x @ result."""
    xx = (x.T @ x).double()
    ridge = 1e-3 * xx.diagonal().mean() * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(xx + ridge, (x.T @ y).double()).float()


def _factors(x: Tensor, fit: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The two factors, values [in, rank] and output [rank, out], that keep most of x @ fit."""
    _, _, right = torch.linalg.svd(x[:4000] @ fit, full_matrices=False)
    return fit @ right[:rank].T, right[:rank]


def _balance(reader: Tensor, writer: Tensor) -> None:
    """Give two matrices whose product counts the same rms, as they are taught at the same rate."""
    ratio = (reader.square().mean() / writer.square().mean()) ** 0.25
    reader.div_(ratio)
    writer.mul_(ratio)


@torch.no_grad()
def initial_drafter(weights: Weights, samples: list[Sample]) -> Drafter:
    """The target's last layer behind a layer that guesses what that one reads.

    The context is the last tap as the target's last layer normalizes it. In the first layer two
    groups of heads point to the newest context row and the third to the anchor; what they bring
    to the mask slots is the linear map of these two rows that best predicts the last tap one
    position on. Weights that add to the residual stream are divided by its rms, so that the
    stream, which begins with an embedding, has ordinary size.
    """
    rng = torch.Generator().manual_seed(0)
    last = {n: weights[f"blk.{smol.LAYERS - 1}.{n}.weight"] for n in (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
        "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
    )}  # fmt: skip
    before = {n: weights[f"blk.{smol.LAYERS - 2}.{n}.weight"] for n in (
        "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
    )}  # fmt: skip
    embedding = weights["token_embd.weight"]
    taps = [s["taps"].float() for s in samples]
    sizes = [_size(torch.cat([t[FIRST:] for t in taps]).unflatten(-1, (-1, HIDDEN))[:, i])
             for i in range(len(TAPS))]  # fmt: skip
    size = sizes[-1]
    context = torch.cat([_rms(t[FIRST - 1 : -1, -HIDDEN:]) for t in taps]) * last["attn_norm"]
    after = torch.cat([t[FIRST:, -HIDDEN:] for t in taps]) / size
    anchor = torch.cat([_rms(embedding[s["ids"][FIRST:-1]]) for s in samples])
    mask = _rms(embedding[MASK])

    drafter = Drafter()
    fc = 0.002 * torch.randn(HIDDEN, len(TAPS), HIDDEN, generator=rng)
    fc[:, -1] += torch.eye(HIDDEN)
    # `hidden_norm` makes the scale of this matrix free, and the taps are large: at the scale that
    # would undo theirs, an ordinary optimizer step would be as large as the matrix.
    drafter.fc.weight.copy_((fc * size / torch.stack(sizes)[:, None]).flatten(1))
    drafter.hidden_norm.weight.copy_(last["attn_norm"])
    drafter.norm.weight.copy_(CAUTION * weights["output_norm.weight"])

    layer, attention = drafter.layers[0], drafter.layers[0].self_attn
    fit = _fit(torch.cat([context, anchor], -1), after)
    pointer = torch.zeros(HEAD_DIM)
    pointer[POINTER_PAIRS] = 1.0
    # A mask's query is the pointer. A key is the pointer where it should be found, and its
    # opposite elsewhere; whether it should is what two linear classifiers say.
    rows = torch.cat([context, anchor, mask.expand(len(anchor), -1)])
    is_context, is_anchor = (
        torch.cat([torch.full((len(context),), s) for s in signs])
        for signs in ((1.0, -1.0, -1.0), (-1.0, 1.0, -1.0))
    )
    found = _fit(rows, torch.stack([is_context, is_anchor], -1)).T
    found = found / (rows @ found.T).abs().mean(0)[:, None]
    query = pointer[:, None] * (mask / mask.square().sum())
    noise = 0.002 * torch.randn(HEADS, HEAD_DIM, HIDDEN, generator=rng)
    attention.q_proj.weight.copy_(SHARP * (query + noise).flatten(0, 1))
    keys = torch.stack([pointer[:, None] * found[i] for i in (0, 0, 1)])
    noise = 0.002 * torch.randn(KV_HEADS, HEAD_DIM, HIDDEN, generator=rng)
    attention.k_proj.weight.copy_(SHARP * (keys + noise).flatten(0, 1))
    old_values, old_output = _factors(context, fit[:HIDDEN], 2 * HEAD_DIM)
    new_values, new_output = _factors(anchor, fit[HIDDEN:], HEAD_DIM)
    attention.v_proj.weight.copy_(torch.cat([old_values, new_values], -1).T)
    # The heads of a group bring the same; together they bring it once.
    output = torch.cat([old_output, new_output]).view(KV_HEADS, 1, HEAD_DIM, HIDDEN)
    group = HEADS // KV_HEADS
    attention.o_proj.weight.copy_(output.repeat(1, group, 1, 1).flatten(0, 2).T / group)
    attention.q_norm.weight.fill_(POINTER_SIZE)
    attention.k_norm.weight.fill_(POINTER_SIZE)
    layer.post_attention_layernorm.weight.copy_(before["ffn_norm"])
    layer.mlp.gate_proj.weight.copy_(before["ffn_gate"])
    layer.mlp.up_proj.weight.copy_(before["ffn_up"])
    layer.mlp.down_proj.weight.copy_(0.2 * before["ffn_down"] / size)

    layer, attention = drafter.layers[1], drafter.layers[1].self_attn
    layer.input_layernorm.weight.copy_(last["attn_norm"])
    layer.post_attention_layernorm.weight.copy_(last["ffn_norm"])
    attention.q_proj.weight.copy_(last["attn_q"])
    attention.k_proj.weight.copy_(last["attn_k"])
    attention.v_proj.weight.copy_(last["attn_v"])
    attention.o_proj.weight.copy_(last["attn_output"] / size)
    # The target has no q/k norms: give ours the sizes that its queries and keys have.
    for norm, name in ((attention.q_norm, "attn_q"), (attention.k_norm, "attn_k")):
        norm.weight.fill_(_size((context @ last[name].T).unflatten(-1, (-1, HEAD_DIM))))
    layer.mlp.gate_proj.weight.copy_(last["ffn_gate"])
    layer.mlp.up_proj.weight.copy_(last["ffn_up"])
    layer.mlp.down_proj.weight.copy_(last["ffn_down"] / size)
    for layer in drafter.layers:
        _balance(layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight)
        _balance(layer.mlp.up_proj.weight, layer.mlp.down_proj.weight)
    return drafter
