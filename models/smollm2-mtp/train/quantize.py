"""MLX's affine quantization, 4 bits in groups of 64: w = scale * q + bias."""

from __future__ import annotations

import torch
from torch import Tensor

BITS, GROUP = 4, 64
_LEVELS = (1 << BITS) - 1
_SHIFTS = torch.arange(0, 32, BITS)


def _grid(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] -> levels [out, in/64, 64], and scale and bias [out, in/64], all f32.

    The grid starts at the end of the group's range that is larger in magnitude, and its step is
    bent so that zero falls on it; this is how MLX does it, to the bit.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / _LEVELS).clamp(min=1e-7)
    scale = torch.where(from_low, scale, -scale)
    edge = torch.where(from_low, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, torch.zeros_like(edge))
    q = ((groups - bias[..., None]) / scale[..., None]).round().clamp(0, _LEVELS)
    return q, scale, bias


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] -> packed u32 [out, in/8], scales and biases [out, in/64] in its dtype."""
    q, scale, bias = _grid(weight)
    nibbles = q.flatten(-2).unflatten(-1, (-1, 32 // BITS)).long()
    packed = (nibbles << _SHIFTS).sum(-1)  # low bits first
    return packed.to(torch.uint32), scale.to(weight.dtype), bias.to(weight.dtype)


@torch.no_grad()
def rounded(weight: Tensor) -> Tensor:
    """What is left of f32 weight [out, in] once it was written with 4 bits and bf16 scales."""
    q, scale, bias = _grid(weight.bfloat16())
    return (q * scale.bfloat16().float()[..., None] + bias.bfloat16().float()[..., None]).flatten(-2)


def dequantize(packed: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
    """The inverse, computed in f32: [out, in]."""
    q = (packed.long()[..., None] >> _SHIFTS) & _LEVELS
    groups = q.flatten(-2).unflatten(-1, (-1, GROUP)).float()
    return (groups * scales.float()[..., None] + biases.float()[..., None]).flatten(-2)
