"""PyTorch tensors in and out of the kernels of MXFP4 and blockwise FP8."""

from __future__ import annotations

import torch

from nvfp4_kernels.hadamard import SIGNS
from nvfp4_kernels.triton.ops import OPTIONS, _key, _sign_bits


def _kernels():
    from nvfp4_kernels.triton import blockscaled_kernels

    return blockscaled_kernels


def quantize_blocks(x: torch.Tensor, fmt, block: tuple[int, int], key, rotate: bool, output: str):
    """As `cpu.ops.quantize_blocks`; with `rotate` after the 32-point transform along x's rows."""
    rows, cols = x.shape
    e4m3, codes = fmt.name == "fp8", output == "codes"
    height, width = block if 1 not in block else ((16, fmt.block) if block[0] == 1 else (fmt.block, 32))
    scales = None
    if codes:
        pair = (1, 1) if e4m3 else (2, 1) if block[1] == 1 else (1, 2)
        out = torch.empty(rows // pair[0], cols // pair[1], dtype=torch.uint8, device=x.device)
        shape = -(-rows // block[0]), -(-cols // block[1])
        scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
    else:
        dtype = torch.float32 if output == "operand_fp32" else torch.bfloat16
        out = torch.empty(rows, cols, dtype=dtype, device=x.device)
    grid = (-(-rows // height) * -(-cols // width),)
    signs = _sign_bits(SIGNS * 2) if rotate else 0
    _kernels().quantize_kernel[grid](
        x, rows, cols, _key(key, x.device), signs - (1 << 32) if signs >> 31 else signs, out, scales,
        BLOCK_ROWS=block[0], BLOCK_COLS=block[1], HEIGHT=height, WIDTH=width,
        E4M3=e4m3, STOCHASTIC=key is not None, ROTATE=rotate, CODES=codes,
        num_warps=8 if 1 not in block else 4, **OPTIONS,
    )  # fmt: skip
    return (out,) if scales is None else (out, scales)


def expand_blocks(codes: torch.Tensor, scales: torch.Tensor, fmt) -> torch.Tensor:
    """Column codes and scales, contiguous -> bf16 operand [rows, cols]."""
    e4m3 = fmt.name == "fp8"
    rows, cols = codes.shape[0] * (1 if e4m3 else 2), codes.shape[1]
    out = torch.empty(rows, cols, dtype=torch.bfloat16, device=codes.device)
    width = 64
    grid = (-(-rows // fmt.block) * -(-cols // width),)
    _kernels().expand_kernel[grid](
        codes.contiguous(), scales.contiguous(), out, rows, cols, E4M3=e4m3, BLOCK=fmt.block, WIDTH=width, **OPTIONS
    )  # fmt: skip
    return out
