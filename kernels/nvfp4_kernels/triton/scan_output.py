"""PyTorch tensors in and out of the kernel of the scan's output."""

from __future__ import annotations

import torch

from nvfp4_kernels.triton.shapes import document_ids, power, require_chunk

# Tokens of a program, its warps, and the stages of its loop over heads: the first that fits into the GPU's shared memory.
TILES = (128, 8, 3), (64, 4, 2), (64, 4, 1)
OTHER_BYTES = 16384  # at most, of a program's shared memory: dt and sums, and what the compiler needs to rearrange tiles


def chunk_outputs(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    d: torch.Tensor,
    seq_idx: torch.Tensor | None,
) -> torch.Tensor:
    """y_i = exp(a_i) C_i state^T + sum_{j <= i} (C_i B_j) exp(a_i - a_j) dt_j x_j + D x_i in every chunk.

    x: [B, S, heads, P], the last dimension contiguous and heads next to each other; b, c: [B, S, groups, N] likewise, all of
    one dtype; dt, decay: fp32 [B, heads, chunks, chunk], contiguous, decay the running sums a of dt A (A < 0) as
    `scan_decay.chunk_decay` gives them; states: [B, chunks, heads, P, N], contiguous, what a chunk begins with; d: fp32
    [heads]; seq_idx: int32 [B, S] or None: tokens don't see another document's, and a chunk's state is that of the document
    that the chunk before ended with.

    Returns y [B, S, heads, P], contiguous, in x's dtype. With bf16, the factors of x_j and the states are rounded to bf16;
    sums are fp32, in a fixed order. Raises ValueError for a chunk that is not 64 or 128 tokens.
    """
    from nvfp4_kernels.triton.scan_output_kernels import scan_output_kernel

    (batch, length, heads, p), (groups, n) = x.shape, b.shape[2:]
    chunks, chunk = dt.shape[2:]
    require_chunk(chunk)
    width = max(16, 1 << p.bit_length() - 1)  # of 80 channels 64, and 16 apart: 128 need too many registers
    rest, state = power(p - width) if p > width else 0, power(n)
    block, warps, stages = _tiles(chunk, width + rest, state, x)
    y = torch.empty(batch, length, heads, p, dtype=x.dtype, device=x.device)
    ids = document_ids(seq_idx)
    strides = [s for t in (x, b, c) for s in t.stride()[:2]]
    scan_output_kernel[(chunks * (chunk // block), groups, batch)](
        x, dt, decay, b, c, states, d, ids, y, length, chunks, *strides, CHUNK=chunk, BLOCK=block, HEADS=heads // groups,
        GROUPS=groups, P=p, WIDTH=width, REST=rest, N=n, STATE=state, MASKED=ids is not None, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return y


def _tiles(chunk: int, width: int, state: int, x: torch.Tensor) -> tuple[int, int, int]:
    """Of TILES the first inside a chunk whose C, states, x and y fit into a program's shared memory, else the last."""
    limit = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin if x.is_cuda else 2**30
    for tiles in TILES:
        block, _, stages = tiles
        elements = (block + stages * width) * state + ((stages - 1) * chunk + block) * width
        if block <= chunk and elements * x.element_size() + OTHER_BYTES <= limit:
            break
    return tiles
