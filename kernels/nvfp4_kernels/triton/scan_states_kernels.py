"""States that pass between the chunks of Mamba-2's scan, and their gradients, without a state in fp32 in memory.

With a the running sums of dt A in a chunk (Dao and Gu, arXiv 2405.21060, section 6), the state after a chunk is
exp(a_last) x the state before + sum_j exp(a_last - a_j) dt_j x_j B_j^T. A program goes through the chunks of a sequence
with its part of the state, of some heads of a group and SLICE of the N columns, in registers. What the next chunk weighs
its tokens with is loaded while this one is multiplied: scalars are not prefetched by Triton's pipeline.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.scan_tiles import LOG2E, load_tile


@triton.jit
def _documents(seq_idx, chunk, k, length, CHUNK: tl.constexpr):
    """Documents of a chunk's tokens (-1 past the end), of its last one and of the one before the chunk."""
    own = tl.load(seq_idx + chunk * CHUNK + k, chunk * CHUNK + k < length, -1)
    last = tl.load(seq_idx + tl.minimum(chunk * CHUNK + CHUNK, length) - 1)
    return own, last, tl.load(seq_idx + tl.maximum(chunk * CHUNK - 1, 0))


@triton.jit(do_not_specialize=["length", "chunks"])  # a single chunk would be a constant without .to
def scan_states_kernel(
    x, b, dt, decay, seq_idx, states, length, chunks, x_batch, x_row, b_batch, b_row,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr, SLICE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The states that chunks begin with: program (slice of N, HEADS of one group, batch).

    x: [B, S, GROUPS x GROUP_HEADS, P]; b: [B, S, GROUPS, N]; dt, decay (the sums a): fp32 [B, heads, chunks, CHUNK];
    seq_idx: int32 [B, S] or unused; states: [B, chunks, heads, P, N]. WIDTH: a power of two, at least P.
    """
    ALL: tl.constexpr = GROUPS * GROUP_HEADS
    head, batch = tl.program_id(1) * HEADS, tl.program_id(2).to(tl.int64)
    k, p = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    n = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    x += batch * x_batch + head * P
    b += batch * b_batch + head // GROUP_HEADS * N
    sums = (batch * ALL + head) * chunks * CHUNK
    dt, decay = dt + sums, decay + sums
    states += (batch * chunks * ALL + head) * (P * N)
    state_at = p[:, None] * N + n[None, :]
    inside = (p < P)[:, None] & (n < N)[None, :]
    if MASKED:
        seq_idx += batch * length
        own, last, before = _documents(seq_idx, 0, k, length, CHUNK)
    state, own_x, a, total, step = (), (), (), (), ()
    for h in tl.static_range(HEADS):
        state = state + (tl.zeros((WIDTH, SLICE), tl.float32),)
        tl.store(states + h * P * N + state_at, state[h].to(states.dtype.element_ty), inside)
        at = h * chunks * CHUNK
        a = a + (tl.load(decay + at + k),)
        total = total + (tl.load(decay + at + CHUNK - 1),)
        step = step + (tl.load(dt + at + k),)
        own_x = own_x + (load_tile(x + h * P, x_row, k, p, tl.minimum(length, CHUNK), P),)
    # Without the hoisting of all addresses, which takes the registers of the tiles.
    for chunk in tl.range(chunks - 1, disable_licm=True):  # they are whole: no state is made of the last
        b_k = load_tile(b, b_row, k, n, CHUNK, N)
        states += ALL * P * N
        rows = tl.minimum(length - (chunk + 1) * CHUNK, CHUNK)
        x += CHUNK * x_row
        new, next_x, next_a, next_total, next_step = (), (), (), (), ()
        if MASKED:
            next_own, next_last, next_before = _documents(seq_idx, chunk + 1, k, length, CHUNK)
        for h in tl.static_range(HEADS):
            next_at = (h * chunks + chunk + 1) * CHUNK
            next_a = next_a + (tl.load(decay + next_at + k),)
            next_total = next_total + (tl.load(decay + next_at + CHUNK - 1),)
            next_step = next_step + (tl.load(dt + next_at + k),)
            weight = tl.exp2((total[h] - a[h]) * LOG2E) * step[h]
            fade = tl.exp2(total[h] * LOG2E)
            if MASKED:
                weight = tl.where(own == last, weight, 0.0)
                fade = tl.where(last == before, fade, 0.0)
            fed = (own_x[h].to(tl.float32) * weight[:, None]).to(b_k.dtype)
            next_x = next_x + (load_tile(x + h * P, x_row, k, p, rows, P),)
            value = tl.dot(tl.trans(fed), b_k, state[h] * fade)
            tl.store(states + h * P * N + state_at, value.to(states.dtype.element_ty), inside)
            new = new + (value,)
        state, own_x, a, total, step = new, next_x, next_a, next_total, next_step
        b += CHUNK * b_row
        if MASKED:
            own, last, before = next_own, next_last, next_before


@triton.jit(do_not_specialize=["length", "chunks"])  # a single chunk would be a constant without .to
def scan_states_backward_kernel(
    c, dy, decay, states, seq_idx, dstates, dtotal, length, chunks, c_batch, c_row, dy_batch, dy_row,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr, SLICE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gradients of the states that chunks leave: program (slice of N, HEADS of one group, batch), the last chunk first.

    The state before a chunk is worth exp(a_last) x what the state after it is worth, and sum_i exp(a_i) dy_i C_i^T.
    c: [B, S, GROUPS, N]; dy: [B, S, heads, P]; decay: fp32 [B, heads, chunks, CHUNK]; states, those that chunks begin
    with, and dstates: [B, chunks, heads, P, N]; seq_idx: int32 [B, S] or unused; dtotal: fp32 [slices, B, heads, chunks],
    the gradient of a_last through exp(a_last) above, a term of each slice. WIDTH: a power of two, at least P.
    """
    ALL: tl.constexpr = GROUPS * GROUP_HEADS
    head, batch = tl.program_id(1) * HEADS, tl.program_id(2).to(tl.int64)
    k, p = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    n = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    dy += batch * dy_batch + head * P
    c += batch * c_batch + head // GROUP_HEADS * N
    decay += (batch * ALL + head) * chunks * CHUNK
    dtotal += ((tl.program_id(0) * tl.num_programs(2) + batch) * ALL + head) * chunks
    end = chunks - 1
    dy += end.to(tl.int64) * CHUNK * dy_row
    c += end.to(tl.int64) * CHUNK * c_row
    states += ((batch * chunks + end) * ALL + head) * (P * N)
    dstates += ((batch * chunks + end) * ALL + head) * (P * N)
    state_at = p[:, None] * N + n[None, :]
    inside = (p < P)[:, None] & (n < N)[None, :]
    rows = length - end * CHUNK
    if MASKED:
        seq_idx += batch * length
        own, last, before = _documents(seq_idx, end, k, length, CHUNK)
    dstate, own_dy, a, fade = (), (), (), ()
    for h in tl.static_range(HEADS):
        dstate = dstate + (tl.zeros((WIDTH, SLICE), tl.float32),)
        tl.store(dstates + h * P * N + state_at, dstate[h].to(dstates.dtype.element_ty), inside)
        tl.store(dtotal + h * chunks + end, 0.0)
        at = (h * chunks + end) * CHUNK
        a = a + (tl.load(decay + at + k),)
        kept = tl.exp2(tl.load(decay + at + CHUNK - 1) * LOG2E)
        if MASKED:
            kept = tl.where(last == before, kept, 0.0)
        fade = fade + (kept,)
        own_dy = own_dy + (load_tile(dy + h * P, dy_row, k, p, rows, P),)
    for back in tl.range(chunks - 1, disable_licm=True):
        chunk = end - 1 - back  # the one that leaves the state whose gradient dy of the next one completes
        c_k = load_tile(c, c_row, k, n, rows, N)
        states, dstates = states - ALL * P * N, dstates - ALL * P * N
        dy -= CHUNK * dy_row
        new, next_dy, next_a, next_fade = (), (), (), ()
        if MASKED:
            next_own, next_last, next_before = _documents(seq_idx, chunk, k, length, CHUNK)
        for h in tl.static_range(HEADS):
            next_at = (h * chunks + chunk) * CHUNK
            next_a = next_a + (tl.load(decay + next_at + k),)
            next_total = tl.load(decay + next_at + CHUNK - 1)
            weight = tl.exp2(a[h] * LOG2E)
            if MASKED:
                weight = tl.where(own == before, weight, 0.0)
            read = (own_dy[h].to(tl.float32) * weight[:, None]).to(c_k.dtype)
            state = tl.load(states + h * P * N + state_at, inside, 0.0)  # on its way during the product
            next_dy = next_dy + (load_tile(dy + h * P, dy_row, k, p, CHUNK, P),)
            value = tl.dot(tl.trans(read), c_k, dstate[h] * fade[h])
            kept = tl.exp2(next_total * LOG2E)
            if MASKED:
                kept = tl.where(next_last == next_before, kept, 0.0)
            tl.store(dtotal + h * chunks + chunk, tl.sum(state.to(tl.float32) * value) * kept)
            tl.store(dstates + h * P * N + state_at, value.to(dstates.dtype.element_ty), inside)
            new, next_fade = new + (value,), next_fade + (kept,)
        dstate, own_dy, a, fade = new, next_dy, next_a, next_fade
        c, rows = c - CHUNK * c_row, CHUNK
        if MASKED:
            own, last, before = next_own, next_last, next_before
