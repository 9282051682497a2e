"""The 16-point random Hadamard transform of the weight-gradient operands.

Sylvester order with fixed signs: x' = ((x * s) H16) / 4. One order of additions everywhere: an fp32
butterfly with strides 1, 2, 4, 8, then x 0.25, then one rounding to bf16.
"""

from __future__ import annotations

import torch

# Transformer Engine's fixed sign vector (get_wgrad_sign_vector); one for all tensors works as well as
# one each (arXiv 2509.25149, ablations).
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard16(x: torch.Tensor, signs: tuple[int, ...] = SIGNS) -> torch.Tensor:
    """Transform each run of 16 along the last dimension. x: bf16 [..., n], n % 16 == 0 -> bf16 [..., n].

    Raises ValueError for other dtypes (Transformer Engine accepts bf16 only) or lengths.
    """
    return hadamard(x, signs)


def hadamard(x: torch.Tensor, signs: tuple[int, ...] | torch.Tensor) -> torch.Tensor:
    """The same for each run of len(signs), a power of two: the factor is fp32(1 / sqrt(len)). signs: of +-1."""
    size = len(signs)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the Hadamard transform takes bfloat16, not {x.dtype}")
    if x.shape[-1] % size:
        raise ValueError(
            f"the Hadamard transform needs a length that is a multiple of {size}, not {x.shape[-1]}"
        )
    signs = torch.as_tensor(signs, dtype=torch.float32, device=x.device)
    blocks = x.float().unflatten(-1, (-1, size)) * signs
    stride = 1
    while stride < size:
        pairs = blocks.unflatten(-1, (size // (2 * stride), 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return (blocks * size**-0.5).to(torch.bfloat16).flatten(-2)
