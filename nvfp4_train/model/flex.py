"""Attention on GPUs by FlexAttention (arXiv 2412.05496): PyTorch's Triton kernel for masks made of blocks.

Its backward pass has the same bits every time: one program sums each block of dq, and one each block of dk and dv over
the query heads that share it, in a fixed order and without atomic additions. cuDNN's and FlashAttention's, measured on an
H200 with PyTorch 2.11, are different from call to call. `fastest` takes those where no documents are masked.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nvfp4_train.model.attention import attend

BLOCK = 128  # queries and keys a block of the mask
SMALLEST_HEAD = 16  # of the kernel's head dimension
# Not the kernel for decoding, and not FlashAttention 4's, which PyTorch would prefer where they fit.
OPTIONS = {"BACKEND": "TRITON"}
PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_compiled = torch.compile(flex_attention, fullgraph=True)


def unfit(head_dim: int) -> str | None:
    """Why the kernel can't run, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if head_dim < SMALLEST_HEAD:
        return f"model.head_dim={head_dim} is less than FlexAttention's {SMALLEST_HEAD}"
    return None


def repeatable(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """q [B, heads, S, D], k and v [B, kv_heads, S, D], mask as from `block_mask` -> [B, heads, S, D]."""
    options = {"block_mask": mask, "enable_gqa": q.shape[1] != k.shape[1], "kernel_options": OPTIONS}
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    # Outside of compiled code, even under "force_eager": PyTorch's eager form holds all scores at once.
    with torch.compiler.set_stance("default"):
        return _compiled(q, k, v, **options)


def fastest(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
    """`repeatable` with documents' mask; without one, causal attention by the first of PRIORITY that can."""
    if mask is not None:
        return repeatable(q, k, v, mask)
    with sdpa_kernel(PRIORITY, set_priority=True):
        return attend(q, k, v, None)


def products(q: Tensor, k: Tensor, v: Tensor, seq_idx: Tensor | None) -> Tensor:
    """`attention.attend` in matrix products, which repeat their bits and keep all scores."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(q, k, v, seq_idx)


def block_mask(seq_idx: Tensor | None, tokens: Tensor) -> BlockMask:
    """What tokens [B, S] see: themselves and those before, with seq_idx (integer [B, S], non-decreasing) in their document.

    Made of the first and the last document of each block: no mask of [S, S] is held, and the host waits for nothing.
    """
    if seq_idx is None:
        return _causal(tokens.shape[1], tokens.device)

    def visible(b, h, q, k):
        return (q >= k) & (seq_idx[b, q] == seq_idx[b, k])

    return _of_blocks(seq_idx, visible)


def documents_mask(seq_idx: Tensor | None, tokens: Tensor) -> BlockMask | None:
    """`block_mask` for `fastest`: None without documents."""
    return None if seq_idx is None else block_mask(seq_idx, tokens)


@lru_cache(maxsize=16)
def _causal(length: int, device: torch.device) -> BlockMask:
    one_document = torch.zeros(1, length, dtype=torch.int32, device=device)
    return _of_blocks(one_document, lambda b, h, q, k: q >= k)


def _of_blocks(seq_idx: Tensor, visible: Callable[..., Tensor]) -> BlockMask:
    length = seq_idx.shape[1]
    first = seq_idx[:, ::BLOCK]
    n = first.shape[1]
    last = torch.cat((seq_idx[:, BLOCK - 1 :: BLOCK][:, : n - 1], seq_idx[:, -1:]), dim=1)
    before = torch.ones(n, n, dtype=torch.bool, device=seq_idx.device).tril(-1)
    seen = before & (first[:, :, None] == last[:, None, :])
    full = before & (last[:, :, None] == first[:, None, :])
    if length % BLOCK:
        full[:, -1] = False  # a ragged block needs the mask's function
    partial = (seen & ~full) | torch.eye(n, dtype=torch.bool, device=seq_idx.device)
    return BlockMask.from_kv_blocks(*_ordered(partial), *_ordered(full), BLOCK, visible, (length, length))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, n, n] -> how many blocks of keys each block of queries has [B, 1, n], and which, these first [B, 1, n, n]."""
    numbers = blocks[:, None].to(torch.int32)
    order = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), order.to(torch.int32)
