"""Quantize kernels that write what the native GEMM reads: codes along the inner dimension, scales swizzled.

A program handles 64 tokens x 64 channels: four 16-token blocks beside each other make 32 bytes of a channel's codes and
the four bytes of its scales that lie together, so that column-wise results, too, leave in whole sectors. Column-wise a lane
owns 4 channels x 16 tokens, row-wise one block of 16 channels, as in `triton/kernels.py`.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.native.conversions import NEAREST, codes8
from nvfp4_kernels.triton.arithmetic import (
    block_scale,
    block_words,
    hadamard,
    join_words,
    largest,
    scale_byte,
    tensor_scales,
)
from nvfp4_kernels.triton.kernels import KEYS, channel, load_block, load_columns

LANES, GROUPS = tl.constexpr(64), tl.constexpr(16)  # a group: 4 channels


@triton.jit
def swizzled(row, block, blocks):
    """Where the scale of (row, block) lies; blocks: how many a row has. See `swizzle.py`."""
    tile = (row // 128).to(tl.int64) * tl.cdiv(blocks, 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4


@triton.jit
def across_blocks(v):
    """Lanes as (token block, group) -> [group, token block], whose stores are contiguous."""
    return tl.trans(tl.reshape(v, (4, GROUPS)))


@triton.jit
def store_channel(
    word, byte, out, stride, scales, channels, token_blocks, tile_block, tile_group, C: tl.constexpr
):
    """Store 16 codes (int64) and the scale of channel C of each lane's four. out: int64, `stride` of them a channel."""
    row = (4 * (tile_group + tl.arange(0, GROUPS)) + C)[:, None]
    block = (tile_block + tl.arange(0, 4))[None, :]
    mask = (row < channels) & (block < token_blocks)
    tl.store(out + row.to(tl.int64) * stride + block, across_blocks(word), mask)
    tl.store(scales + swizzled(row, block, token_blocks), across_blocks(byte).to(tl.uint8), mask)


@triton.jit(
    do_not_specialize=["rows", *KEYS], do_not_specialize_on_alignment=["row_amax", "column_amax", *KEYS]
)
def quantize_kernel(
    x, rows, cols,
    row_amax, row_key, row_out, row_stride, row_scales,
    column_amax, column_key, column_out, column_stride, column_scales,
    BF16: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """1x16 blocks of x [rows, cols], row-wise and column-wise. ROW, COLUMN: None or the rounding.

    x: int64 words; codes: int64 [rows, row_stride] and [cols, column_stride]; scales: uint8, swizzled, zero where nothing
    is stored.
    """
    across = tl.cdiv(cols, 4 * GROUPS)
    tile_block, tile_group = tl.program_id(0) // across * 4, tl.program_id(0) % across * GROUPS
    words_a_row = cols // (4 if BF16 else 2)
    lane = tl.arange(0, LANES)
    if COLUMN is not None:
        factor, decode = tensor_scales(tl.load(column_amax))
        group, token_block = tile_group + lane % GROUPS, tile_block + lane // GROUPS
        mask = (group < cols // 4) & (token_block < rows // 16)
        words = load_columns(x + (token_block * 16).to(tl.int64) * words_a_row, cols, group, mask, BF16)
        for c in tl.static_range(4):
            v = channel(words, c, BF16)
            if SIGNS is not None:
                v = hadamard(v, SIGNS)
            scale, encode = block_scale(largest(v), factor, decode)
            if COLUMN == NEAREST:
                random = (group,) * 4
            else:
                random = block_words(column_key, 4 * group + c, token_block)
            low, high = codes8(v, 0, encode, random, COLUMN), codes8(v, 8, encode, random, COLUMN)
            store_channel(
                join_words(low, high), scale_byte(scale), column_out, column_stride, column_scales,
                cols, rows // 16, tile_block, tile_group, c,
            )  # fmt: skip
    if ROW is not None:
        factor, decode = tensor_scales(tl.load(row_amax))
        block = tile_group // 4 + lane % 4
        for i in range(4):
            row = tile_block * 16 + 16 * i + lane // 4
            mask = (row < rows) & (block < cols // 16)
            v = load_block(x + row.to(tl.int64)[:, None] * words_a_row, block, mask, BF16)
            scale, encode = block_scale(largest(v), factor, decode)
            if ROW == NEAREST:
                random = (block,) * 4
            else:
                random = block_words(row_key, row, block)
            low, high = codes8(v, 0, encode, random, ROW), codes8(v, 8, encode, random, ROW)
            tl.store(row_out + row.to(tl.int64) * row_stride + block, join_words(low, high), mask)
            tl.store(row_scales + swizzled(row, block, cols // 16), scale_byte(scale).to(tl.uint8), mask)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["amax"])
def quantize_square_kernel(
    x, rows, cols, amax, row_out, row_stride, row_scales, column_out, column_stride, column_scales, BF16: tl.constexpr
):  # fmt: skip
    """16x16 blocks of x [rows, cols], nearest: codes row-wise, int16 [rows, row_stride], and column-wise, int64; those
    give the row-wise ones. Scales as in `quantize_kernel`."""
    across = tl.cdiv(cols, 4 * GROUPS)
    tile_block, tile_group = tl.program_id(0) // across * 4, tl.program_id(0) % across * GROUPS
    lane = tl.arange(0, LANES)
    group, token_block = tile_group + lane % GROUPS, tile_block + lane // GROUPS
    mask = (group < cols // 4) & (token_block < rows // 16)
    first = x + (token_block * 16).to(tl.int64) * (cols // (4 if BF16 else 2))
    words = load_columns(first, cols, group, mask, BF16)
    factor, decode = tensor_scales(tl.load(amax))
    own = largest(channel(words, 0, BF16))
    for c in tl.static_range(1, 4):
        own = tl.maximum(own, largest(channel(words, c, BF16)))
    shared = tl.max(tl.reshape(own, (LANES // 4, 4)), axis=1)  # four neighbouring lanes share a block
    block_amax = tl.reshape(tl.broadcast_to(shared[:, None], (LANES // 4, 4)), (LANES,))
    scale, encode = block_scale(block_amax, factor, decode)
    halves = ()
    for c in tl.static_range(4):
        v = channel(words, c, BF16)
        low, high = codes8(v, 0, encode, (group,) * 4, NEAREST), codes8(v, 8, encode, (group,) * 4, NEAREST)
        halves = halves + ((low, high),)
        store_channel(
            join_words(low, high), scale_byte(scale), column_out, column_stride, column_scales,
            cols, rows // 16, tile_block, tile_group, c,
        )  # fmt: skip
    for t in tl.static_range(16):
        row, pair = token_block * 16 + t, tl.zeros_like(group)
        for c in tl.static_range(4):
            pair |= ((halves[c][t // 8] >> (4 * (t % 8))) & 15) << (4 * c)
        tl.store(row_out + row.to(tl.int64) * row_stride + group, pair.to(tl.int16), mask)
        at = row_scales + swizzled(row, group // 4, cols // 16)
        tl.store(at, scale_byte(scale).to(tl.uint8), mask & (group % 4 == 0))
