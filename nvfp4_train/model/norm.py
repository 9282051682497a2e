"""Root-mean-square norms. The arithmetic is fp32 (fp64 for fp64 inputs); the result has the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, decays and states beside activations of `dtype`: fp32, or fp64 when they are fp64."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., size] of any floating dtype."""

    def __init__(self, size: int, eps: float, device: torch.device | str | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(accumulation_dtype(x.dtype))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """Mamba-2's norm: RMSNorm of y * silu(z), each of `groups` contiguous slices normed by itself.

    The gate comes before the norm. y [..., size] may be fp32 (the scan's sum before any rounding); the result
    has z's dtype.
    """

    def __init__(self, size: int, groups: int, eps: float, device: torch.device | str | None = None):
        super().__init__(size, eps, device)
        self.groups = groups

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        acc = accumulation_dtype(z.dtype)
        y = (y.to(acc) * F.silu(z.to(acc))).unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y.flatten(-2) * self.weight).to(z.dtype)
