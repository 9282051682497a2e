"""mamba-ssm's Triton kernels put together as its own scan does, but for two things in the backward pass.

It takes the states that forward kept, where the package computes them again, a sixth of its backward pass. Kept in bf16, as
the forward pass has them, they are B x chunks x heads x head_dim x state numbers a block; that rounds the terms of one sum
over head_dim x state products a chunk. And what stays inside chunks is one kernel of ours (`nvfp4_kernels.triton.scan`) in
place of three. Imports mamba-ssm: only `mamba_ssm_scan.load` imports this.
"""

from __future__ import annotations

import torch
from mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_bwd
from mamba_ssm.ops.triton.ssd_chunk_scan import (
    _chunk_scan_bwd_dC,
    _chunk_scan_bwd_dstates,
)
from mamba_ssm.ops.triton.ssd_chunk_state import (
    _chunk_cumsum_bwd,
    _chunk_state_bwd_db,
)
from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_fwd
from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_bwd
from nvfp4_kernels.triton.scan import inside_chunks_backward
from torch import Tensor

Kept = tuple[Tensor, Tensor, Tensor]


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None,
) -> tuple[Tensor, *Kept]:
    """`ssd.ssd_chunked`'s y in x's dtype, and for `backward`: dt and the sums of dt A, both fp32 [B, heads, chunks,
    chunk_size], and the states that chunks begin with, C's dtype [B, chunks, heads, head_dim, state]."""
    y, _, dt_chunks, decay, states, _ = _mamba_chunk_scan_combined_fwd(
        x, dt, A, B, C, chunk_size, D=D, seq_idx=seq_idx
    )
    return y, dt_chunks, decay, states


def backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_chunks: Tensor,
    decay: Tensor,
    states: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C and D."""
    groups = B.shape[2]
    dstates = _chunk_scan_bwd_dstates(C, decay, dy, seq_idx=seq_idx, dtype=torch.float32)
    dstates, ddecay_last, _, _ = _state_passing_bwd(
        states.flatten(-2), decay[..., -1], dstates.flatten(-2), seq_idx=seq_idx, has_initial_states=False,
        dstates_dtype=x.dtype, states_dtype=states.dtype, chunk_size=chunk_size,
    )  # fmt: skip
    dstates = dstates.view(states.shape)
    dx, ddt, ddecay, dscores, dD = inside_chunks_backward(x, dy, dt_chunks, decay, B, C, dstates, D, seq_idx)
    dB, ddecay_next = _chunk_state_bwd_db(x, dt_chunks, decay, dstates, seq_idx=seq_idx, B=B, ngroups=groups)
    dC, ddecay_before = _chunk_scan_bwd_dC(states, decay, dy, seq_idx=seq_idx, C=C, ngroups=groups)
    dB = _bmm_chunk_bwd(C, dscores.transpose(-1, -2), residual=dB, out=torch.empty_like(B))
    dC = _bmm_chunk_bwd(B, dscores, residual=dC, out=torch.empty_like(C))
    ddecay += ddecay_before
    # The last sum of a chunk decays its whole state. Each sum has all dt A up to its token: their gradients sum from behind.
    ddecay[..., -1] += ddecay_last
    ddecay = ddecay.flip(-1).cumsum(-1).flip(-1) + ddecay_next
    ddt, dA, _ = _chunk_cumsum_bwd(ddecay, ddt, dt, A, ddt=torch.empty_like(dt))
    return dx, ddt, dA, dB, dC, dD
