"""The gradients of B and C in Mamba-2's scan, and what the decay of the states they meet is worth.

Of a group of heads h, with a the running sums of dt A in a chunk, dS what the state after the chunk is worth, S the state
before it and G what the score C_i B_j is worth (Dao and Gu, arXiv 2405.21060, section 6):
    dB_j = sum_h dt_j exp(a_last - a_j) x_j dS + sum_i G_ji C_i,    dC_i = sum_h exp(a_i) dy_i S + sum_j G_ji B_j
Both are one kernel: rows (x or dy) by their factors, times states, and scores by the other's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.scan_tiles import LOG2E, load_tile


@triton.jit
def scan_bc_kernel(
    rows, states, dt, decay, own, other, dscores, seq_idx, out, shares,
    length, chunks, rows_batch, rows_row, own_batch, own_row, other_batch, other_row, out_batch, out_row,
    OF_B: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, P: tl.constexpr, PART: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Program (TOKENS of a chunk, group, batch); TILE of the other's tokens at a time.

    OF_B: rows is x, states what the states after chunks are worth, own B, other C, out dB; else dy, the states before
    chunks, C, B, dC. rows: [B, S, GROUPS x HEADS, P]; own, other, out: [B, S, GROUPS, N]; states: [B, chunks, heads, P,
    N]; dt, decay (the sums a), shares (own token times its head's part of out, by states alone): fp32 [B, heads, chunks,
    CHUNK]; dscores: [B, chunks, GROUPS, CHUNK (j), CHUNK (i)]; seq_idx: int32 [B, S] or unused. Heads go in parts of
    PART channels, the last one of LAST (a power of two that holds what is left); STATE: a power of two, at least N.
    """
    BLOCKS: tl.constexpr = CHUNK // TOKENS
    ALL: tl.constexpr = GROUPS * HEADS
    chunk, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * CHUNK
    left = length - start
    t, n = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, STATE)
    rows += batch * rows_batch + start.to(tl.int64) * rows_row + group * (HEADS * P)
    own += batch * own_batch + start.to(tl.int64) * own_row + group * N
    other += batch * other_batch + start.to(tl.int64) * other_row + group * N
    out += batch * out_batch + start.to(tl.int64) * out_row + group * N
    dscores += ((batch * chunks + chunk) * GROUPS + group) * (CHUNK * CHUNK)
    sums = ((batch * ALL + group * HEADS) * chunks + chunk) * CHUNK
    dt, decay, shares = dt + sums, decay + sums, shares + sums
    states += ((batch * chunks + chunk) * ALL + group * HEADS) * (P * N)
    if MASKED:
        seq_idx += batch * length + start
        if OF_B:
            meets = tl.load(seq_idx + tl.minimum(left, CHUNK) - 1)
        else:  # nothing enters the first chunk: its states are zeros
            meets = tl.load(seq_idx + tl.where(chunk > 0, -1, 0))
        reached = tl.load(seq_idx + t, t < left, -1) == meets
    own_t = load_tile(own, own_row, t, n, left, N)
    total = tl.zeros((TOKENS, STATE), tl.float32)
    first = block * (TOKENS // TILE) if OF_B else 0
    end = CHUNK // TILE if OF_B else (block + 1) * (TOKENS // TILE)
    for tile in range(first, end):
        k = tile * TILE + tl.arange(0, TILE)
        if OF_B:
            score = tl.load(dscores + t[:, None] * CHUNK + k[None, :])
        else:
            score = tl.trans(tl.load(dscores + k[:, None] * CHUNK + t[None, :]))
        total = tl.dot(score, load_tile(other, other_row, k, n, left, N), total)
    for _ in range(HEADS):
        a = tl.load(decay + t)
        if OF_B:
            a = tl.load(decay + CHUNK - 1) - a
        if MASKED:
            a = tl.where(reached, a, float("-inf"))
        factor = tl.exp2(a * LOG2E)
        if OF_B:
            factor *= tl.load(dt + t)
        share = tl.zeros((TOKENS,), tl.float32)
        for part in tl.static_range(-(-P // PART)):
            p = part * PART + tl.arange(0, PART if P - part * PART > PART else LAST)
            row = load_tile(rows, rows_row, t, p, left, P)
            state = load_tile(states, N, p, n, P, N)
            scaled = row.to(tl.float32) * factor[:, None]
            share += tl.sum(tl.dot(own_t, tl.trans(state)) * scaled, 1)
            total = tl.dot(scaled.to(row.dtype), state, total)
        tl.store(shares + t, share)
        rows, states = rows + P, states + P * N
        step = chunks * CHUNK
        dt, decay, shares = dt + step, decay + step, shares + step
    mask = (t < left)[:, None] & (n < N)[None, :]
    tl.store(out + t.to(tl.int64)[:, None] * out_row + n[None, :], total.to(out.dtype.element_ty), mask)
