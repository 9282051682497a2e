"""PyTorch tensors in and out of the scan's backward kernel."""

from __future__ import annotations

import torch

from nvfp4_kernels.triton.conv import document_ids

BLOCK, READERS = 64, 64  # tokens of a program, and readers of them at a time
LARGEST_CHUNK = 128  # of longer ones a program's tiles would not stay in registers
WARPS, STAGES = 4, 1  # with the tiles, the fastest of twelve on an H200: docs/results/training_h200.md


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
    decay, of the products inside chunks; dscores [B, chunks, groups, chunk (j), chunk (i)], the gradient of C_i B_j, in b's
    dtype, as the products with B and C need it; dd fp32 [heads]. Sums in a fixed order. Raises ValueError for a chunk that
    is not 64 or 128 tokens.
    """
    from nvfp4_kernels.triton.scan_kernels import inside_chunk_kernel

    (batch, length, heads, p), (groups, n) = x.shape, b.shape[2:]
    chunks, chunk = dt.shape[2:]
    if chunk % BLOCK or chunk > LARGEST_CHUNK:
        raise ValueError(f"the scan's kernel takes chunks of {BLOCK} or {LARGEST_CHUNK} tokens, not {chunk}")
    blocks = chunk // BLOCK
    fp32 = {"dtype": torch.float32, "device": x.device}
    dx, ddt = torch.empty(batch, length, heads, p, dtype=x.dtype, device=x.device), torch.empty_like(dt)
    readers, read = torch.zeros(blocks, *decay.shape, **fp32), torch.empty_like(decay)
    dscores = torch.zeros(batch, chunks, groups, chunk, chunk, dtype=b.dtype, device=b.device)
    dd = torch.empty(blocks, batch, chunks, heads, **fp32)
    ids = document_ids(seq_idx)
    strides = [s for t in (x, dy, b, c, dx) for s in t.stride()[:2]]
    for block in range(blocks):
        inside_chunk_kernel[(chunks, groups, batch)](
            x, dy, dt, decay, b, c, dstates, d, ids, dx, ddt, readers, read, dscores, dd, length, chunks, *strides,
            J=block, CHUNK=chunk, BLOCK=BLOCK, READERS=READERS, HEADS=heads // groups, GROUPS=groups, P=p, WIDTH=_power(p),
            N=n, STATE=_power(n), MASKED=ids is not None, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return dx, ddt, readers.sum(0) - read, dscores, dd.sum((0, 1, 2))


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())
