"""Four over six (arXiv 2512.02010): a block's maximum is mapped to 6 or to 4, whichever loses less.

E2M1 has no value between 4 and 6, so that elements near a block's maximum are rounded coarsely. A scale 1.5 times larger
maps the maximum to 4 instead, where neighbours are 1 apart. To leave room for it the tensor scale maps amax to 6 x 256
instead of 6 x 448. Scales as Transformer Engine's option has them, S = 1536 / amax:

    scale_6 = E4M3(min((amax_block / 6) x S, 448)),  scale_4 = E4M3(min(1.5 x ((amax_block / 6) x S), 448))

The error of a block is the sum of |x - q scale / S| in fp32, and 4 wins where its error is smaller. Rounding is to nearest.
"""

from __future__ import annotations

import torch

from nvfp4_kernels import reference
from nvfp4_kernels.format import BLOCK, E2M1_VALUES, E4M3_MAX, FLT_MAX, TENSOR_RANGE, QuantizedTensor, pack

RANGE = 6.0 * 256  # amax / RANGE is the tensor scale


def quantize_four_over_six(
    x: torch.Tensor, block: tuple[int, int], amax: torch.Tensor, output: str = "codes"
) -> QuantizedTensor:
    """x [rows, cols], bf16 or fp32, to NVFP4 in 1x16 or 16x16 blocks; rows (16x16) and cols multiples of 16.

    amax: fp32 scalar, of x. The result's is fp32(amax x 1.75), 1.75 = 2688 / 1536, with which amax / 2688 is the tensor
    scale that belongs to the codes. Plain PyTorch, the same bits on every device: sums in a
    fixed order, no division by a number.
    """
    x = x.float()
    one = torch.ones_like(amax)
    s = torch.clamp(torch.full_like(amax, RANGE) / amax, max=FLT_MAX)
    s = torch.where((amax == 0) | (s == 0), one, s)
    block_amax = x.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
    square = block == (BLOCK, BLOCK)
    if square:
        block_amax = block_amax.unflatten(0, (-1, BLOCK)).amax(1)
    base = block_amax / torch.full_like(block_amax, 6.0) * s
    best = None
    for factor in (1.0, 1.5):  # to 6, to 4
        scales = torch.clamp(base * factor, max=E4M3_MAX).to(torch.float8_e4m3fn)
        if square:
            scales = scales.repeat_interleave(BLOCK, 0)
        encode = torch.clamp(1.0 / (scales.float() * (one / s)), max=FLT_MAX)
        y = torch.clamp(x.unflatten(-1, (-1, BLOCK)) * encode.unsqueeze(-1), -6.0, 6.0).flatten(-2)
        codes = reference.round_nearest(y)
        error = _error(x, codes, scales, one / s, square)
        if best is None:
            best = codes, scales, error
            continue
        to_four = error < best[2]
        scales = torch.where(to_four, scales.float(), best[1].float()).to(torch.float8_e4m3fn)
        codes = torch.where(to_four.repeat_interleave(BLOCK, 1), codes, best[0])
    q = QuantizedTensor(pack(codes), scales, amax * (TENSOR_RANGE / RANGE), block)
    return q if output == "codes" else QuantizedTensor(None, None, q.amax, block, q.operand())


def _error(x, codes, scales, decode, square: bool) -> torch.Tensor:
    """Sum of |x - its quantized value| of each block, fp32 [rows, cols / 16]: along rows, then over the block's rows."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)
    values = table[codes.int()].unflatten(-1, (-1, BLOCK)) * (scales.float() * decode).unsqueeze(-1)
    difference = (x.unflatten(-1, (-1, BLOCK)) - values).abs()
    error = difference[..., 0]
    for i in range(1, BLOCK):
        error = error + difference[..., i]
    if square:
        rows = error.unflatten(0, (-1, BLOCK))
        error = rows[:, 0]
        for i in range(1, BLOCK):
            error = error + rows[:, i]
        error = error.repeat_interleave(BLOCK, 0)
    return error
