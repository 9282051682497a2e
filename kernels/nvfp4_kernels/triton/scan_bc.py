"""PyTorch tensors in and out of the kernel of the scan's gradients of B and C."""

from __future__ import annotations

import torch

from nvfp4_kernels.triton.shapes import document_ids, power

TOKENS = 64  # of a program
TILE = 64  # tokens of the other (C for B) that scores are multiplied by at a time
PART = 64  # channels of a head at a time: a head of 80 is 64 and 16, not padded to 128
WARPS, STAGES = 4, 3


def bc_gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    dstates: torch.Tensor,
    dscores: torch.Tensor,
    seq_idx: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of B and C, and the decay's through states.

    Tensors as of `scan_inside.inside_chunks_backward`, dscores as it returns them; states: like dstates, those that chunks
    begin with. Returns dB and dC in B's dtype, contiguous [B, S, groups, N]; and, fp32 as decay, the gradients of
    a_last - a_j (after) and of a_i (before) in the factors of each token. Sums in a fixed order. Raises ValueError for
    chunks that are no multiple of 64 tokens.
    """
    from nvfp4_kernels.triton.scan_bc_kernels import scan_bc_kernel

    (batch, length, heads, p), (groups, n) = x.shape, b.shape[2:]
    chunks, chunk = dt.shape[2:]
    if chunk % TOKENS:
        raise ValueError(
            f"the kernel of B's and C's gradients takes chunks of multiples of {TOKENS} tokens, not {chunk}"
        )
    ids = document_ids(seq_idx)
    constants = {
        "CHUNK": chunk, "TOKENS": TOKENS, "TILE": TILE, "HEADS": heads // groups, "GROUPS": groups, "P": p, "PART": PART,
        "LAST": power(p - (p - 1) // PART * PART), "N": n, "STATE": power(n), "MASKED": ids is not None, "num_warps": WARPS,
        "num_stages": STAGES,
    }  # fmt: skip

    def gradient(rows, states, own, other, of_b):
        out = torch.empty(batch, length, groups, n, dtype=own.dtype, device=own.device)
        shares = torch.empty_like(decay)
        strides = [s for t in (rows, own, other, out) for s in t.stride()[:2]]
        scan_bc_kernel[(chunks * (chunk // TOKENS), groups, batch)](
            rows, states, dt, decay, own, other, dscores, ids, out, shares, length, chunks, *strides, OF_B=of_b, **constants
        )  # fmt: skip
        return out, shares

    db, after = gradient(x, dstates, b, c, True)
    dc, before = gradient(dy, states, c, b, False)
    return db, dc, after, before
