"""What the backward pass of Mamba-2's scan has to do inside chunks, in one pass over x and dy.

With S = C B^T of a group of heads, a the running sums of dt A in a chunk, L_ij = exp(a_i - a_j) for i >= j (Dao and Gu,
arXiv 2405.21060, section 6): y_i = sum_j S_ij L_ij dt_j x_j + what earlier chunks left. A program owns BLOCK tokens j of a
chunk and goes through a group's heads. Tiles are [j, i], as the products need them: j the token that is read, i the one
that reads.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(at, row_stride, row, column, rows, COLUMNS: tl.constexpr):
    """[row, column] of a matrix, zeros past `rows` and COLUMNS."""
    mask = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(at + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask, 0.0)


@triton.jit
def inside_chunk_kernel(
    x, dy, dt, decay, b, c, dstates, d, seq_idx, dx, ddt, readers, read, dscores, dd,
    length, chunks, x_batch, x_row, dy_batch, dy_row, b_batch, b_row, c_batch, c_row, dx_batch, dx_row,
    J: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, READERS: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens j in block J of every chunk: program (chunk, group, batch); READERS tokens i at a time.

    x, dy, dx: [B, S, GROUPS x HEADS, P]; b, c: [B, S, GROUPS, N]; dt, decay (the sums a), ddt: fp32 [B, heads, chunks,
    CHUNK]; dstates: [B, chunks, heads, P, N], what the state after a chunk is worth; d: fp32 [heads]; seq_idx: int32 [B, S]
    or unused. The gradient of a is readers - read: read as decay, readers fp32 [CHUNK / BLOCK, B, heads, chunks, CHUNK], of
    which row J is not written before i = J x BLOCK; dscores: [B, chunks, GROUPS, CHUNK (j), CHUNK (i)], that of S,
    likewise; dd: fp32 [CHUNK / BLOCK, B, chunks, heads]. WIDTH, STATE: powers of two, at least P and N.
    """
    chunk, group, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    TILES: tl.constexpr = (CHUNK - J * BLOCK) // READERS
    OWN: tl.constexpr = BLOCK // READERS
    ALL: tl.constexpr = GROUPS * HEADS
    start = chunk * CHUNK
    rows = length - start
    j, p, n = J * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH), tl.arange(0, STATE)
    b += batch * b_batch + start.to(tl.int64) * b_row + group * N
    c += batch * c_batch + start.to(tl.int64) * c_row + group * N
    b_j = load_tile(b, b_row, j, n, rows, N)
    if MASKED:
        seq_idx += batch * length + start
        document = tl.load(seq_idx + j, j < rows, -1)
        last = tl.load(seq_idx + tl.minimum(rows, CHUNK) - 1)
    dscore, readers_c = (), ()
    for k in tl.static_range(TILES):
        i = J * BLOCK + k * READERS + tl.arange(0, READERS)
        readers_c = readers_c + (tl.trans(load_tile(c, c_row, i, n, rows, N)),)
        dscore = dscore + (tl.zeros((BLOCK, READERS), tl.float32),)
    first = group * HEADS
    x += batch * x_batch + start.to(tl.int64) * x_row + first * P
    dy += batch * dy_batch + start.to(tl.int64) * dy_row + first * P
    dx += batch * dx_batch + start.to(tl.int64) * dx_row + first * P
    sums = ((batch * ALL + first) * chunks + chunk) * CHUNK
    dt, decay, ddt, read, d = dt + sums, decay + sums, ddt + sums, read + sums, d + first
    readers += J * tl.num_programs(2).to(tl.int64) * ALL * chunks * CHUNK + sums
    dstates += ((batch * chunks + chunk) * ALL + first) * (P * N)
    dd += ((J * tl.num_programs(2) + batch) * chunks + chunk) * ALL + first
    for _ in range(HEADS):
        x_j = load_tile(x, x_row, j, p, rows, P)
        dstate = load_tile(dstates, N, p, n, P, N)
        a_j = tl.load(decay + j) * LOG2E
        dt_j = tl.load(dt + j)
        left = tl.load(decay + CHUNK - 1) * LOG2E - a_j
        if MASKED:
            left = tl.where(document == last, left, float("-inf"))
        total = tl.dot(b_j, tl.trans(dstate)) * tl.exp2(left)[:, None]
        was_read = tl.zeros((BLOCK,), tl.float32)
        moved = ()
        for k in tl.static_range(TILES):
            i = J * BLOCK + k * READERS + tl.arange(0, READERS)
            dy_i = load_tile(dy, dy_row, i, p, rows, P)
            exponent = (tl.load(decay + i) * LOG2E)[None, :] - a_j[:, None]
            if k < OWN:
                exponent = tl.where(i[None, :] >= j[:, None], exponent, float("-inf"))
            if MASKED:
                same = tl.load(seq_idx + i, i < rows, -2)[None, :] == document[:, None]
                exponent = tl.where(same, exponent, float("-inf"))
            fade = tl.exp2(exponent)
            weight = tl.dot(b_j, readers_c[k]) * fade
            g = tl.dot(x_j, tl.trans(dy_i)) * dt_j[:, None]
            total += tl.dot(weight.to(x_j.dtype), dy_i)
            moved = moved + (dscore[k] + g * fade,)
            share = g * weight
            if k < OWN:
                share = tl.where(i[None, :] == j[:, None], 0.0, share)  # its two shares of a_j cancel
            was_read += tl.sum(share, 1)
            tl.store(readers + i, tl.sum(share, 0))
        dscore = moved
        tl.store(read + j, was_read)
        x_f = load_tile(x, x_row, j, p, rows, P).to(tl.float32)
        dy_f = load_tile(dy, dy_row, j, p, rows, P).to(tl.float32)
        tl.store(ddt + j, tl.sum(total * x_f, 1))
        tl.store(dd, tl.sum(x_f * dy_f))
        value = total * dt_j[:, None] + tl.load(d) * dy_f
        mask = (j < rows)[:, None] & (p < P)[None, :]
        tl.store(dx + j.to(tl.int64)[:, None] * dx_row + p[None, :], value.to(dx.dtype.element_ty), mask)
        x, dy, dx, dstates, d, dd = x + P, dy + P, dx + P, dstates + P * N, d + 1, dd + 1
        step = chunks * CHUNK
        dt, decay, ddt, readers, read = dt + step, decay + step, ddt + step, readers + step, read + step
    dscores += ((batch * chunks + chunk) * GROUPS + group) * (CHUNK * CHUNK)
    for k in tl.static_range(TILES):
        i = J * BLOCK + k * READERS + tl.arange(0, READERS)
        tl.store(dscores + j[:, None] * CHUNK + i[None, :], dscore[k].to(dscores.dtype.element_ty))
