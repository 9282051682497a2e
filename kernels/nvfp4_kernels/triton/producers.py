"""Kernels that make a linear layer's input and measure it on the way: norms, with their gradient, and the squared ReLU.

A program owns 16 tokens of some channels, four a lane, so that the 16-point transform along tokens needs no other lane.
The result is measured as it is stored, rounded to bf16: no second read.
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
from nvfp4_kernels.triton.conv_kernels import sigmoid
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
def inside(row, t: tl.constexpr, rows, mask, WHOLE: tl.constexpr):
    """`mask`, of lanes, where there is a row `row + t`. WHOLE: there are all 16."""
    return mask if WHOLE else mask & below(row + t, rows, mask.to(tl.int32))


@triton.jit
def store_words(y, words, row, rows, stride, group, mask, WHOLE: tl.constexpr):
    y += row.to(tl.int64) * stride + group
    for t in tl.static_range(16):
        tl.store(y + t * stride, words[t], inside(row, t, rows, mask, WHOLE))


@triton.jit
def load_rows(x, row, rows, stride, group, mask, BF16: tl.constexpr, WHOLE: tl.constexpr):
    """Words of 16 tokens x 4 channels, token by token, as in `kernels.load_columns`; zeros past the last row.

    stride: from row to row, in words.
    """
    x += row.to(tl.int64) * stride + (group if BF16 else 2 * group)
    words = ()
    for t in tl.static_range(16):
        at, there = x + t * stride, inside(row, t, rows, mask, WHOLE)
        words = words + (tl.load(at, there, 0),)
        if not BF16:
            words = words + (tl.load(at + 1, there, 0),)
    return words


@triton.jit
def load_normed(
    x, gate, row, rows, group, mask,
    COLS: tl.constexpr, GATE_STRIDE: tl.constexpr, BF16: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What is to be normed, of 16 tokens x 4 channels: x's words, or the 64 fp32 values of x * silu(gate)."""
    v = load_rows(x, row, rows, COLS // (4 if BF16 else 2), group, mask, BF16, WHOLE)
    if GATE_STRIDE is not None:
        words, gates = v, load_rows(gate, row, rows, GATE_STRIDE, group, mask, True, WHOLE)
        v = ()
        for t in tl.static_range(16):
            for c in tl.static_range(4):
                z = unpack4(gates[t])[c]
                v = v + (channel_of(words, t, c, BF16) * (z * sigmoid(z)),)
    return v


@triton.jit
def value_of(normed, t: tl.constexpr, c: tl.constexpr, BF16: tl.constexpr, GATED: tl.constexpr):
    """Token t of channel c of the four, of what `load_normed` returned."""
    return normed[4 * t + c] if GATED else channel_of(normed, t, c, BF16)


@triton.jit
def add_squares(squares, normed, BF16: tl.constexpr, GATED: tl.constexpr):
    """Per lane and token the sum of squares; squares: those so far."""
    sums = ()
    for t in tl.static_range(16):
        s = squares[t]
        for c in tl.static_range(4):
            v = value_of(normed, t, c, BF16, GATED)
            s += v * v
        sums = sums + (s,)
    return sums


@triton.jit
def across_lanes(v):
    """16 tensors summed over their lanes, together: a [1] each."""
    for stage in tl.static_range(4):
        joined = ()
        for i in tl.static_range(8 >> stage):
            joined = joined + (tl.join(v[i], v[i + (8 >> stage)]),)
        v = joined
    v = (tl.sum(v[0], 0, keep_dims=True),)
    for stage in tl.static_range(4):
        low, high = (), ()
        for i in tl.static_range(1 << stage):
            a, b = tl.split(v[i])
            low, high = low + (a,), high + (b,)
        v = low + high
    return v


@triton.jit
def finish(
    normed, scale, weight, y, row, rows, group, mask, raw, turned,
    COLS: tl.constexpr, BF16: tl.constexpr, GATED: tl.constexpr, MEASURED: tl.constexpr, SIGNS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Store 16 tokens x 4 channels times their scales and weights; the maxima, grown by theirs."""
    w = ()
    for c in tl.static_range(4):
        w = w + (tl.load(weight + 4 * group + c, mask, 0),)
    out = ()
    for t in tl.static_range(16):
        v = ()
        for c in tl.static_range(4):
            v = v + (value_of(normed, t, c, BF16, GATED) * scale[t] * w[c],)
        out = out + (join_words(round_to_bf16(v[0], v[1]), round_to_bf16(v[2], v[3])),)
    store_words(y, out, row, rows, COLS // 4, group, mask, WHOLE)
    if MEASURED:
        raw, turned = measure(out, raw, turned, SIGNS)
    return raw, turned


@triton.jit(do_not_specialize=["rows", "eps"])
def norm_kernel(
    x, gate, weight, y, rstd, amax, rows, eps,
    COLS: tl.constexpr, GATE_STRIDE: tl.constexpr, GROUP: tl.constexpr, BF16: tl.constexpr,
    MEASURED: tl.constexpr, SIGNS: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """y = norm(x * silu(gate)) * weight, each GROUP channels normed by themselves.

    x: bf16 or fp32 words [rows, COLS]; gate: bf16 words [rows, COLS], GATE_STRIDE words from row to row, or None twice;
    weight: fp32 [COLS]; y: bf16 words; rstd: fp32 [rows, COLS / GROUP]; amax: int32 [2], zeros, or unused; WHOLE: rows are a
    multiple of 16.

    A program goes over tiles of 16 tokens x GROUP channels: from registers where its lanes hold them, else read twice, the
    second time from the L1 cache.
    """
    GROUPS: tl.constexpr = COLS // GROUP
    GATED: tl.constexpr = GATE_STRIDE is not None
    lane = tl.arange(0, LANES)
    raw = tl.zeros((LANES,), tl.float32)
    turned = tl.zeros((LANES,), tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(rows, 16) * GROUPS, tl.num_programs(0)):
        row = tl.full((), i // GROUPS * 16, tl.int32)  # the interpreter's i is no tensor
        first = i % GROUPS * (GROUP // 4)
        squares = ()
        for _ in tl.static_range(16):
            squares = squares + (tl.zeros((LANES,), tl.float32),)
        if GROUP <= 4 * LANES:
            mask = lane < GROUP // 4
            held = load_normed(x, gate, row, rows, first + lane, mask, COLS, GATE_STRIDE, BF16, WHOLE)
            squares = add_squares(squares, held, BF16, GATED)
        else:
            for start in range(0, GROUP // 4, LANES):
                group, mask = first + start + lane, start + lane < GROUP // 4
                part = load_normed(x, gate, row, rows, group, mask, COLS, GATE_STRIDE, BF16, WHOLE)
                squares = add_squares(squares, part, BF16, GATED)
        sums, scale = across_lanes(squares), ()
        at = rstd + row * GROUPS + i % GROUPS + tl.arange(0, 1)
        for t in tl.static_range(16):
            scale = scale + (tl.rsqrt(sums[t] / GROUP + eps),)
            tl.store(at + t * GROUPS, scale[t], below(row + t, rows, tl.arange(0, 1)))
        if GROUP <= 4 * LANES:
            raw, turned = finish(
                held, scale, weight, y, row, rows, first + lane, mask, raw, turned,
                COLS, BF16, GATED, MEASURED, SIGNS, WHOLE,
            )  # fmt: skip
        else:
            for start in range(0, GROUP // 4, LANES):
                group, mask = first + start + lane, start + lane < GROUP // 4
                part = load_normed(x, gate, row, rows, group, mask, COLS, GATE_STRIDE, BF16, WHOLE)
                raw, turned = finish(
                    part, scale, weight, y, row, rows, group, mask, raw, turned,
                    COLS, BF16, GATED, MEASURED, SIGNS, WHOLE,
                )  # fmt: skip
    if MEASURED:
        report(amax, raw, turned, SIGNS)


@triton.jit
def load_row(dy, x, gate, row, stop, cols, gate_stride, channel, mask, GATED: tl.constexpr):
    """A row's channels of dy, x and, where there is one, the gate; zeros from row `stop` on."""
    at, there = row.to(tl.int64) * cols + channel, mask & below(row, stop, channel)
    z = tl.load(gate + row.to(tl.int64) * gate_stride + channel, there, 0.0) if GATED else 0.0
    return tl.load(dy + at, there, 0.0), tl.load(x + at, there, 0.0), z


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    dy, x, gate, rstd, weight, dx, dgate, sums, rows, cols, gate_stride,
    GATED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of `norm_kernel`'s x, gate and weight. WIDTH: GROUP or more, a power of two.

    dy, x: [rows, cols] and gate, with gate_stride from row to row, of any dtype; dx, dgate: [rows, cols]; sums: fp32
    [chunks, cols], each chunk's share of the weight's gradient. A program walks along CHUNK rows of a group.
    """
    groups = cols // GROUP
    group, chunk = tl.program_id(0) % groups, tl.program_id(0) // groups
    mask = tl.arange(0, WIDTH) < GROUP
    channel = group * GROUP + tl.arange(0, WIDTH)
    w = tl.load(weight + channel, mask, 0.0)
    of_weight = tl.zeros((WIDTH,), tl.float32)
    start, stop = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, rows)
    ahead = load_row(dy, x, gate, start, stop, cols, gate_stride, channel, mask, GATED)
    for i in range(stop - start):
        row = start + i
        dv, u, z = ahead
        ahead = load_row(dy, x, gate, row + 1, stop, cols, gate_stride, channel, mask, GATED)
        dv, u = dv.to(tl.float32), u.to(tl.float32)
        r = tl.load(rstd + row * groups + group)
        at = row.to(tl.int64) * cols + channel
        v = u
        if GATED:
            z = z.to(tl.float32)
            s = sigmoid(z)
            silu = z * s
            v = u * silu
        normed = v * r
        of_weight += dv * normed
        dv *= w
        dv = r * (dv - normed * (tl.sum(dv * normed) / GROUP))
        if GATED:
            tl.store(dgate + at, (dv * u * (s + silu * (1.0 - s))).to(dgate.dtype.element_ty), mask)
            dv *= silu
        tl.store(dx + at, dv.to(dx.dtype.element_ty), mask)
    tl.store(sums + chunk.to(tl.int64) * cols + channel, of_weight, mask)


@triton.jit(do_not_specialize=["rows"])
def squared_relu_kernel(x, y, amax, rows, cols, SIGNS: tl.constexpr, LANES: tl.constexpr):
    """y = max(x, 0)^2. x, y: bf16 words [rows, cols]; amax: int32 [2], zeros."""
    across = tl.cdiv(cols, 4 * LANES)
    raw = tl.zeros((LANES,), tl.float32)
    turned = tl.zeros((LANES,), tl.float32)
    for i in range(tl.program_id(0), across * tl.cdiv(rows, 16), tl.num_programs(0)):
        group = (i % across) * LANES + tl.arange(0, LANES)
        row = (i // across) * 16
        words = load_rows(x, row, rows, cols // 4, group, group < cols // 4, True, False)
        out = ()
        for t in tl.static_range(16):
            v = ()
            for c in tl.static_range(4):
                r = tl.maximum(unpack4(words[t])[c], 0.0, propagate_nan=tl.PropagateNan.ALL)
                v = v + (r * r,)
            out = out + (join_words(round_to_bf16(v[0], v[1]), round_to_bf16(v[2], v[3])),)
        store_words(y, out, row, rows, cols // 4, group, group < cols // 4, False)
        raw, turned = measure(out, raw, turned, SIGNS)
    report(amax, raw, turned, SIGNS)
