"""What the scan's kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(at, row_stride, row, column, rows, COLUMNS: tl.constexpr, WHOLE: tl.constexpr = False):
    """[row, column] of a matrix, zeros past `rows` and COLUMNS; WHOLE: nothing is past them.

    Inside one chunk: 32 bits hold its offsets, half the registers of 64.
    """
    at += row[:, None] * row_stride + column[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, (row < rows)[:, None] & (column < COLUMNS)[None, :], 0.0)
