"""The Triton kernel that quantizes to FP8 in the layout that Hopper's tensor cores read: both orientations from one read.

The arithmetic is that of `triton/blockscaled_kernels.py`, rounded by the hardware's conversion where there is one. A program
makes a tile of 128 x 128: one square block, or 128 blocks a side. Tensor cores take no transposed FP8 operand, so the column
half is turned before it is stored. A lane holds 8 tokens x 4 channels (twice): their codes fill whole words either way, and
only words are exchanged between lanes.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import ASM, as_float, as_int, join_words, unpack4
from nvfp4_kernels.triton.blockscaled_kernels import e4m3_byte, power, round_e4m3, scale_code


@triton.jit
def load4(x, row, word, words, mask, BF16: tl.constexpr):
    """Four neighbouring numbers of x [.., words, 4] as fp32; 0 where masked."""
    at = row.to(tl.int64) * words + word
    if BF16:
        v = unpack4(tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + at, mask, 0))
    else:
        v = ()
        for i in tl.static_range(4):
            v = v + (tl.load(x + 4 * at + i, mask, 0.0),)
    return v


@triton.jit
def codes4(a, b, c, d, HARDWARE: tl.constexpr):
    """E4M3 codes of four numbers up to 448 in an int32, a's lowest; to nearest, ties to even. HARDWARE: from sm_89 on."""
    if ASM and HARDWARE:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1,
        )  # fmt: skip
    else:
        word = _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)
    return word


@triton.jit
def _byte(y):
    q, sign = round_e4m3(y)
    return e4m3_byte(q, sign).to(tl.int32)


@triton.jit
def inverse(code):
    """1 / scale."""
    return as_float(((254 - code) & 255) << 23)


@triton.jit
def magnitude(v):
    """|v| as bits, which compare as the numbers do; NaN is the largest."""
    return as_int(v) & 0x7FFFFFFF


@triton.jit
def join4(a, b, c, d):
    """[..] each -> [.., 2, 2], which reshapes to their interleaving: a[0], b[0], c[0], d[0], a[1], ..."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def split4(v):
    """Inverse of `join4`."""
    ac, bd = tl.split(v)
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def weave8(v):
    """Eight [n] -> [8 n]."""
    n: tl.constexpr = v[0].shape[0]
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    return tl.reshape(tl.join(even, odd), (8 * n,))


# col_blocks as the constant 1 makes loads that never happen: Triton 3.6's assembler lost their zeros (fp32 x, on Hopper).
@triton.jit(do_not_specialize=["rows", "col_blocks"])
def quantize_kernel(
    x, rows, col_blocks, row_codes, row_scales, column_codes, column_scales,
    SQUARE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """x: bf16 or fp32 [rows, 16 col_blocks]. A half may be None.

    row_codes int32 [rows, cols up to 128, / 4], column_codes int64 [cols, rows up to 128, / 8]: what is beyond the matrix is
    written as zeros. Scales fp32: row_scales [cols / 128, rows], column_scales [rows / 128, cols]; of SQUARE blocks
    [rows / 128, cols / 128 up to 4] and [cols / 128, rows / 128 up to 4], whose padding is left as it is. Quotients
    rounded up.
    """
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    cols = col_blocks * 16
    across, down = tl.cdiv(cols, 128), tl.cdiv(rows, 128)
    top, left = tl.program_id(0) // across, tl.program_id(0) % across
    group, word = top * 16 + tl.arange(0, 16), left * 32 + tl.arange(0, 32)  # of 8 rows, of 4 columns
    v, row_bits = (), ()
    for i in tl.static_range(8):
        row = 8 * group + i
        mask = (row < rows)[:, None] & (word < col_blocks * 4)[None, :]
        four = load4(x, row[:, None], word[None, :], col_blocks * 4, mask, BF16)
        most = tl.maximum(magnitude(four[0]), magnitude(four[1]))
        most = tl.maximum(most, tl.maximum(magnitude(four[2]), magnitude(four[3])))
        v, row_bits = v + (four,), row_bits + (tl.max(most, axis=1),)
    if SQUARE:
        code = scale_code(tl.max(weave8(row_bits), axis=0), True)
        tl.store(row_scales + top * (tl.cdiv(across, 4) * 4) + left, power(code))
        tl.store(column_scales + left * (tl.cdiv(down, 4) * 4) + top, power(code))
    if row_codes is not None:
        if not SQUARE:
            row = top * 128 + tl.arange(0, 128)
            scale = power(scale_code(weave8(row_bits), True))
            tl.store(row_scales + left.to(tl.int64) * rows + row, scale, row < rows)
        for i in tl.static_range(8):
            row = (8 * group + i)[:, None]
            if SQUARE:
                factor = inverse(code)
            else:
                factor = inverse(scale_code(row_bits[i], True))[:, None]
            four = v[i]
            codes = codes4(four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor, HARDWARE)
            tl.store(row_codes + row.to(tl.int64) * (across * 32) + word[None, :], codes, row < rows)
    if column_codes is not None:
        col = left * 128 + tl.arange(0, 128)
        if SQUARE:
            factors = (inverse(code),) * 4
        else:
            most = ()
            for c in tl.static_range(4):
                m = magnitude(v[0][c])
                for i in tl.static_range(1, 8):
                    m = tl.maximum(m, magnitude(v[i][c]))
                most = most + (m,)
            column_code = scale_code(tl.max(join4(most[0], most[1], most[2], most[3]), axis=0), True)
            scale = power(tl.reshape(column_code, (128,)))
            tl.store(column_scales + top.to(tl.int64) * cols + col, scale, col < cols)
            factors = split4(inverse(column_code)[None, :])
        turned = ()
        for c in tl.static_range(4):
            f = factors[c]
            low = codes4(v[0][c] * f, v[1][c] * f, v[2][c] * f, v[3][c] * f, HARDWARE)
            high = codes4(v[4][c] * f, v[5][c] * f, v[6][c] * f, v[7][c] * f, HARDWARE)
            turned = turned + (join_words(low, high),)
        codes = tl.permute(join4(turned[0], turned[1], turned[2], turned[3]), (1, 2, 3, 0))
        at = col.to(tl.int64)[:, None] * (down * 16) + group[None, :]
        tl.store(column_codes + at, tl.reshape(codes, (128, 16)), (col < cols)[:, None])
