"""Kernels that make a linear layer's input and measure it on the way: norms and the squared ReLU.

A program owns 16 tokens and goes over their channels, four a lane, so that the 16-point transform along tokens needs no
other lane. The result is measured as it is stored, rounded to bf16: no second read.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import (
    butterfly,
    join_words,
    round_to_bf16,
    unpack2,
    unpack4,
)
from nvfp4_kernels.triton.kernels import below, channel_of, magnitude_bits


@triton.jit
def measure(words, raw, turned, SIGNS: tl.constexpr):
    """Running maxima per lane over 16 tokens x 4 channels: of |v|, and of the transform before its factor and rounding."""
    for c in tl.static_range(4):
        v = ()
        for t in tl.static_range(16):
            v = v + (unpack4(words[t])[c],)
            raw = tl.maximum(raw, tl.abs(v[t]), propagate_nan=tl.PropagateNan.ALL)
        if SIGNS is not None:
            s = butterfly(v, SIGNS)
            for t in tl.static_range(8):
                turned = tl.maximum(
                    turned, tl.abs(s[t]) + tl.abs(s[t + 8]), propagate_nan=tl.PropagateNan.ALL
                )
    return raw, turned


@triton.jit
def report(amax, raw, turned, SIGNS: tl.constexpr):
    """Join a program's maxima into amax: int32 [2], the bits of two fp32."""
    tl.atomic_max(amax, tl.max(magnitude_bits(raw)))
    if SIGNS is not None:
        tl.atomic_max(amax + 1, tl.max(magnitude_bits(unpack2(round_to_bf16(turned * 0.25, turned))[0])))


@triton.jit
def store_words(y, words, row, rows, cols, group, mask):
    for t in tl.static_range(16):
        tl.store(
            y + (row + t).to(tl.int64) * (cols // 4) + group, words[t], mask & below(row + t, rows, group)
        )


@triton.jit
def load_rows(x, row, rows, cols, group, mask, BF16: tl.constexpr):
    """Words of 16 tokens x 4 channels, token by token, as in `kernels.load_columns`; zeros past the last row."""
    words = ()
    for t in tl.static_range(16):
        at = x + (row + t).to(tl.int64) * (cols // (4 if BF16 else 2))
        inside = mask & below(row + t, rows, group)
        if BF16:
            words = words + (tl.load(at + group, inside, 0),)
        else:
            words = words + (tl.load(at + 2 * group, inside, 0), tl.load(at + 2 * group + 1, inside, 0))
    return words


@triton.jit
def gated(words, gate, t: tl.constexpr, c: tl.constexpr, BF16: tl.constexpr, GATED: tl.constexpr):
    """Token t of channel c of the four, times silu of its gate."""
    v = channel_of(words, t, c, BF16)
    if GATED:
        z = unpack4(gate[t])[c]
        v = v * (z / (1.0 + tl.exp(-z)))
    return v


@triton.jit(do_not_specialize=["rows", "eps"])
def norm_kernel(
    x, gate, weight, y, rstd, amax, rows, cols, eps,
    BF16: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr, SIGNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """y = norm(x * silu(gate)) * weight for 16 tokens, each GROUP channels normed by themselves.

    x: bf16 or fp32 words [rows, cols]; gate: bf16 words or unused; weight: fp32 [cols]; y: bf16 words; rstd: fp32
    [rows, cols / GROUP]; amax: int32 [2], zeros.
    """
    row = tl.program_id(0) * 16
    lane = tl.arange(0, LANES)
    raw = tl.zeros((LANES,), tl.float32)
    turned = tl.zeros((LANES,), tl.float32)
    for first in range(0, cols // 4, GROUP // 4):
        squares = ()
        for _ in tl.static_range(16):
            squares = squares + (tl.zeros((LANES,), tl.float32),)
        for start in range(0, GROUP // 4, LANES):
            group = first + start + lane
            mask = start + lane < GROUP // 4
            words = load_rows(x, row, rows, cols, group, mask, BF16)
            gates = load_rows(gate, row, rows, cols, group, mask, True) if GATED else ()
            sums = ()
            for t in tl.static_range(16):
                s = squares[t]
                for c in tl.static_range(4):
                    v = gated(words, gates, t, c, BF16, GATED)
                    s += v * v
                sums = sums + (s,)
            squares = sums
        scale = ()
        for t in tl.static_range(16):
            r = 1.0 / tl.sqrt(tl.sum(squares[t]) / GROUP + eps)
            scale = scale + (r,)
            tl.store(rstd + (row + t) * (cols // GROUP) + first // (GROUP // 4), r, row + t < rows)
        for start in range(0, GROUP // 4, LANES):
            group = first + start + lane
            mask = start + lane < GROUP // 4
            words = load_rows(x, row, rows, cols, group, mask, BF16)
            gates = load_rows(gate, row, rows, cols, group, mask, True) if GATED else ()
            w = ()
            for c in tl.static_range(4):
                w = w + (tl.load(weight + 4 * group + c, mask, 0),)
            out = ()
            for t in tl.static_range(16):
                v = ()
                for c in tl.static_range(4):
                    v = v + (gated(words, gates, t, c, BF16, GATED) * scale[t] * w[c],)
                out = out + (join_words(round_to_bf16(v[0], v[1]), round_to_bf16(v[2], v[3])),)
            store_words(y, out, row, rows, cols, group, mask)
            raw, turned = measure(out, raw, turned, SIGNS)
    report(amax, raw, turned, SIGNS)


@triton.jit(do_not_specialize=["rows"])
def squared_relu_kernel(x, y, amax, rows, cols, SIGNS: tl.constexpr, LANES: tl.constexpr):
    """y = max(x, 0)^2. x, y: bf16 words [rows, cols]; amax: int32 [2], zeros."""
    across = tl.cdiv(cols, 4 * LANES)
    raw = tl.zeros((LANES,), tl.float32)
    turned = tl.zeros((LANES,), tl.float32)
    for i in range(tl.program_id(0), across * tl.cdiv(rows, 16), tl.num_programs(0)):
        group = (i % across) * LANES + tl.arange(0, LANES)
        row = (i // across) * 16
        words = load_rows(x, row, rows, cols, group, group < cols // 4, True)
        out = ()
        for t in tl.static_range(16):
            v = ()
            for c in tl.static_range(4):
                r = tl.maximum(unpack4(words[t])[c], 0.0, propagate_nan=tl.PropagateNan.ALL)
                v = v + (r * r,)
            out = out + (join_words(round_to_bf16(v[0], v[1]), round_to_bf16(v[2], v[3])),)
        store_words(y, out, row, rows, cols, group, group < cols // 4)
        raw, turned = measure(out, raw, turned, SIGNS)
    report(amax, raw, turned, SIGNS)
