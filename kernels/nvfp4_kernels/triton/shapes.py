"""What several kernels' callers do with their arguments."""

from __future__ import annotations

import torch

CHUNKS = (
    64,
    128,
)  # tokens of a chunk of the scan: of longer ones a program's tiles would not stay in registers


def require_chunk(chunk: int) -> None:
    """Raise ValueError unless the scan's kernels take chunks of so many tokens."""
    if chunk not in CHUNKS:
        raise ValueError(f"the scan's kernels take chunks of {CHUNKS[0]} or {CHUNKS[1]} tokens, not {chunk}")


def document_ids(seq_idx: torch.Tensor | None) -> torch.Tensor | None:
    """Document numbers as the kernels read them: int32, contiguous."""
    return None if seq_idx is None else seq_idx.to(torch.int32).contiguous()


def power(n: int) -> int:
    """The least power of two that holds n, at least 16: the size of a tile."""
    return max(16, 1 << (n - 1).bit_length())
