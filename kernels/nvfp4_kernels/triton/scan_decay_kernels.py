"""Steps and decays of Mamba-2's scan, from how the model has them to how its chunks do, and back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan_decay_kernel(
    dt, a, steps, decay, length, heads, chunks, dt_batch, dt_row, dt_head, CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """steps and its running sums times A, fp32 [B, heads, chunks, CHUNK]: program (chunk, HEADS heads, batch).

    dt: fp32 [B, S, heads], taken as 0 past S; a: fp32 [heads].
    """
    chunk, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, t = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, CHUNK)
    here, token = (head < heads)[:, None], chunk * CHUNK + t
    at = dt + batch * dt_batch + token.to(tl.int64)[None, :] * dt_row + head[:, None] * dt_head
    step = tl.load(at, here & (token < length)[None, :], 0.0)
    out = ((batch * heads + head[:, None]) * chunks + chunk) * CHUNK + t[None, :]
    tl.store(steps + out, step, here)
    tl.store(decay + out, tl.cumsum(step * tl.load(a + head, head < heads, 0.0)[:, None], 1), here)


@triton.jit
def scan_decay_backward_kernel(
    dt, a, dsteps, ddecay, before, last, after, ddt, da, length, heads, chunks, dt_batch, dt_row, dt_head,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradients of dt and A from those of `scan_decay_kernel`'s results: program (chunk, HEADS heads, batch).

    Each running sum has all dt A up to its token, so that their gradients sum from behind: of ddecay, before (both as decay)
    and last [B, heads, chunks], at the chunk's last token. Those of the sums after tokens, `after`, as decay, sum from the
    front. Each of the three may be None. ddt: fp32 [B, S, heads], contiguous; da: fp32 [B, chunks, heads], A's by chunk.
    """
    chunk, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, t = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, CHUNK)
    here, token = (head < heads)[:, None], chunk * CHUNK + t
    row = (batch * heads + head) * chunks + chunk
    at = row[:, None] * CHUNK + t[None, :]
    grad = tl.load(ddecay + at, here, 0.0)
    if before is not None:
        grad += tl.load(before + at, here, 0.0)
    if last is not None:
        grad += tl.where((t == CHUNK - 1)[None, :], tl.load(last + row, head < heads, 0.0)[:, None], 0.0)
    grad = tl.cumsum(grad, 1, reverse=True)
    if after is not None:
        # Of the tokens before: shifted by one, since a sum less its last term would be rounded twice.
        grad += tl.cumsum(tl.load(after + at - 1, here & (t > 0)[None, :], 0.0), 1)
    there = here & (token < length)[None, :]
    read = dt + batch * dt_batch + token.to(tl.int64)[None, :] * dt_row + head[:, None] * dt_head
    by_chunk = tl.sum(grad * tl.load(read, there, 0.0), 1)
    tl.store(da + (batch * chunks + chunk) * heads + head, by_chunk, head < heads)
    grad = grad * tl.load(a + head, head < heads, 0.0)[:, None] + tl.load(dsteps + at, here, 0.0)
    tl.store(ddt + (batch * length + token[None, :]) * heads + head[:, None], grad, there)
