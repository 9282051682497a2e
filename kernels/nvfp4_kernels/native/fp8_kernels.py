"""The Triton kernel that quantizes to FP8 in the layout that Hopper's tensor cores read: both orientations from one read.

The arithmetic is that of `triton/blockscaled_kernels.py`. A program makes a tile of 128 x 128: one square block, or 128
blocks a side. Tensor cores take no transposed FP8 operand, so the column half is turned before it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import as_int
from nvfp4_kernels.triton.blockscaled_kernels import (
    divided,
    e4m3_byte,
    load_fp32,
    power,
    round_e4m3,
    scale_code,
)


@triton.jit
def codes_of(v, code):
    """E4M3 codes, uint8, of v in blocks with the scale `code`."""
    q, sign = round_e4m3(divided(v, code))
    return e4m3_byte(q, sign)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x, rows, cols, row_codes, row_scales, column_codes, column_scales, SQUARE: tl.constexpr
):  # fmt: skip
    """x: bf16 or fp32 [rows, cols]. A half may be None.

    row_codes uint8 [rows, cols up to 128], column_codes uint8 [cols, rows up to 128]: what is beyond the matrix is written
    as zeros. Scales fp32: row_scales [cols / 128, rows], column_scales [rows / 128, cols]; of SQUARE blocks [rows / 128,
    cols / 128 up to 4] and [cols / 128, rows / 128 up to 4], whose padding is left as it is. Quotients rounded up.
    """
    across, down = tl.cdiv(cols, 128), tl.cdiv(rows, 128)
    top, left = tl.program_id(0) // across, tl.program_id(0) % across
    lane = tl.arange(0, 128)
    row, col = top * 128 + lane, left * 128 + lane
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    v = load_fp32(x, row.to(tl.int64)[:, None] * cols + col[None, :], inside)
    bits = as_int(v) & 0x7FFFFFFF
    along_rows = tl.max(bits, axis=1)
    if SQUARE:
        code = scale_code(tl.max(along_rows, axis=0), True)
        row_code, column_code = code, code
        tl.store(row_scales + top * (tl.cdiv(across, 4) * 4) + left, power(code))
        tl.store(column_scales + left * (tl.cdiv(down, 4) * 4) + top, power(code))
    else:
        row_code = scale_code(along_rows, True)[:, None]
        column_code = scale_code(tl.max(bits, axis=0), True)[None, :]
        if row_codes is not None:
            tl.store(
                row_scales + left.to(tl.int64) * rows + row, power(tl.reshape(row_code, (128,))), row < rows
            )
        if column_codes is not None:
            tl.store(
                column_scales + top.to(tl.int64) * cols + col,
                power(tl.reshape(column_code, (128,))),
                col < cols,
            )
    if row_codes is not None:
        at = row.to(tl.int64)[:, None] * (across * 128) + col[None, :]
        tl.store(row_codes + at, codes_of(v, row_code), (row < rows)[:, None])
    if column_codes is not None:
        at = col.to(tl.int64)[:, None] * (down * 128) + row[None, :]
        tl.store(column_codes + at, tl.trans(codes_of(v, column_code)), (col < cols)[:, None])
