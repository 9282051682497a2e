"""MS-EDEN (Quartet II, arXiv 2601.22813): unbiased NVFP4 operands for the backward GEMMs.

Elements are rounded to nearest after a random rotation, and what nearest rounding does to the length of a rotation group is
made good by one factor: with q the rounded x, in the rotated space x . x / x . q times q has the projection of x on itself
exactly, and is x in the mean over rotations. The factor goes into the group's block scales, which E4M3 cannot hold
exactly: they alone are rounded stochastically.

One operand, along the GEMM's inner dimension, in groups of `size` (`rotation_size`):

    x      = bf16(H diag(s) x / sqrt(size))          fresh signs s every backward pass; those of the GEMM's other operand
    S      = (255.99 x limit) / amax, limit = 6 / (17/16 x 0.93): 448 leaves no room for the factor
    scale  = E4M3(amax_block / limit x S), 1 where that is 0
    y      = x / (scale / S);  q = E2M1(y), to nearest, at most 6
    factor = sum y y / sum y q over the group (fp64 sums of halves, then fp32), 1 where sum y q = 0
    scale' = E4M3 neighbours of scale x factor, up with the probability that makes the mean right, in 1/256

The scale override 17/16 x 0.93 lets a little of each block be clipped, which costs less than a finer grid gains.

The same bits on every device: products and sums in a fixed order, each rounded once; division always by a tensor, since GPUs
divide by a number as a product with its reciprocal, which rounds twice.
"""

from __future__ import annotations

import torch

from nvfp4_kernels import reference
from nvfp4_kernels.format import BLOCK, E2M1_VALUES, TENSOR_RANGE, QuantizedTensor, pack
from nvfp4_kernels.hadamard import hadamard
from nvfp4_kernels.random_bits import CounterKey, block_bytes, philox4x32

OVERRIDE = 17 / 16 * 0.93
LIMIT, SCALE_LIMIT = 6.0 / OVERRIDE, 255.99
LARGEST_ROTATION = 128
SIGN_PLACE = 0xFFFFFFFF  # block column of the call whose 128 bits are the signs; no tensor reaches it


def rotation_size(length: int) -> int:
    """The largest power of two up to 128 that divides `length` (a multiple of 16): the elements rotated together."""
    return min(LARGEST_ROTATION, length & -length)


def rotation_signs(key: CounterKey, size: int, device: torch.device) -> torch.Tensor:
    """fp32 [size] of +-1: bit i of the call at (SIGN_PLACE, row SIGN_PLACE), -1 where it is set."""
    w = key.words(device)
    place = torch.full_like(w[0], SIGN_PLACE)
    words = torch.stack(philox4x32([place, place, w[2], w[3]], [w[0], w[1]]))
    bits = (words[:, None] >> torch.arange(32, device=device)) & 1
    return 1.0 - 2.0 * bits.flatten()[:size].float()


def quantize_ms_eden(x: torch.Tensor, signs: torch.Tensor, key: CounterKey) -> QuantizedTensor:
    """x: bf16 [rows, cols], cols along the GEMM's inner dimension, a multiple of len(signs) -> NVFP4 codes of the rotated x.

    signs: `rotation_signs`, the same for both operands of a GEMM. key: the bits of the scales' rounding; block b of row r
    takes byte 0 of its own call. The result's `amax` is chosen so that amax / 2688 is its tensor scale. Plain PyTorch.
    """
    x = hadamard(x, signs).float()
    rows, cols = x.shape
    amax = reference.tensor_amax(x)
    tensor_scale = torch.where(
        amax == 0, torch.ones_like(amax), amax / torch.full_like(amax, SCALE_LIMIT * LIMIT)
    )
    blocks = x.unflatten(-1, (-1, BLOCK))
    ideal = blocks.abs().amax(-1) / torch.full_like(amax, LIMIT) / tensor_scale
    scales = ideal.to(torch.float8_e4m3fn).float()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    y = (blocks / (scales * tensor_scale).unsqueeze(-1)).flatten(-2)
    codes = reference.round_nearest(y)
    q = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=x.device)[codes.int()]
    groups = y.double().unflatten(-1, (-1, len(signs)))
    along = sum_of_halves(groups * q.unflatten(-1, (-1, len(signs))))
    factor = torch.where(along == 0, 1.0, sum_of_halves(groups * groups) / along).float()
    wanted = scales * factor.repeat_interleave(len(signs) // BLOCK, -1)
    draws = block_bytes(key, rows, cols, x.device)[:, ::BLOCK]
    return QuantizedTensor(pack(codes), round_scale(wanted, draws), tensor_scale * TENSOR_RANGE, (1, BLOCK))


def sum_of_halves(v: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, a power of two: the halves added until one is left. `sum` has no such order."""
    while v.shape[-1] > 1:
        first, second = v.chunk(2, -1)
        v = first + second
    return v.squeeze(-1)


def round_scale(wanted: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """E4M3 neighbours of fp32 `wanted`, 2^-9 to 448: the upper where its share of the step exceeds (draw + 1/2) / 256."""
    nearest = wanted.to(torch.float8_e4m3fn)
    code = nearest.view(torch.uint8)
    lower_code = code - (nearest.float() > wanted).to(torch.uint8)
    lower = lower_code.view(torch.float8_e4m3fn).float()
    upper_code = (lower_code + 1).clamp(max=126)
    step = upper_code.view(torch.float8_e4m3fn).float() - lower
    up = (wanted - lower) * 256.0 > step * (draws.float() + 0.5)
    return torch.where(up, upper_code, lower_code).view(torch.float8_e4m3fn)
