"""The native GEMM: persistent tiles, operands and scales by TMA, FP4 tensor cores, tensor scales on the fp32 sums.

Compiles to `tcgen05.mma ... kind::mxf4nvf4` with one E4M3 scale per 16 elements on sm_100 and sm_103, to `mma.sync ...
mxf4nvf4 ... ue4m3` on sm_120. With EMULATE the same kernel, index for index, multiplies fp32 numbers instead: that form
runs in Triton's interpreter, where FP4 products do not exist or are wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import as_float


@triton.jit
def load_scales(scales, row_tile, block_tile, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """E4M3 bytes [ROWS, BLOCKS] of swizzled scales. scales: descriptor of [1, row tiles, block tiles, 2, 256]."""
    tiles = scales.load([0, row_tile, block_tile, 0, 0])
    tiles = tiles.reshape(ROWS // 128, BLOCKS // 4, 32, 4, 4)
    return tiles.trans(0, 3, 2, 1, 4).reshape(ROWS, BLOCKS)


@triton.jit
def expanded(codes, scales, ROWS: tl.constexpr, COLS: tl.constexpr):
    """e2m1 * scale as fp32 [ROWS, COLS]. codes: uint8 [ROWS, COLS/2]; scales: E4M3 bytes [ROWS, COLS/16]."""
    code = tl.join(codes & 15, codes >> 4).reshape(ROWS, COLS).to(tl.int32)
    # 2^-126 q has the code of q in bits 24..22 of fp32, 2^-120 s the byte of s in bits 26..20.
    value = as_float((code & 7) << 22) * (2.0**126)
    value = tl.where(code >= 8, -value, value)
    scale = as_float((scales.to(tl.int32) & 127) << 20) * (2.0**120)
    scale = tl.where((scales & 127) == 127, float("nan"), scale)
    wide = tl.broadcast_to(scale[:, :, None], (ROWS, COLS // 16, 16)).reshape(ROWS, COLS)
    return value * wide


@triton.jit
def tile_origin(tile, down, across, BAND: tl.constexpr):
    """(row tile, column tile) number `tile`: bands of BAND row tiles, each walked column by column, so that what is read
    twice is still in the L2 cache."""
    band = tile // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    within = tile % (BAND * across)
    return band * BAND + within % height, within // height


@triton.jit
def store_tile(out, row, column, sums, WIDTH: tl.constexpr, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Store sums [rows, WIDTH] at (row, column) in PARTS pieces side by side: a piece at a time lies in shared memory."""
    if PARTS == 1:
        if ACCUMULATE:
            sums += out.load([row, column]).to(tl.float32)
        out.store([row, column], sums.to(out.dtype))
    else:
        left, right = sums.reshape(sums.shape[0], 2, WIDTH // 2).trans(0, 2, 1).split()
        store_tile(out, row, column, left, WIDTH // 2, PARTS // 2, ACCUMULATE)
        store_tile(out, row, column + WIDTH // 2, right, WIDTH // 2, PARTS // 2, ACCUMULATE)


@triton.jit
def gemm_kernel(
    a, a_scales, b, b_scales, alpha, out, M, N, K, PROGRAMS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, EMULATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (out +) alpha * a b^T.

    a, b: descriptors of uint8 codes [M, K/2] and [N, K/2]; a_scales, b_scales: see `load_scales`; alpha: pointer to fp32,
    the product of both tensor scales; out: descriptor, bf16 or fp32. Rows, columns and K beyond the matrices read as zeros.
    """
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    factor = tl.load(alpha)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS):
        row, column = tile_origin(tile, down, across, 8)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
            x = a.load([row * BLOCK_M, k * (BLOCK_K // 2)])
            y = b.load([column * BLOCK_N, k * (BLOCK_K // 2)])
            x_scales = load_scales(
                a_scales, row * (BLOCK_M // 128), k * (BLOCK_K // 64), BLOCK_M, BLOCK_K // 16
            )
            y_scales = load_scales(
                b_scales, column * (BLOCK_N // 128), k * (BLOCK_K // 64), BLOCK_N, BLOCK_K // 16
            )
            if EMULATE:
                left = expanded(x, x_scales, BLOCK_M, BLOCK_K)
                right = expanded(y, y_scales, BLOCK_N, BLOCK_K)
                sums = tl.dot(left, right.T, sums, input_precision="ieee")
            else:
                x_scales = x_scales.to(tl.float8e4nv, bitcast=True)
                y_scales = y_scales.to(tl.float8e4nv, bitcast=True)
                sums = tl.dot_scaled(x, x_scales, "e2m1", y.T, y_scales, "e2m1", sums)
        store_tile(out, row * BLOCK_M, column * BLOCK_N, sums * factor, BLOCK_N, PARTS, ACCUMULATE)
