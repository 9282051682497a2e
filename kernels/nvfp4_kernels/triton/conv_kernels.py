"""Depthwise causal convolution, bias and SiLU in one pass, and its gradient in one pass over x and dy.

A program owns WIDTH channels and walks along CHUNK tokens. What the next tokens need of those before stays in registers, so
that every element is read once (but for the K - 1 tokens where chunks meet); the tokens ahead are read before the present
ones are computed. x: [B, S, A + B + C] with any strides of batch and tokens; the results of the three parts A, B and C of
the channels lie in tensors of their own, contiguous, as the scan and its gradient have them.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import ASM


@triton.jit
def part_of(block, a, b, c, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """A block of channels: its part's memory, width and first channel, and the block's channels in the part."""
    in_a: tl.constexpr = (A + WIDTH - 1) // WIDTH
    in_b: tl.constexpr = (B + WIDTH - 1) // WIDTH
    second, third = block >= in_a, block >= in_a + in_b
    memory = tl.where(third, c, tl.where(second, b, a))
    size = tl.where(third, C, tl.where(second, B, A))
    first = tl.where(third, A + B, tl.where(second, A, 0))
    block -= tl.where(third, in_a + in_b, tl.where(second, in_a, 0))
    return memory, size, first, block * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def inside(channel, size, there):
    """The channels below `size` of a token that is `there`, as a block: of scalar masks the interpreter makes integers."""
    return channel < tl.where(there, size, 0)


@triton.jit
def load_rows(x, stride, start, end, channel, size, ROWS: tl.constexpr):
    """ROWS tokens from `start` on, zeros from `end` on. x: pointers to the channels of token 0."""
    rows = ()
    for r in tl.static_range(ROWS):
        at = x + (start + r).to(tl.int64) * stride
        rows = rows + (tl.load(at, inside(channel, size, start + r < end), 0.0),)
    return rows


@triton.jit
def load_past(x, stride, start, channel, size, K: tl.constexpr):
    """The K - 1 tokens before `start`, the nearest first, as fp32; zeros before the sequence."""
    past = ()
    for i in tl.static_range(1, K):
        at = x + (start - i).to(tl.int64) * stride
        past = past + (tl.load(at, inside(channel, size, start >= i), 0.0).to(tl.float32),)
    return past


@triton.jit
def load_taps(weight, channel, mask, K: tl.constexpr):
    """weight [channels, K]; entry i multiplies the token i before the current one."""
    taps = ()
    for i in tl.static_range(K):
        taps = taps + (tl.load(weight + channel * K + (K - 1 - i), mask, 0.0),)
    return taps


@triton.jit
def load_documents(seq_idx, start, K: tl.constexpr, MASKED: tl.constexpr):
    """Document numbers of the K - 1 tokens before `start`; of those before the sequence any number, as they are zeros."""
    documents = ()
    if MASKED:
        for i in tl.static_range(1, K):
            documents = documents + (tl.load(seq_idx + tl.maximum(start - i, 0)),)
    return documents


@triton.jit
def advance(v, past, K: tl.constexpr):
    """`past` of the next token: v and all but the last."""
    moved = ()
    if K > 1:
        moved = (v,)
        for i in tl.static_range(K - 2):
            moved = moved + (past[i],)
    return moved


@triton.jit
def only_own(v, document, others, i: tl.constexpr, MASKED: tl.constexpr):
    """v where the token i away is in the same document, else 0."""
    return tl.where(others[i - 1] == document, v, 0.0) if MASKED else v


@triton.jit
def convolve(v, past, taps, bias, document, documents, K: tl.constexpr, MASKED: tl.constexpr):
    """The sum before SiLU, in the reference's order, and the inputs that it was made of."""
    window = (v,)
    total = bias + v * taps[0]
    for i in tl.static_range(1, K):
        u = only_own(past[i - 1], document, documents, i, MASKED)
        total += u * taps[i]
        window = window + (u,)
    return total, window


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)) to a few fp32 ulp: four instructions; exp and division take twelve, for subnormals."""
    if ASM:
        s = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [v], tl.float32, True, 1,
        )  # fmt: skip
    else:
        s = 1.0 / (1.0 + tl.exp(-v))
    return s


@triton.jit(do_not_specialize=["length"])
def conv_kernel(
    x, weight, bias, seq_idx, out_a, out_b, out_c, length, batch_stride, row_stride,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y = SiLU(bias + convolution), fp32 until it is stored. seq_idx: int32 [B, S], or unused without MASKED."""
    batch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    out, size, first, channel = part_of(tl.program_id(0), out_a, out_b, out_c, A, B, C, WIDTH)
    mask = channel < size
    x += batch * batch_stride + first + channel
    out += batch * length * size + channel
    taps, b = (
        load_taps(weight, first + channel, mask, K),
        tl.load(bias + first + channel, mask, 0.0),
    )
    if MASKED:
        seq_idx += batch * length
    past, documents = (
        load_past(x, row_stride, start, channel, size, K),
        load_documents(seq_idx, start, K, MASKED),
    )
    end = tl.minimum(start + CHUNK, length)
    ahead = load_rows(x, row_stride, start, end, channel, size, ROWS)
    for i in range(tl.cdiv(end - start, ROWS)):
        t = start + i * ROWS
        rows = ahead
        ahead = load_rows(x, row_stride, t + ROWS, end, channel, size, ROWS)
        for r in tl.static_range(ROWS):
            v = rows[r].to(tl.float32)
            document = tl.load(seq_idx + tl.minimum(t + r, length - 1)) if MASKED else 0
            total, _ = convolve(v, past, taps, b, document, documents, K, MASKED)
            y = total * sigmoid(total)
            tl.store(
                out + (t + r).to(tl.int64) * size,
                y.to(out.dtype.element_ty),
                inside(channel, size, t + r < end),
            )
            past = advance(v, past, K)
            if MASKED:
                documents = advance(document, documents, K)


@triton.jit
def through_silu(total, dy):
    """The gradient before SiLU of `total`."""
    s = sigmoid(total)
    return dy * s * (1.0 + total * (1.0 - s))


@triton.jit
def spread(g, partial, taps, document, documents, K: tl.constexpr, MASKED: tl.constexpr):
    """Add a token's g to the sums of the K - 1 tokens before it: the one complete by this, and what is left."""
    sums = (g * taps[0],)
    for i in tl.static_range(1, K):
        sums = sums + (partial[i - 1] + only_own(g, document, documents, i, MASKED) * taps[i],)
    left = ()
    for i in tl.static_range(K - 1):
        left = left + (sums[i],)
    return sums[K - 1], left


@triton.jit(do_not_specialize=["length"])
def conv_backward_kernel(
    x, weight, bias, seq_idx, grad_a, grad_b, grad_c, dx, sums, length, batch_stride, row_stride, dx_batch, dx_row,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dx [B, S, A + B + C] as x, with strides of its own; sums fp32 [B * chunks, K + 1, A + B + C]: each chunk's share of
    the gradients of the taps, as the weight has them, and of the bias. K - 1 <= ROWS, and ROWS divides CHUNK.

    The gradient of token t is complete K - 1 tokens later; at a chunk's end these belong to the next one.
    """
    batch, chunk = tl.program_id(2).to(tl.int64), tl.program_id(1)
    start, channels = chunk * CHUNK, A + B + C
    grad, size, first, channel = part_of(tl.program_id(0), grad_a, grad_b, grad_c, A, B, C, WIDTH)
    mask = channel < size
    x += batch * batch_stride + first + channel
    grad += batch * length * size + channel
    dx += batch * dx_batch + first + channel
    sums += (batch * tl.num_programs(1) + chunk) * (K + 1) * channels + first + channel
    taps, b = (
        load_taps(weight, first + channel, mask, K),
        tl.load(bias + first + channel, mask, 0.0),
    )
    if MASKED:
        seq_idx += batch * length
    past, documents = (
        load_past(x, row_stride, start, channel, size, K),
        load_documents(seq_idx, start, K, MASKED),
    )
    partial, of_taps = (), ()
    for _ in tl.static_range(K - 1):
        partial = partial + (tl.zeros((WIDTH,), tl.float32),)
    for _ in tl.static_range(K):
        of_taps = of_taps + (tl.zeros((WIDTH,), tl.float32),)
    of_bias = tl.zeros((WIDTH,), tl.float32)
    end = tl.minimum(start + CHUNK, length)
    needed = tl.minimum(end + K - 1, length)
    ahead = load_rows(x, row_stride, start, needed, channel, size, ROWS)
    grads_ahead = load_rows(grad, size, start, needed, channel, size, ROWS)
    for i in range(tl.cdiv(end - start, ROWS)):
        t = start + i * ROWS
        rows, grads = ahead, grads_ahead
        ahead = load_rows(x, row_stride, t + ROWS, needed, channel, size, ROWS)
        grads_ahead = load_rows(grad, size, t + ROWS, needed, channel, size, ROWS)
        for r in tl.static_range(ROWS):
            v = rows[r].to(tl.float32)
            document = tl.load(seq_idx + tl.minimum(t + r, length - 1)) if MASKED else 0
            total, window = convolve(v, past, taps, b, document, documents, K, MASKED)
            g = through_silu(total, grads[r].to(tl.float32))
            moved = ()
            for j in tl.static_range(K):
                moved = moved + (of_taps[j] + g * window[j],)
            of_taps = moved
            of_bias += g
            done, partial = spread(g, partial, taps, document, documents, K, MASKED)
            at = t + r - (K - 1)
            own = inside(channel, size, at >= start and at < end)
            tl.store(dx + at.to(tl.int64) * dx_row, done.to(dx.dtype.element_ty), own)
            past = advance(v, past, K)
            if MASKED:
                documents = advance(document, documents, K)
    for i in tl.static_range(K):
        tl.store(sums + (K - 1 - i) * channels, of_taps[i], mask)
    tl.store(sums + K * channels, of_bias, mask)
    stop = start + tl.cdiv(end - start, ROWS) * ROWS
    for r in tl.static_range(K - 1):
        v = ahead[r].to(tl.float32)
        document = tl.load(seq_idx + tl.minimum(stop + r, length - 1)) if MASKED else 0
        total, _ = convolve(v, past, taps, b, document, documents, K, MASKED)
        g = through_silu(total, grads_ahead[r].to(tl.float32))
        done, partial = spread(g, partial, taps, document, documents, K, MASKED)
        at = stop + r - (K - 1)
        own = inside(channel, size, at >= start and at < end)
        tl.store(dx + at.to(tl.int64) * dx_row, done.to(dx.dtype.element_ty), own)
        past = advance(v, past, K)
        if MASKED:
            documents = advance(document, documents, K)
