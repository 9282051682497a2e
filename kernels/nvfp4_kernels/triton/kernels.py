"""The kernels. A program handles tiles of 16 tokens x 4 LANES channels; a lane works alone, in registers.

Column-wise a lane owns 4 channels x 16 tokens: four whole blocks, whose transform, maximum, random bits and codes
need no other lane, and whose results lie with channels contiguous. Row-wise a lane owns one block of 16 channels:
that half reads the tile again, from the L1 cache. Memory is addressed in int64 words: four bf16 or two fp32.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import (
    as_int,
    block_scale,
    block_words,
    butterfly,
    byte_magic,
    hadamard,
    join_words,
    largest,
    load_key,
    nibble_value,
    nibbles_of,
    operands_of,
    pack2,
    round_element,
    round_to_bf16,
    scale_byte,
    scale_value,
    tensor_scales,
    unpack2,
    unpack4,
    unpack_word,
)

OPERAND, CODES = tl.constexpr("operand"), tl.constexpr("codes")
KEYS = ["row_key", "column_key"]


@triton.jit
def load_columns(x, cols, group, mask, BF16: tl.constexpr):
    """Words of 16 tokens x 4 channels, token by token. x: the tile's first row; group: channel / 4."""
    words = ()
    for t in tl.static_range(16):
        if BF16:
            words = words + (tl.load(x + t * (cols // 4) + group, mask),)
        else:
            at = x + t * (cols // 2) + 2 * group
            words = words + (tl.load(at, mask), tl.load(at + 1, mask))
    return words


@triton.jit
def channel_of(words, t: tl.constexpr, C: tl.constexpr, BF16: tl.constexpr):
    """Token t of channel C of the four, as fp32."""
    if BF16:
        v = unpack4(words[t])[C]
    else:
        v = unpack_word(words[2 * t + C // 2], False)[C % 2]
    return v


@triton.jit
def channel(words, C: tl.constexpr, BF16: tl.constexpr):
    """16 tokens of channel C of the four."""
    v = ()
    for t in tl.static_range(16):
        v = v + (channel_of(words, t, C, BF16),)
    return v


@triton.jit
def load_block(x, block, mask, BF16: tl.constexpr):
    """The 16 channels of a block, as fp32, from 16-byte reads."""
    v = ()
    for i in tl.static_range(2 if BF16 else 4):
        pair = (block * (4 if BF16 else 8) + 2 * i)[:, None] + tl.arange(0, 2)[None, :]
        a, b = tl.split(tl.load(x + pair, None if mask is None else mask[:, None]))
        v = v + unpack_word(a, BF16) + unpack_word(b, BF16)
    return v


@triton.jit
def store_block(out, block, mask, w):
    """Store blocks of 16 bf16 numbers, each as 8 int32 pairs, by 16-byte writes: lanes exchange nothing."""
    for i in tl.static_range(2):
        pair = tl.join(join_words(w[4 * i], w[4 * i + 1]), join_words(w[4 * i + 2], w[4 * i + 3]))
        at = (block * 4 + 2 * i)[:, None] + tl.arange(0, 2)[None, :]
        tl.store(out + at, pair, None if mask is None else mask[:, None])


@triton.jit
def quantize_channel(
    words, C: tl.constexpr, group, token_block, factor, decode, key,
    BF16: tl.constexpr, STOCHASTIC: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """(magnitudes, signs, scale) of the 16 tokens of channel C of the four."""
    v = channel(words, C, BF16)
    if SIGNS is not None:
        v = hadamard(v, SIGNS)
    scale, encode = block_scale(largest(v), factor, decode)
    if STOCHASTIC:
        random = block_words(key, 4 * group + C, token_block)
    else:
        random = (group,) * 4
    q, s = (), ()
    for t in tl.static_range(16):
        a, b = round_element(v[t], encode, random[t // 4], t % 4, STOCHASTIC, byte_magic(decode[0]))
        q, s = q + (a,), s + (b,)
    return q, s, scale


@triton.jit
def quantize_columns(
    x, cols, token_block, group, mask, amax, key, out, scales,
    BF16: tl.constexpr, OUTPUT: tl.constexpr, STOCHASTIC: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """The column-wise half of a tile, two channels at a time. x: the tile's first row; out, scales: whole arrays."""
    words = load_columns(x, cols, group, mask, BF16)
    factor, decode = tensor_scales(amax)  # divides, with branches that loads are not moved across
    packed = ()
    scale_word = tl.zeros_like(group)
    for pair in tl.static_range(2):
        # Two channels share an int32: neighbours (operand), or those whose codes lie 16 bits apart.
        if OUTPUT == OPERAND:
            q0, s0, scale0 = quantize_channel(
                words, 2 * pair, group, token_block, factor, decode, key, BF16, STOCHASTIC, SIGNS
            )
            q1, s1, scale1 = quantize_channel(
                words, 2 * pair + 1, group, token_block, factor, decode, key, BF16, STOCHASTIC, SIGNS
            )
            both = pack2(scale0, scale1)
        else:
            q0, s0, scale0 = quantize_channel(
                words, pair, group, token_block, factor, decode, key, BF16, STOCHASTIC, SIGNS
            )
            q1, s1, scale1 = quantize_channel(
                words, pair + 2, group, token_block, factor, decode, key, BF16, STOCHASTIC, SIGNS
            )
            scale_word |= (scale_byte(scale0) | (scale_byte(scale1) << 16)) << (8 * pair)
        for t in tl.static_range(16):
            if OUTPUT == OPERAND:
                packed = packed + (operands_of(q0[t], q1[t], s0[t], s1[t], both, STOCHASTIC),)
            else:
                at_bit = 8 * pair + 4 * (t % 2)
                packed = packed + (nibbles_of(q0[t], q1[t], s0[t], s1[t], at_bit, STOCHASTIC),)
    if OUTPUT == OPERAND:
        at = out + (token_block * 16).to(tl.int64) * (cols // 4) + group
        for t in tl.static_range(16):
            tl.store(at + t * (cols // 4), join_words(packed[t], packed[16 + t]), mask)
    else:
        at = out + (token_block * 8).to(tl.int64) * (cols // 4) + group
        for t in tl.static_range(0, 16, 2):
            word = packed[t] | packed[t + 1] | packed[16 + t] | packed[17 + t]
            tl.store(at + (t // 2) * (cols // 4), word, mask)
        tl.store(scales + token_block.to(tl.int64) * (cols // 4) + group, scale_word, mask)


@triton.jit
def quantize_rows(
    x, block, mask, factor, decode, key, row, column_block, out, scales,
    BF16: tl.constexpr, OUTPUT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """A block a lane, row-wise. x, out, scales: the tile's first block; block: each lane's, from there."""
    v = load_block(x, block, mask, BF16)
    scale, encode = block_scale(largest(v), factor, decode)
    if STOCHASTIC:
        random = block_words(key, row, column_block)
    else:
        random = (block,) * 4
    q, s = (), ()
    for i in tl.static_range(16):
        a, b = round_element(v[i], encode, random[i // 4], i % 4, STOCHASTIC, byte_magic(decode[0]))
        q, s = q + (a,), s + (b,)
    if OUTPUT == OPERAND:
        both = pack2(scale, scale)
        words = ()
        for i in tl.static_range(8):
            words = words + (operands_of(q[2 * i], q[2 * i + 1], s[2 * i], s[2 * i + 1], both, STOCHASTIC),)
        store_block(out, block, mask, words)
    else:
        low, high = tl.zeros_like(block), tl.zeros_like(block)
        for i in tl.static_range(4):
            low |= nibbles_of(q[i], q[i + 4], s[i], s[i + 4], 4 * i, STOCHASTIC)
            high |= nibbles_of(q[i + 8], q[i + 12], s[i + 8], s[i + 12], 4 * i, STOCHASTIC)
        tl.store(out + block, join_words(low, high), mask)
        tl.store(scales + block, scale_byte(scale).to(tl.uint8), mask)


@triton.jit(
    do_not_specialize=["rows", *KEYS], do_not_specialize_on_alignment=["row_amax", "column_amax", *KEYS]
)
def quantize_kernel(
    x, rows, cols: tl.constexpr,
    row_amax, row_key, row_out, row_scales,
    column_amax, column_key, column_out, column_scales,
    BF16: tl.constexpr,
    ROW: tl.constexpr, ROW_STOCHASTIC: tl.constexpr,
    COLUMN: tl.constexpr, COLUMN_STOCHASTIC: tl.constexpr, SIGNS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """1x16 blocks of x [rows, cols], row-wise (ROW: None, "operand" or "codes") and column-wise (COLUMN).

    Codes are int64 [rows, cols/16] row-wise and int32 [rows/2, cols/4] column-wise; scales uint8 and int32 likewise.
    cols is a constant: addresses inside a tile are then immediates, and whole tiles need no masks.
    """
    across: tl.constexpr = (cols + 4 * LANES - 1) // (4 * LANES)
    WHOLE: tl.constexpr = cols % (4 * LANES) == 0
    token_block, tile = tl.program_id(0) // across, tl.program_id(0) % across
    lane = tl.arange(0, LANES)
    first_row = x + (token_block * 16).to(tl.int64) * (cols // (4 if BF16 else 2))
    if ROW is not None:
        amax = tl.load(row_amax)
        key = load_key(row_key) if ROW_STOCHASTIC else None
    if COLUMN is not None:
        group = tile * LANES + lane
        quantize_columns(
            first_row, cols, token_block, group, None if WHOLE else group < cols // 4, tl.load(column_amax),
            load_key(column_key) if COLUMN_STOCHASTIC else None, column_out, column_scales,
            BF16, COLUMN, COLUMN_STOCHASTIC, SIGNS,
        )  # fmt: skip
    if ROW is not None:
        factor, decode = tensor_scales(amax)
        blocks: tl.constexpr = cols // 16
        first = (token_block * 16).to(tl.int64) * blocks
        out = row_out + first * (4 if ROW == OPERAND else 1)
        scales = row_scales + first if ROW == CODES else None
        block = tile * (LANES // 4) + lane % (LANES // 4)
        for i in range(4):
            local = 4 * i + lane // (LANES // 4)
            row = token_block * 16 + local
            mask = None
            if not WHOLE or COLUMN is None:  # with columns, rows are a multiple of 16
                mask = (row < rows) & (block < blocks)
            quantize_rows(
                first_row, local * blocks + block, mask, factor, decode,
                key, row, block, out, scales, BF16, ROW, ROW_STOCHASTIC,
            )  # fmt: skip


@triton.jit
def below(row, rows, like):
    """row < rows as a block of `like`'s shape: the interpreter splats a scalar int1 to int32, no mask for Triton 3.9."""
    return row + tl.zeros_like(like) < rows


@triton.jit
def magnitude_bits(v):
    """The bits of |v|, whose integer order is that of the magnitudes, with one NaN on top."""
    bits = as_int(v) & 0x7FFFFFFF
    return tl.where(bits > 0x7F800000, 0x7FC00000, bits)


@triton.jit(do_not_specialize=["rows"])
def amax_kernel(x, out, rows, cols, BF16: tl.constexpr, SIGNS: tl.constexpr, LANES: tl.constexpr):
    """out: int32 [2], zeros: the bits of max |x| and of max |RHT(x^T)| (SIGNS None: stays zero).

    The transform's rounding is monotonic, so it is applied to the maximum alone; and its last stage is
    max(|a + b|, |a - b|) = |a| + |b|.
    """
    across = tl.cdiv(cols, 4 * LANES)
    raw = tl.zeros((LANES,), tl.float32)
    turned = tl.zeros((LANES,), tl.float32)
    for i in range(tl.program_id(0), across * tl.cdiv(rows, 16), tl.num_programs(0)):
        group = (i % across) * LANES + tl.arange(0, LANES)
        row = (i // across) * 16
        words = ()
        for t in tl.static_range(16):
            mask = (group < cols // 4) & below(row + t, rows, group)
            at = x + (row + t).to(tl.int64) * (cols // (4 if BF16 else 2))
            if BF16:
                words = words + (tl.load(at + group, mask, 0),)
            else:
                words = words + (tl.load(at + 2 * group, mask, 0), tl.load(at + 2 * group + 1, mask, 0))
        for c in tl.static_range(4):
            v = channel(words, c, BF16)
            for t in tl.static_range(16):
                raw = tl.maximum(raw, tl.abs(v[t]), propagate_nan=tl.PropagateNan.ALL)
            if SIGNS is not None:
                s = butterfly(v, SIGNS)
                for t in tl.static_range(8):
                    turned = tl.maximum(
                        turned, tl.abs(s[t]) + tl.abs(s[t + 8]), propagate_nan=tl.PropagateNan.ALL
                    )
    tl.atomic_max(out, tl.max(magnitude_bits(raw)))
    if SIGNS is not None:
        tl.atomic_max(out + 1, tl.max(magnitude_bits(unpack2(round_to_bf16(turned * 0.25, turned))[0])))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["amax"])
def quantize_square_kernel(
    x, rows, cols, amax, out, scales, BF16: tl.constexpr, OUTPUT: tl.constexpr, LANES: tl.constexpr
):
    """16x16 blocks, nearest. Codes are int16 [rows, cols/4], scales uint8 [rows, cols/16]; four lanes share a block."""
    across = tl.cdiv(cols, 4 * LANES)
    row = (tl.program_id(0) // across) * 16
    group = (tl.program_id(0) % across) * LANES + tl.arange(0, LANES)
    mask = group < cols // 4
    factor, decode = tensor_scales(tl.load(amax))
    words = load_columns(x + row.to(tl.int64) * (cols // (4 if BF16 else 2)), cols, group, mask, BF16)
    own = largest(channel(words, 0, BF16))
    for c in tl.static_range(1, 4):
        own = tl.maximum(own, largest(channel(words, c, BF16)))
    shared = tl.max(tl.reshape(own, (LANES // 4, 4)), axis=1)
    block_amax = tl.reshape(tl.broadcast_to(shared[:, None], (LANES // 4, 4)), (LANES,))
    scale, encode = block_scale(block_amax, factor, decode)
    pair = pack2(scale, scale)
    at = row.to(tl.int64) * (cols // 4) + group
    for t in tl.static_range(16):
        q, s = (), ()
        for c in tl.static_range(4):
            a, b = round_element(channel_of(words, t, c, BF16), encode, group, 0, False)
            q, s = q + (a,), s + (b,)
        if OUTPUT == OPERAND:
            low = operands_of(q[0], q[1], s[0], s[1], pair, False)
            high = operands_of(q[2], q[3], s[2], s[3], pair, False)
            word = join_words(low, high)
        else:
            spread = nibbles_of(q[0], q[2], s[0], s[2], 0, False) | nibbles_of(
                q[1], q[3], s[1], s[3], 4, False
            )
            word = ((spread & 0xFF) | (spread >> 8)).to(tl.int16)
            at_scale = scales + (row + t).to(tl.int64) * (cols // 16) + group // 4
            tl.store(at_scale, scale_byte(scale).to(tl.uint8), mask & (group % 4 == 0))
        tl.store(out + at + t * (cols // 4), word, mask)


@triton.jit(do_not_specialize=["rows"])
def expand_columns_kernel(codes, scales, out, rows, cols, LANES: tl.constexpr):
    """Column codes int32 [rows/2, cols/4] and scales int32 [rows/16, cols/4] -> operand, int64 words [rows, cols/4]."""
    across = tl.cdiv(cols, 4 * LANES)
    token_block = (tl.program_id(0) // across).to(tl.int64)
    group = (tl.program_id(0) % across) * LANES + tl.arange(0, LANES)
    mask = group < cols // 4
    scale_word = tl.load(scales + token_block * (cols // 4) + group, mask, 0)
    scale = ()
    for c in tl.static_range(4):
        scale = scale + (scale_value(scale_word >> (8 * c)),)
    for j in tl.static_range(8):
        word = tl.load(codes + (token_block * 8 + j) * (cols // 4) + group, mask, 0)
        for half in tl.static_range(2):
            v = ()
            for c in tl.static_range(4):
                v = v + (nibble_value(word, 8 * c + 4 * half, scale[c]),)
            packed = join_words(pack2(v[0], v[1]), pack2(v[2], v[3]))
            tl.store(out + (token_block * 16 + 2 * j + half) * (cols // 4) + group, packed, mask)


@triton.jit(do_not_specialize=["blocks"])
def expand_rows_kernel(codes, scales, out, blocks, LANES: tl.constexpr):
    """Row codes int64 [blocks] and scales uint8 [blocks] -> operand, int64 words [blocks, 4]."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = block < blocks
    word = tl.load(codes + block, mask, 0)
    scale = scale_value(tl.load(scales + block, mask, 0).to(tl.int32))
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    words = ()
    for i in tl.static_range(8):
        half = low if i < 4 else high
        a, b = nibble_value(half, 8 * (i % 4), scale), nibble_value(half, 8 * (i % 4) + 4, scale)
        words = words + (pack2(a, b),)
    # Unlike `store_block`: memory is all that this kernel waits for, and a warp's writes are of contiguous bytes here.
    a, b, c, d = (
        join_words(words[0], words[1]),
        join_words(words[2], words[3]),
        join_words(words[4], words[5]),
        join_words(words[6], words[7]),
    )
    tile = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (LANES, 4))
    tl.store(out + (block * 4)[:, None] + tl.arange(0, 4)[None, :], tile, mask[:, None])


@triton.jit(do_not_specialize_on_alignment=["a", "b"])
def scale_product_kernel(a, b, out):
    """out = a / 2688, times b / 2688 unless b is None."""
    g = tl.div_rn(tl.load(a), 2688.0)
    if b is not None:
        g *= tl.div_rn(tl.load(b), 2688.0)
    tl.store(out, g)
