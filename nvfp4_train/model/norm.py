"""Root-mean-square norms. The arithmetic is fp32 (fp64 for fp64 inputs); the result has the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.producers import Activation, accumulation_dtype, rms_norm

__all__ = ["GatedRMSNorm", "RMSNorm", "accumulation_dtype"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., size] of any floating dtype."""

    def __init__(self, size: int, eps: float, device: torch.device | str | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))

    def forward(self, x: Tensor, into: Linear | None = None) -> Tensor | Activation:
        """into: the linear that takes the result, which then comes with what that linear needs measured."""
        return rms_norm(x, self.weight, self.eps, into)


class GatedRMSNorm(RMSNorm):
    """Mamba-2's norm: RMSNorm of y * silu(z), each of `groups` contiguous slices normed by itself.

    The gate comes before the norm. y [..., size] may be fp32 (the scan's sum before any rounding); the result
    has z's dtype.
    """

    def __init__(self, size: int, groups: int, eps: float, device: torch.device | str | None = None):
        super().__init__(size, eps, device)
        self.groups = groups
        self.fused = False  # or by the kernel, also where nothing is measured: kernels.choose_kernels

    def forward(self, y: Tensor, z: Tensor, into: Linear | None = None) -> Tensor | Activation:
        return rms_norm(y, self.weight, self.eps, into, z, self.groups, self.fused)
