"""The 16-point random Hadamard transform of the weight-gradient operands.

Sylvester order with fixed signs: x' = ((x * s) H16) / 4. One order of additions everywhere: an fp32
butterfly with strides 1, 2, 4, 8, then x 0.25, then one rounding to bf16.
"""

from __future__ import annotations

import torch

from nvfp4_kernels.format import BLOCK

# Transformer Engine's fixed sign vector (get_wgrad_sign_vector); one for all tensors works as well as
# one each (arXiv 2509.25149, ablations).
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard16(x: torch.Tensor, signs: tuple[int, ...] = SIGNS) -> torch.Tensor:
    """Transform each run of 16 along the last dimension. x: bf16 [..., n], n % 16 == 0 -> bf16 [..., n].

    Raises ValueError for other dtypes (Transformer Engine accepts bf16 only) or lengths.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the Hadamard transform takes bfloat16, not {x.dtype}")
    if x.shape[-1] % BLOCK:
        raise ValueError(f"the Hadamard transform needs a length that is a multiple of 16, not {x.shape[-1]}")
    blocks = x.float().unflatten(-1, (-1, BLOCK)) * torch.tensor(signs, dtype=torch.float32, device=x.device)
    for stride in (1, 2, 4, 8):
        pairs = blocks.unflatten(-1, (BLOCK // (2 * stride), 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return (blocks * 0.25).to(torch.bfloat16).flatten(-2)
