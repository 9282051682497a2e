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

from nvfp4_kernels.triton.scan_tiles import LOG2E, load_tile


@triton.jit
def scan_inside_kernel(
    x, dy, dt, decay, b, c, dstates, d, seq_idx, dx, ddt, ddecay, dscores, dd,
    length, chunks, x_batch, dy_batch, b_batch, c_batch, dx_batch,
    X_ROW: tl.constexpr, DY_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr, DX_ROW: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STRIPS: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, P: tl.constexpr, PART: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr, STATE: tl.constexpr,
    MASKED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK tokens j: program (block, group, batch); TILE tokens i at a time.

    x, dy, dx: [B, S, GROUPS x HEADS, P]; b, c: [B, S, GROUPS, N]; dt, decay (the sums a), ddt: fp32 [B, heads, chunks,
    CHUNK]; dstates: [B, chunks, heads, P, N], what the state after a chunk is worth; d: fp32 [heads]; seq_idx: int32 [B, S]
    or unused; ddecay: fp32 [CHUNK / BLOCK x STRIPS + 1, B, heads, chunks, CHUNK], whose sum is the gradient of a: what it is
    worth to readers, by blocks j and their strips, then, negative, to the read; dscores: [B, chunks, GROUPS, CHUNK (j),
    CHUNK (i)], the gradient of S, x's dtype; dd: fp32 [CHUNK / BLOCK, B, chunks, heads]. Heads go in parts of PART channels,
    the last one of LAST (a power of two that holds what is left); STATE: a power of two, at least N. WHOLE: no chunk is cut
    short, and parts and STATE are exact.
    """
    for J in tl.static_range(CHUNK // BLOCK):
        if tl.program_id(0) % (CHUNK // BLOCK) == J:
            _block(
                x, dy, dt, decay, b, c, dstates, d, seq_idx, dx, ddt, ddecay, dscores, dd,
                length, chunks, x_batch, dy_batch, b_batch, c_batch, dx_batch, X_ROW, DY_ROW, B_ROW, C_ROW, DX_ROW,
                J, CHUNK, BLOCK, TILE, STRIPS, HEADS, GROUPS, P, PART, LAST, N, STATE, MASKED, WHOLE,
            )  # fmt: skip


@triton.jit
def _block(
    x, dy, dt, decay, b, c, dstates, d, seq_idx, dx, ddt, ddecay, dscores, dd,
    length, chunks, x_batch, dy_batch, b_batch, c_batch, dx_batch,
    X_ROW: tl.constexpr, DY_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr, DX_ROW: tl.constexpr,
    J: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STRIPS: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, PART: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    ALL: tl.constexpr = GROUPS * HEADS
    PARTS: tl.constexpr = -(-P // PART)
    TILES: tl.constexpr = (CHUNK - J * BLOCK) // TILE
    chunk, group, batch = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    batches = tl.num_programs(2).to(tl.int64)
    start = chunk * CHUNK
    rows = length - start
    j, n, strip = J * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE), tl.arange(0, STRIPS)
    b += batch * b_batch + start.to(tl.int64) * B_ROW + group * N
    c += batch * c_batch + start.to(tl.int64) * C_ROW + group * N
    b_j = load_tile(b, B_ROW, j, n, rows, N, WHOLE)
    if MASKED:
        seq_idx += batch * length + start
        document = tl.load(seq_idx + j, j < rows, -1)
        stays = document == tl.load(seq_idx + tl.minimum(rows, CHUNK) - 1)
    dscore, c_i = (), ()
    for k in tl.static_range(TILES):
        reader = J * BLOCK + k * TILE + tl.arange(0, TILE)
        c_i = c_i + (tl.trans(load_tile(c, C_ROW, reader, n, rows, N, WHOLE)),)
        dscore = dscore + (tl.zeros((BLOCK, TILE), tl.float32),)
    first = group * HEADS
    x += batch * x_batch + start.to(tl.int64) * X_ROW + first * P
    dy += batch * dy_batch + start.to(tl.int64) * DY_ROW + first * P
    dx += batch * dx_batch + start.to(tl.int64) * DX_ROW + first * P
    sums, all_sums = ((batch * ALL + first) * chunks + chunk) * CHUNK, batches * ALL * chunks * CHUNK
    dt, decay, ddt, ddecay, d = dt + sums, decay + sums, ddt + sums, ddecay + sums, d + first
    by_strip = (J * STRIPS + strip)[:, None] * all_sums
    dstates += ((batch * chunks + chunk) * ALL + first) * (P * N)
    dd += ((J * batches + batch) * chunks + chunk) * ALL + first
    for _ in range(HEADS):
        x_j, dy_i, dstate, total = (), (), (), ()
        for part in tl.static_range(PARTS):  # all that this head needs is asked for at once
            p = part * PART + tl.arange(0, PART if P - part * PART > PART else LAST)
            x_j = x_j + (load_tile(x, X_ROW, j, p, rows, P, WHOLE),)
            for k in tl.static_range(TILES):
                i = J * BLOCK + k * TILE + tl.arange(0, TILE)
                dy_i = dy_i + (load_tile(dy, DY_ROW, i, p, rows, P, WHOLE),)
            dstate = dstate + (load_tile(dstates, N, p, n, P, N, WHOLE),)
            total = total + (tl.zeros((BLOCK, PART if P - part * PART > PART else LAST), tl.float32),)
        a_j = tl.load(decay + j) * LOG2E
        dt_j = tl.load(dt + j)
        left = tl.load(decay + CHUNK - 1) * LOG2E - a_j
        if MASKED:
            left = tl.where(stays, left, float("-inf"))
        read = tl.zeros((BLOCK,), tl.float32)
        moved = ()
        for k in tl.static_range(TILES):
            i = J * BLOCK + k * TILE + tl.arange(0, TILE)
            g = tl.zeros((BLOCK, TILE), tl.float32)
            for part in tl.static_range(PARTS):
                g = tl.dot(x_j[part], tl.trans(dy_i[part * TILES + k]), g)
            score = tl.dot(b_j, c_i[k])
            exponent = (tl.load(decay + i) * LOG2E)[None, :] - a_j[:, None]
            if k < BLOCK // TILE:
                exponent = tl.where(i[None, :] >= j[:, None], exponent, float("-inf"))
            if MASKED:
                same = tl.load(seq_idx + i, i < rows, -2)[None, :] == document[:, None]
                exponent = tl.where(same, exponent, float("-inf"))
            fade = tl.exp2(exponent)
            weight = score * fade
            g *= dt_j[:, None]
            moved = moved + (dscore[k] + g * fade,)
            share = g * weight
            if k < BLOCK // TILE:
                share = tl.where(i[None, :] == j[:, None], 0.0, share)  # its two shares of a_j cancel
            read += tl.sum(share, 1)
            # Not over strips, one a warp: Triton sums what warps have left one word at a time, behind branches.
            readers = tl.sum(tl.reshape(share, (STRIPS, BLOCK // STRIPS, TILE)), 1)
            tl.store(ddecay + by_strip + i[None, :], readers)
            added = ()
            for part in tl.static_range(PARTS):
                added = added + (tl.dot(weight.to(x.dtype.element_ty), dy_i[part * TILES + k], total[part]),)
            total = added
        dscore = moved
        for k in tl.static_range(J):
            before = k * BLOCK + tl.arange(0, BLOCK)
            tl.store(ddecay + by_strip + before[None, :], tl.zeros((STRIPS, BLOCK), tl.float32))
        tl.store(ddecay + BLOCKS * STRIPS * all_sums + j, -read)
        ddt_j, product, skip = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.load(d)
        for part in tl.static_range(PARTS):
            p = part * PART + tl.arange(0, PART if P - part * PART > PART else LAST)
            x_f = load_tile(x, X_ROW, j, p, rows, P, WHOLE).to(tl.float32)
            dy_f = load_tile(dy, DY_ROW, j, p, rows, P, WHOLE).to(tl.float32)
            whole = total[part] + tl.dot(b_j, tl.trans(dstate[part])) * tl.exp2(left)[:, None]
            ddt_j += tl.sum(whole * x_f, 1)
            product += tl.sum(x_f * dy_f, 1)
            value = (whole * dt_j[:, None] + skip * dy_f).to(dx.dtype.element_ty)
            at = dx + j[:, None] * DX_ROW + p[None, :]
            if WHOLE:
                tl.store(at, value)
            else:
                tl.store(at, value, (j < rows)[:, None] & (p < P)[None, :])
        tl.store(ddt + j, ddt_j)
        tl.store(dd, tl.sum(product))
        x, dy, dx, dstates, d, dd = x + P, dy + P, dx + P, dstates + P * N, d + 1, dd + 1
        step = chunks * CHUNK
        dt, decay, ddt, ddecay = dt + step, decay + step, ddt + step, ddecay + step
    dscores += ((batch * chunks + chunk) * GROUPS + group) * (CHUNK * CHUNK)
    dscores += j[:, None] * CHUNK
    for k in tl.static_range(TILES):
        reader = J * BLOCK + k * TILE + tl.arange(0, TILE)
        tl.store(dscores + reader[None, :], dscore[k].to(dx.dtype.element_ty))
    for k in tl.static_range(J):
        before = k * BLOCK + tl.arange(0, BLOCK)
        tl.store(dscores + before[None, :], tl.zeros((BLOCK, BLOCK), dx.dtype.element_ty))
