"""The exact quantizer in plain PyTorch: the arithmetic that every other backend must reproduce bit for bit.

It follows Transformer Engine's Python reference (custom_recipes/reference_nvfp4.py, 2.20) for round-to-nearest;
`tests/data/nvfp4_te.npz` holds that quantizer's output. Stochastic rounding follows TE's rule
(util/ptx.cuh, stochastic_round_fp4_e2m1) with the bits of `random_bits.py`.
"""

from __future__ import annotations

import torch

from nvfp4_kernels.format import BLOCK, E2M1_MAX, E4M3_MAX, FLT_MAX, TENSOR_RANGE
from nvfp4_kernels.random_bits import CounterKey, block_bytes


def encode_scale(amax: torch.Tensor) -> torch.Tensor:
    """S_enc = 2688 / amax in fp32; 1 for a zero or infinite amax."""
    # Not `2688 / amax`: PyTorch evaluates number / tensor as reciprocal x number, which rounds twice.
    s = torch.clamp(torch.full_like(amax, TENSOR_RANGE) / amax, max=FLT_MAX)
    return torch.where((amax == 0) | (s == 0), torch.ones_like(s), s)


def block_scales(block_amax: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """E4M3 scale of each block. block_amax: fp32 [...], amax: fp32 scalar -> float8_e4m3fn [...].

    The order of operations matters: amax_b * (S_enc * fp32(1/6)).
    """
    factor = encode_scale(amax) * torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device=amax.device)
    return torch.clamp(block_amax * factor, max=E4M3_MAX).to(torch.float8_e4m3fn)


def scale_elements(x: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """y = clip(x / (scale * S_dec), -6, 6). x: fp32 [rows, cols], scales: E4M3 [rows, cols/16] -> fp32 [rows, cols]."""
    decode = 1.0 / encode_scale(amax)
    encode = torch.clamp(1.0 / (scales.float() * decode), max=FLT_MAX)
    y = x.unflatten(-1, (-1, BLOCK)) * encode.unsqueeze(-1)
    return torch.clamp(y, -E2M1_MAX, E2M1_MAX).flatten(-2)


def round_nearest(y: torch.Tensor) -> torch.Tensor:
    """Round |y| <= 6 to E2M1, ties to the even code. fp32 -> uint8 codes 0..15."""
    a = y.abs()
    code = torch.zeros_like(y, dtype=torch.uint8)
    # The code is the number of thresholds passed; a tie goes to the even code.
    for i, (threshold, inclusive) in enumerate(
        ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    ):
        code = torch.where(a >= threshold if inclusive else a > threshold, i + 1, code)
    return _with_sign(code, y)


def round_stochastic(y: torch.Tensor, random_bytes: torch.Tensor) -> torch.Tensor:
    """Round |y| <= 6 to E2M1 with 8 random bits an element. y: fp32, random_bytes: 0..255 -> uint8 codes 0..15.

    u = byte / 256; t = |y| + u * step(|y|); rounded down on the grid at t (nvfp4.md 1.3).
    """
    a = y.abs()
    t = a + random_bytes.float() * (1.0 / 256) * _step(a)
    step = _step(t)
    q = torch.clamp(torch.floor(t / step) * step, max=E2M1_MAX)
    # codes 0..7 stand for 0 .5 1 1.5 2 3 4 6
    code = torch.where(q < 2, q * 2, torch.where(q < 4, q + 2, q / 2 + 4)).to(torch.uint8)
    return _with_sign(code, y)


def _step(a: torch.Tensor) -> torch.Tensor:
    """Distance of E2M1 neighbours at a >= 0: 0.5 below 2, 1 below 4, else 2."""
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))


def _with_sign(code: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # By comparison, not by sign bit: -0.0 gets code 0, a small negative that rounds to zero gets code 8.
    return torch.where(y < 0, code | 8, code)


def quantize_matrix(
    x: torch.Tensor, amax: torch.Tensor, block: tuple[int, int], key: CounterKey | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize fp32 x [rows, cols] with the tensor's amax -> (codes uint8 [rows, cols] unpacked, scales [rows, cols/16]).

    key None: nearest; else stochastic with its bits.
    """
    rows, cols = x.shape
    block_amax = x.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
    if block == (16, 16):
        square = block_amax.unflatten(0, (-1, BLOCK)).amax(1, keepdim=True)
        block_amax = square.expand(-1, BLOCK, -1).reshape(rows, cols // BLOCK)
    scales = block_scales(block_amax, amax)
    y = scale_elements(x, scales, amax)
    codes = round_nearest(y) if key is None else round_stochastic(y, block_bytes(key, rows, cols, x.device))
    return codes, scales


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| as an fp32 scalar tensor; NaN if any element is NaN."""
    return x.abs().amax().float()
