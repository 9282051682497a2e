"""PyTorch tensors in and out of the scan's backward kernel."""

from __future__ import annotations

import torch

from nvfp4_kernels.triton.shapes import document_ids, power, require_chunk

BLOCK, TILE = 64, 64  # tokens of a program, and readers of them at a time
PART = 64  # channels of a head at a time: a head of 80 is 64 and 16, not padded to 128
WARPS, STAGES = 4, 1  # a strip is a warp's tokens


def inside_chunks_backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dstates: torch.Tensor,
    d: torch.Tensor,
    seq_idx: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of Mamba-2's scan that need no other chunk.

    x, dy: [B, S, heads, P], the last dimension contiguous and heads next to each other; b, c: [B, S, groups, N] likewise;
    dt, decay: fp32 [B, heads, chunks, chunk], contiguous, decay the running sums of dt A; dstates: [B, chunks, heads, P, N],
    contiguous, the gradient of the state that a chunk leaves; d: fp32 [heads]; seq_idx: int32 [B, S] or None.

    Returns dx (with the skip d and the state's share, x's dtype); ddt fp32 as dt, without decay's share; ddecay fp32 as
    decay, of the products inside chunks; dscores [B, chunks, groups, chunk (j), chunk (i)], the gradient of C_i B_j, in x's
    dtype, as the products with B and C need it; dd fp32 [heads]. Sums in a fixed order. Raises ValueError for a chunk that
    is not 64 or 128 tokens.
    """
    from nvfp4_kernels.triton.scan_inside_kernels import scan_inside_kernel

    (batch, length, heads, p), (groups, n) = x.shape, b.shape[2:]
    chunks, chunk = dt.shape[2:]
    require_chunk(chunk)
    blocks, last, state = chunk // BLOCK, power(p - (p - 1) // PART * PART), power(n)
    ids = document_ids(seq_idx)
    dx, ddt = torch.empty(batch, length, heads, p, dtype=x.dtype, device=x.device), torch.empty_like(dt)
    ddecay = torch.empty(blocks * WARPS + 1, *decay.shape, dtype=torch.float32, device=x.device)
    dscores = torch.empty(batch, chunks, groups, chunk, chunk, dtype=x.dtype, device=b.device)
    dd = torch.empty(blocks, batch, chunks, heads, dtype=torch.float32, device=x.device)
    strides = [t.stride(d) for d in (0, 1) for t in (x, dy, b, c, dx)]
    scan_inside_kernel[(chunks * blocks, groups, batch)](
        x, dy, dt, decay, b, c, dstates, d, ids, dx, ddt, ddecay, dscores, dd, length, chunks, *strides,
        CHUNK=chunk, BLOCK=BLOCK, TILE=TILE, STRIPS=WARPS, HEADS=heads // groups, GROUPS=groups, P=p, PART=PART,
        LAST=last, N=n, STATE=state, MASKED=ids is not None,
        WHOLE=length % chunk == 0 and (p - last) % PART == 0 and n == state, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return dx, ddt, ddecay.sum(0), dscores, dd.sum((0, 1, 2))
