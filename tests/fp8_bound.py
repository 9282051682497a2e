"""How far Hopper's FP8 products may be from the emulated ones: docs/numerics.md."""

import torch
from nvfp4_kernels import BlockScaledTensor


def bound(a: BlockScaledTensor, b: BlockScaledTensor) -> torch.Tensor:
    """fp64 [M, N], for the fp32 product a b^T: within a block 136 truncations of 2^-13 of the sum of magnitudes, across
    blocks fp32."""
    left, right = (_magnitudes(q) for q in (a, b))
    return (136 * 2.0**-13 + (a.shape[1] + 4) * 2.0**-23) * (left @ right.t())


def _magnitudes(q: BlockScaledTensor) -> torch.Tensor:
    """E4M3's subnormals count with the exponent of its smallest normal number, 2^-6."""
    magnitude = q.operand(torch.float32).abs()
    return torch.where(magnitude > 0, torch.maximum(magnitude, q._scale() * 2.0**-6), 0.0).double()
