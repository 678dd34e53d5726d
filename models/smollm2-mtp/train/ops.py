"""Tensor pieces that the target and the head share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rope_tables(positions: Tensor, dims: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for half-split rotary embedding.

    positions [...] -> two tensors [..., 1, dims]; the 1 broadcasts over heads.
    """
    frequencies = theta ** (-torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], -1)[..., None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding to x [..., heads, dims]; dimension i pairs with i + dims/2."""
    cos, sin = tables
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention.

    q [B, n, heads, D]; k and v [B, kv_heads, T, D]; mask broadcastable to [B, 1, n, T], bool and
    true where a query may look, or a bias of k's dtype. Returns [B, n, heads * D].
    """
    batch, n, heads, dims = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # The query heads of one key head become further rows of it, so keys are never repeated.
    q = q.view(batch, n, kv_heads, group, dims).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * n, dims).to(k.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat(1, 1, group, 1))
    out = out.view(batch, kv_heads, group, n, dims).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, n, heads * dims)
