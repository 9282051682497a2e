"""The Triton kernels of MXFP4 and blockwise FP8: a program quantizes a tile of whole blocks. See `blockscaled.py`.

Written for equal bits, not for the ceiling: these arms are what NVFP4 is compared with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import as_float, as_int, binade, block_words, scale_byte

_MAGIC = tl.constexpr(6291456.0)


@triton.jit
def along(v, other, ROWS: tl.constexpr):
    """Interleave along the block's dimension: the last (ROWS) or the first of [m, n]."""
    j = tl.join(v, other)  # [m, n, 2]
    m: tl.constexpr = v.shape[0]
    n: tl.constexpr = v.shape[1]
    if ROWS:
        r = tl.reshape(j, (m, 2 * n))
    else:
        r = tl.reshape(tl.permute(j, (0, 2, 1)), (2 * m, n))
    return r


@triton.jit
def halves(v, ROWS: tl.constexpr):
    """Inverse of `along`: even and odd elements."""
    m: tl.constexpr = v.shape[0]
    n: tl.constexpr = v.shape[1]
    if ROWS:
        a, b = tl.split(tl.reshape(v, (m, n // 2, 2)))
    else:
        a, b = tl.split(tl.permute(tl.reshape(v, (m // 2, 2, n)), (0, 2, 1)))
    return a, b


@triton.jit
def random_bytes(key, row, block, ROWS: tl.constexpr):
    """The random byte of each element. row, block: the coordinates of the draws, one pair a 16-element block."""
    w0, w1, w2, w3 = block_words(key, row, block)
    words = along(along(w0, w2, ROWS), along(w1, w3, ROWS), ROWS)
    return along(along(words, words >> 16, ROWS), along(words >> 8, words >> 24, ROWS), ROWS) & 255


@triton.jit
def turn(v, signs, C: tl.constexpr):
    """The 32-point Hadamard transform along the first dimension of [32, C], rounded to bf16."""
    v = v * signs
    for stage in tl.static_range(5):
        pairs = tl.permute(tl.reshape(v, (16 >> stage, 2, 1 << stage, C)), (0, 2, 3, 1))
        a, b = tl.split(pairs)
        v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), (32, C))
    v = v * 0.17677669529663687
    bits = as_int(v)
    rounded = as_float((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000)
    return tl.where(v == v, rounded, v)


@triton.jit
def load_fp32(x, at, mask):
    """bf16 or fp32 numbers as fp32; 0 where masked."""
    raw = tl.load(x + at, mask, 0)
    if raw.dtype == tl.bfloat16:
        v = as_float(raw.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        v = raw
    return v


@triton.jit
def scale_code(bits, E4M3: tl.constexpr):
    """E8M0 code, int32, of the block whose amax has these bits."""
    if E4M3:
        code = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 10)
    else:
        code = tl.maximum(((bits + 0x3FFFFF) >> 23) - 2, 2)
    return tl.where(bits >= 0x7F800000, 255, code)


@triton.jit
def power(code):
    """The scale, fp32; NaN for 255."""
    return as_float(tl.where(code == 255, 0x7FC00000, code << 23))


@triton.jit
def divided(v, code):
    """v / scale."""
    return v * as_float(((254 - code) & 255) << 23)


@triton.jit
def round_e4m3(y):
    """(magnitude on the E4M3 grid, sign bit) of y, at most 448."""
    a = tl.abs(y)
    magic = as_float((tl.maximum(as_int(a), 121 << 23) & 0x7F800000) + ((20 << 23) + 0x400000))
    return (a + magic) - magic, as_int(y) & -0x80000000


@triton.jit
def e4m3_byte(q, sign):
    """E4M3 code, uint8."""
    return (scale_byte(q) | ((sign >> 24) & 128)).to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x, rows, cols, key, sign_bits, out, scales,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    E4M3: tl.constexpr, STOCHASTIC: tl.constexpr, ROTATE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Blocks of BLOCK_ROWS x BLOCK_COLS; the tile HEIGHT x WIDTH is one block high or one block wide, or both.

    x: bf16 or fp32 [rows, cols]. out: fp32 or bf16 operand, or uint8 codes: E4M3 as x, E2M1 two a byte along the blocks.
    scales: uint8 [rows / BLOCK_ROWS, cols / BLOCK_COLS], rounded up.
    """
    across = tl.cdiv(cols, WIDTH)
    top, left = tl.program_id(0) // across, tl.program_id(0) % across
    row = (top * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    col = (left * WIDTH + tl.arange(0, WIDTH))[None, :]
    mask = (row < rows) & (col < cols)
    at = row.to(tl.int64) * cols + col
    v = load_fp32(x, at, mask)
    if ROTATE:
        lane = tl.arange(0, HEIGHT)[:, None]
        v = turn(v, 1.0 - 2.0 * ((sign_bits >> lane) & 1).to(tl.float32), WIDTH)
    bits = as_int(v) & 0x7FFFFFFF
    ROWS: tl.constexpr = BLOCK_COLS > 1
    if BLOCK_COLS > 1:
        bits = tl.max(bits, axis=1, keep_dims=True)
    if BLOCK_ROWS > 1:
        bits = tl.max(bits, axis=0, keep_dims=True)
    code = scale_code(bits, E4M3)
    scale = power(code)
    y = divided(v, code)
    if E4M3:
        q, sign = round_e4m3(y)
    else:
        a = tl.abs(y)
        p = binade(a)
        if STOCHASTIC:
            if ROWS:
                first = left * (WIDTH // 16) + tl.arange(0, WIDTH // 16)[None, :]
                draw = random_bytes(key, row + first * 0, row * 0 + first, ROWS)
            else:
                first = top * (HEIGHT // 16) + tl.arange(0, HEIGHT // 16)[:, None]
                draw = random_bytes(key, first * 0 + col, first + col * 0, ROWS)
            t = tl.fma(draw.to(tl.float32) * (1.0 / 512), p, a)
            low = tl.where(t >= 0.5, 0.5, 0.0)
            q = tl.minimum(tl.where(t < 1.0, low, as_float(as_int(t) & -0x400000)), 6.0)
        else:
            q = (a + p * _MAGIC) - p * _MAGIC
        sign = as_int(y + 0.0) & -0x80000000
    if CODES:
        if E4M3:
            tl.store(out + at, e4m3_byte(q, sign), mask)
        else:
            number = tl.maximum((as_int(q) >> 22) - 252, (q >= 0.5).to(tl.int32)) | ((sign >> 28) & 8)
            even, odd = halves(number, ROWS)
            byte = (even | (odd << 4)).to(tl.uint8)
            if ROWS:
                half = (left * (WIDTH // 2) + tl.arange(0, WIDTH // 2))[None, :]
                tl.store(out + row.to(tl.int64) * (cols // 2) + half, byte, (row < rows) & (half < cols // 2))
            else:
                half = (top * (HEIGHT // 2) + tl.arange(0, HEIGHT // 2))[:, None]
                tl.store(out + half.to(tl.int64) * cols + col, byte, (half < rows // 2) & (col < cols))
        if BLOCK_ROWS > 1 and BLOCK_COLS > 1:
            tl.store(scales + top * across + left + code * 0, code.to(tl.uint8))
        elif ROWS:
            tl.store(scales + row.to(tl.int64) * across + left, code.to(tl.uint8), row < rows)
        else:
            tl.store(scales + top.to(tl.int64) * cols + col, code.to(tl.uint8), col < cols)
    else:
        value = as_float(as_int(q * scale) | sign)
        if out.dtype.element_ty == tl.bfloat16:
            half = (as_int(value) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            tl.store(out + at, half, mask)
        else:
            tl.store(out + at, value, mask)


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    codes, scales, out, rows, cols, E4M3: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Column codes and scales uint8 [rows / BLOCK, cols] -> bf16 operand [rows, cols]; a program: BLOCK rows x WIDTH."""
    across = tl.cdiv(cols, WIDTH)
    top, left = tl.program_id(0) // across, tl.program_id(0) % across
    row = (top * BLOCK + tl.arange(0, BLOCK))[:, None]
    col = (left * WIDTH + tl.arange(0, WIDTH))[None, :]
    mask = (row < rows) & (col < cols)
    code = tl.load(scales + top.to(tl.int64) * cols + col, col < cols, 1).to(tl.int32)
    scale = power(code)
    if E4M3:
        byte = tl.load(codes + row.to(tl.int64) * cols + col, mask, 0).to(tl.int32)
        q = as_float((byte & 127) << 20) * (2.0**60) * (2.0**60)
        sign = (byte & 128) << 24
    else:
        byte = tl.load(codes + (row // 2).to(tl.int64) * cols + col, mask, 0).to(tl.int32)
        number = byte >> (4 * (row % 2))
        q = as_float((number & 7) << 22) * (2.0**63) * (2.0**63)
        sign = (number & 8) << 28
    value = as_float(as_int(q * scale) | sign)
    tl.store(
        out + row.to(tl.int64) * cols + col,
        (as_int(value) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
        mask,
    )
