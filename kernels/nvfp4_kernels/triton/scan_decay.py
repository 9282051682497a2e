"""PyTorch tensors in and out of the kernels of the scan's steps and decays."""

from __future__ import annotations

import torch

HEADS, WARPS = 16, 4  # heads of a program, 64 bytes of a token's dt, and its warps


def chunk_decay(dt: torch.Tensor, a: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """dt by chunks, and the running sums of dt A inside chunks: both fp32 [B, heads, chunks, chunk], contiguous.

    dt: fp32 [B, S, heads], strides free; a: fp32 [heads]; chunk: tokens, a power of two. Past S dt is 0, and the sums stay.
    """
    from nvfp4_kernels.triton.scan_decay_kernels import scan_decay_kernel

    batch, length, heads = dt.shape
    chunks = -(-length // chunk)
    shape = batch, heads, chunks, chunk
    steps, decay = (torch.empty(shape, dtype=torch.float32, device=dt.device) for _ in range(2))
    scan_decay_kernel[(chunks, -(-heads // HEADS), batch)](
        dt, a, steps, decay, length, heads, chunks, *dt.stride(), CHUNK=chunk, HEADS=HEADS, num_warps=WARPS
    )
    return steps, decay


def chunk_decay_backward(
    dt: torch.Tensor,
    a: torch.Tensor,
    dsteps: torch.Tensor,
    ddecay: torch.Tensor,
    before: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of dt, fp32 [B, S, heads], contiguous, and of A, fp32 [heads], of `chunk_decay`. Sums in a fixed order.

    dt, a: as there; dsteps: the gradient of dt by chunks, ddecay that of its running sums, both contiguous. To ddecay are
    added `before` (as ddecay) and `last` [B, heads, chunks], of a chunk's last sum: shares that others computed. `after` (as
    ddecay) is the gradient of what a chunk's last sum is more than each. All fp32 and contiguous.
    """
    from nvfp4_kernels.triton.scan_decay_kernels import scan_decay_backward_kernel

    batch, length, heads = dt.shape
    chunks, chunk = ddecay.shape[2:]
    ddt = torch.empty(dt.shape, dtype=torch.float32, device=dt.device)
    da = torch.empty(batch, chunks, heads, dtype=torch.float32, device=dt.device)
    scan_decay_backward_kernel[(chunks, -(-heads // HEADS), batch)](
        dt, a, dsteps, ddecay, before, last, after, ddt, da, length, heads, chunks, *dt.stride(), CHUNK=chunk, HEADS=HEADS,
        num_warps=WARPS,
    )  # fmt: skip
    return ddt, da.sum((0, 1))
