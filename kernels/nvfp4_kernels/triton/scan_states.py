"""PyTorch tensors in and out of the kernels that pass states through the chunks of Mamba-2's scan."""

from __future__ import annotations

import math

import torch

from nvfp4_kernels.triton.shapes import document_ids, power, require_chunk

# Of a program: heads, columns of their states, a warp's part of a head's state, a thread's most registers (None: as many
# as it likes; with 128, 16 warps share a multiprocessor) and stages of the loop over chunks.
FORWARD = {"heads": 1, "columns": 128, "numbers": 1024, "registers": 128, "stages": 3}
BACKWARD = {"heads": 1, "columns": 128, "numbers": 2048, "registers": None, "stages": 3}


def chunk_states(
    x: torch.Tensor, b: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, seq_idx: torch.Tensor | None
) -> torch.Tensor:
    """The state that each chunk begins with, [B, chunks, heads, P, N] in b's dtype, zeros for the first.

    x: [B, S, heads, P], the last dimension contiguous and heads next to each other; b: [B, S, groups, N] likewise; dt,
    decay: fp32 [B, heads, chunks, chunk], contiguous, decay the running sums of dt A; seq_idx: int32 [B, S], in every row
    non-decreasing, or None. x weighted by dt and decay is rounded to its dtype, then a sequence's states are fp32 sums,
    each rounded once. Raises ValueError for a chunk that is not 64 or 128 tokens.
    """
    from nvfp4_kernels.triton.scan_states_kernels import scan_states_kernel

    states = torch.empty(*_shape(x, b, decay), dtype=b.dtype, device=x.device)
    grid, constants = _layout(x, b, decay, seq_idx, FORWARD)
    scan_states_kernel[grid](
        x, b, dt, decay, document_ids(seq_idx), states, x.shape[1], decay.shape[2], *x.stride()[:2], *b.stride()[:2],
        **constants,
    )  # fmt: skip
    return states


def chunk_states_backward(
    c: torch.Tensor, dy: torch.Tensor, decay: torch.Tensor, states: torch.Tensor, seq_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the states that chunks leave are worth to later chunks, and the gradient of decay's last sums through them.

    c: [B, S, groups, N] and dy: [B, S, heads, P], as b and x of `chunk_states`; decay, seq_idx: as there; states: its
    result. Returns dstates [B, chunks, heads, P, N] in dy's dtype, zeros for the last chunk, and fp32 [B, heads, chunks],
    the gradient of decay[..., -1] that comes from scaling the state a chunk begins with, sums in a fixed order. Raises
    ValueError for a chunk that is not 64 or 128 tokens.
    """
    from nvfp4_kernels.triton.scan_states_kernels import scan_states_backward_kernel

    dstates = torch.empty(*_shape(dy, c, decay), dtype=dy.dtype, device=dy.device)
    grid, constants = _layout(dy, c, decay, seq_idx, BACKWARD)
    dtotal = torch.empty(grid[0], *decay.shape[:3], dtype=torch.float32, device=dy.device)
    scan_states_backward_kernel[grid](
        c, dy, decay, states, document_ids(seq_idx), dstates, dtotal, dy.shape[1], decay.shape[2], *c.stride()[:2],
        *dy.stride()[:2], **constants,
    )  # fmt: skip
    return dstates, dtotal[0] if grid[0] == 1 else dtotal.sum(0)


def _shape(x: torch.Tensor, b: torch.Tensor, decay: torch.Tensor) -> tuple[int, ...]:
    return x.shape[0], decay.shape[2], x.shape[2], x.shape[3], b.shape[3]


def _layout(
    x: torch.Tensor,
    b: torch.Tensor,
    decay: torch.Tensor,
    seq_idx: torch.Tensor | None,
    tile: dict[str, int | None],
) -> tuple[tuple[int, int, int], dict]:
    """Grid of either kernel, and its constants."""
    (batch, _, heads, p), (groups, n), chunk = x.shape, b.shape[2:], decay.shape[3]
    require_chunk(chunk)
    width = power(p)
    own = math.gcd(tile["heads"], heads // groups)
    part = min(power(n), tile["columns"])
    warps = max(1, width * part // tile["numbers"])
    constants = {
        "CHUNK": chunk, "HEADS": own, "GROUP_HEADS": heads // groups, "GROUPS": groups, "P": p, "WIDTH": width, "N": n,
        "SLICE": part, "MASKED": seq_idx is not None, "num_warps": warps, "num_stages": tile["stages"],
        "maxnreg": tile["registers"],
    }  # fmt: skip
    return (-(-n // part), heads // own, batch), constants
