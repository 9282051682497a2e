"""What Mamba-2's scan puts out, in one pass over x and the states that chunks begin with.

With S = C B^T of a group of heads and a the running sums of dt A in a chunk (Dao and Gu, arXiv 2405.21060, section 6):
y_i = exp(a_i) C_i state^T + sum_{j <= i} S_ij exp(a_i - a_j) dt_j x_j + D x_i. A program owns BLOCK tokens i of a chunk,
computes S once and goes through its heads, the next one's x and state under way while it computes. Of tokens j before
the block the decay is a product, exp(a_i - a_0) exp(a_0 - a_j) with a_0 the sum before the block: exponentials of rows
and columns instead of every pair. Sums fall (A < 0), so that neither factor is above 1.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.scan_tiles import LOG2E, load_tile


@triton.jit
def output_rows(
    x, dt, decay, b, c, states, d, seq_idx, y, start, rows, step, x_row, b_row, c_row, y_row,
    I: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    N: tl.constexpr, STATE: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Block I of a chunk that begins at token `start`, `rows` tokens before the end; pointers are to this chunk."""
    PIECES: tl.constexpr = 1 if REST == 0 else 2
    i, n = I * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE)
    c_i = load_tile(c, c_row, i, n, rows, N)
    if MASKED:
        document = tl.load(seq_idx + i, i < rows, -1)
    scores = ()
    for k in tl.static_range(I + 1):
        j = k * BLOCK + tl.arange(0, BLOCK)
        score = tl.dot(c_i, tl.trans(load_tile(b, b_row, j, n, rows, N)))
        if k == I:
            score = tl.where(i[:, None] >= j[None, :], score, 0.0)
        if MASKED:
            same = document[:, None] == tl.load(seq_idx + j, j < rows, -1)[None, :]
            score = tl.where(same, score, 0.0)
        scores = scores + (score,)
    if MASKED:  # only the document that the chunk before ended with has a state
        before = tl.load(seq_idx - tl.minimum(start, 1))
        c_i = tl.where((document == before)[:, None], c_i, 0.0).to(c_i.dtype)
    for head in tl.range(HEADS, num_stages=STAGES):
        dt_h, decay_h, x_h = dt + head * step, decay + head * step, x + head * P
        a_i = tl.load(decay_h + i) * LOG2E
        since = a_i
        if I > 0:
            a_0 = tl.load(decay_h + I * BLOCK - 1) * LOG2E
            since = a_i - a_0
        totals = ()
        for q in tl.static_range(PIECES):
            p = WIDTH + tl.arange(0, REST) if q else tl.arange(0, WIDTH)
            total = tl.dot(c_i, tl.trans(load_tile(states + head * (P * N), N, p, n, P, N)))
            if I > 0:
                total *= tl.exp2(a_0)
            else:
                total *= tl.exp2(since)[:, None]
            totals = totals + (total,)
        for k in tl.static_range(I + 1):
            j = k * BLOCK + tl.arange(0, BLOCK)
            a_j = tl.load(decay_h + j) * LOG2E
            dt_j = tl.load(dt_h + j)
            if k < I:
                weight = scores[k] * (tl.exp2(a_0 - a_j) * dt_j)[None, :]
            else:  # what the minimum changes are pairs j > i, which have no score
                weight = scores[k] * tl.exp2(tl.minimum(a_i[:, None] - a_j[None, :], 0.0)) * dt_j[None, :]
            moved = ()
            for q in tl.static_range(PIECES):
                p = WIDTH + tl.arange(0, REST) if q else tl.arange(0, WIDTH)
                x_j = load_tile(x_h, x_row, j, p, rows, P)
                total = tl.dot(weight.to(x_j.dtype), x_j, totals[q])
                if k == I - 1:
                    total *= tl.exp2(since)[:, None]
                if k == I:
                    total += tl.load(d + head) * x_j.to(tl.float32)
                    mask = (i < rows)[:, None] & (p < P)[None, :]
                    at = y + head * P + i.to(tl.int64)[:, None] * y_row + p[None, :]
                    tl.store(at, total.to(y.dtype.element_ty), mask)
                moved = moved + (total,)
            totals = moved


@triton.jit
def scan_output_kernel(
    x, dt, decay, b, c, states, d, seq_idx, y, length, chunks, x_batch, x_row, b_batch, b_row, c_batch, c_row,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, STATE: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block, group, batch): BLOCK tokens, HEADS heads.

    x, y: [B, S, GROUPS x HEADS, P], y contiguous; b, c: [B, S, GROUPS, N]; dt, decay (the sums a): fp32 [B, heads, chunks,
    CHUNK]; states: [B, chunks, heads, P, N], those that chunks begin with; d: fp32 [heads]; seq_idx: int32 [B, S] or unused.
    WIDTH + REST, at least P, and STATE, at least N: powers of two, and REST may be 0.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    ALL: tl.constexpr = GROUPS * HEADS
    chunk, group, batch = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * CHUNK
    first, token = group * HEADS, batch * length + start
    x += batch * x_batch + start.to(tl.int64) * x_row + first * P
    b += batch * b_batch + start.to(tl.int64) * b_row + group * N
    c += batch * c_batch + start.to(tl.int64) * c_row + group * N
    sums = ((batch * ALL + first) * chunks + chunk) * CHUNK
    states += ((batch * chunks + chunk) * ALL + first) * (P * N)
    if MASKED:
        seq_idx += token
    for block in tl.static_range(BLOCKS):
        if tl.program_id(0) % BLOCKS == block:
            output_rows(
                x, dt + sums, decay + sums, b, c, states, d + first, seq_idx, y + (token * ALL + first) * P, start,
                length - start, chunks * CHUNK, x_row, b_row, c_row, ALL * P, block, BLOCK, HEADS, P, WIDTH, REST, N, STATE,
                MASKED, STAGES,
            )  # fmt: skip
