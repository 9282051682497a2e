"""Mamba-2's selective scan (arXiv 2405.21060) by chunks, forward and backward, of its kernels.

Chunks are independent but for the state that each begins with. forward: steps and decays by chunks, the states (which walk
through a sequence's chunks), every chunk's output. backward the other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_kernels.triton.scan_bc import bc_gradients
from nvfp4_kernels.triton.scan_decay import chunk_decay, chunk_decay_backward
from nvfp4_kernels.triton.scan_inside import inside_chunks_backward
from nvfp4_kernels.triton.scan_output import chunk_outputs
from nvfp4_kernels.triton.scan_states import chunk_states, chunk_states_backward

LARGEST = 128  # head_dim and state
TRIED = (
    16  # chunks: Triton compiles integers that 16 divides, and 1, for themselves, and a run's are mostly such
)


def unfit(heads: int, head_dim: int, groups: int, state: int, chunk: int, device: torch.device) -> str | None:
    """Why the kernels can't run on this GPU with such sizes, or None: tried on zeros."""
    from triton.runtime.errors import OutOfResources

    for name, size in (("head_dim", head_dim), ("state", state)):
        if size > LARGEST:
            return f"the scan's {name}={size} is more than {LARGEST}"
    length = TRIED * chunk
    x = torch.zeros(1, length, heads, head_dim, dtype=torch.bfloat16, device=device)
    b = torch.zeros(1, length, groups, state, dtype=torch.bfloat16, device=device)
    dt, d = torch.zeros(1, length, heads, device=device), torch.zeros(heads, device=device)
    try:
        y, *kept = forward(x, dt, d, b, b, d, chunk, None)
        backward(y, x, dt, d, b, b, d, *kept, None)
    except OutOfResources as error:
        return f"the scan's kernels don't fit into this GPU ({error})"
    return None


def forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [B, S, heads, P] in x's dtype, and what `backward` takes: dt and the running sums of dt A, fp32 [B, heads, chunks,
    chunk], and the states that chunks begin with, b's dtype [B, chunks, heads, P, N].

    x: [B, S, heads, P]; dt: fp32 [B, S, heads], after softplus; a: fp32 [heads], negative; b, c: [B, S, groups, N] in x's
    dtype, all with a contiguous last dimension and heads or groups next to each other; d: fp32 [heads]; chunk: one of
    `shapes.CHUNKS`; seq_idx: int32 [B, S], in every row non-decreasing, one number a document, or None.
    """
    steps, decay = chunk_decay(dt, a, chunk)
    states = chunk_states(x, b, steps, decay, seq_idx)
    return chunk_outputs(x, steps, decay, b, c, states, d, seq_idx), steps, decay, states


def backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    steps: Tensor,
    decay: Tensor,
    states: Tensor,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c and d of `forward`, in their dtypes and contiguous, the same bits every time."""
    dstates, last = chunk_states_backward(c, dy, decay, states, seq_idx)
    dx, dsteps, ddecay, dscores, dd = inside_chunks_backward(x, dy, steps, decay, b, c, dstates, d, seq_idx)
    db, dc, after, before = bc_gradients(x, dy, steps, decay, b, c, states, dstates, dscores, seq_idx)
    ddt, da = chunk_decay_backward(dt, a, dsteps, ddecay, before, last, after)
    return dx, ddt, da, db, dc, dd
