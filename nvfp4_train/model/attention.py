"""Grouped-query attention without position embedding (the Mamba blocks carry the order of tokens)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.producers import Activation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# On a CPU sequences of at most so many tokens are attended to in blocks of queries: longer ones would keep too many weights.
BLOCKWISE_TOKENS, QUERY_BLOCK = 1024, 128


class Attention(nn.Module):
    """Causal attention, softmax scale head_dim^-0.5.

    q, k and v are one linear (one tensor scale when quantized): the rows of qkv_proj.weight are
    [num_attention_heads | num_key_value_heads | num_key_value_heads] x head_dim. Query head h reads key-value
    head h // (num_attention_heads / num_key_value_heads).
    """

    def __init__(self, cfg: ModelConfig, device: torch.device | str | None = None):
        super().__init__()
        self.heads = cfg.num_attention_heads
        self.kv_heads = cfg.num_key_value_heads
        self.head_dim = cfg.head_dim
        self.qkv_proj = Linear(
            cfg.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, device=device
        )
        self.o_proj = Linear(self.heads * self.head_dim, cfg.hidden_size, device=device)
        self.attend = attend  # or another: kernels.choose_kernels

    def forward(self, x: Tensor | Activation, mask: Tensor | BlockMask | None = None) -> Tensor:
        """x [B, S, hidden_size]; mask is what `attend` takes: seq_idx [B, S], and a token sees only its own document."""
        return self._project(self.attend(*self._heads(x), mask))

    def prefill(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        """`forward`, and all keys and values join the empty cache."""
        q, cache["k"], cache["v"] = self._heads(x)
        return self._project(attend(q, cache["k"], cache["v"], None))

    @property
    def entry(self) -> Linear:
        """The linear that takes the block's normed input."""
        return self.qkv_proj

    def new_cache(
        self, batch: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Keys and values so far, each [batch, kv_heads, tokens, head_dim]; see `pad_cache` for a third entry."""
        empty = torch.empty(batch, self.kv_heads, 0, self.head_dim, dtype=dtype, device=device)
        return {"k": empty, "v": empty.clone()}

    def step(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        """One token x [B, 1, hidden_size], whose key and value join the cache."""
        q, k, v = self._heads(x)
        cache["k"] = torch.cat((cache["k"], k), dim=2)
        cache["v"] = torch.cat((cache["v"], v), dim=2)
        if "seen" in cache:
            cache["seen"] = F.pad(cache["seen"], (0, 1), value=True)
        mask, grouped = cache.get("seen"), self.heads != self.kv_heads
        return self._project(
            F.scaled_dot_product_attention(q, cache["k"], cache["v"], attn_mask=mask, enable_gqa=grouped)
        )

    def _heads(self, x: Tensor | Activation) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [B, heads, S, head_dim]."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)

    def _project(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))


def pad_cache(cache: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """`cache` with keys and values of `length` tokens: the missing ones come first, and "seen" masks them.

    "seen" is bool [batch, 1, 1, length]. For batches of several lengths: attention knows no positions, so where a key
    lies makes no difference.
    """
    missing = length - cache["k"].shape[2]
    seen = torch.ones(len(cache["k"]), 1, 1, length, dtype=torch.bool, device=cache["k"].device)
    seen[..., :missing] = False
    return {**{name: F.pad(cache[name], (0, 0, missing, 0)) for name in ("k", "v")}, "seen": seen}


def attend(q: Tensor, k: Tensor, v: Tensor, seq_idx: Tensor | None) -> Tensor:
    """Causal attention. q [B, heads, S, D], k and v [B, kv_heads, S, D] -> [B, heads, S, D]; seq_idx None or [B, S]."""
    blockwise = q.device.type == "cpu" and q.shape[2] <= BLOCKWISE_TOKENS
    return (_blockwise_attention if blockwise else _fused_attention)(q, k, v, seq_idx)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, seq_idx: Tensor | None) -> Tensor:
    """By the kernel that PyTorch takes."""
    mask = None if seq_idx is None else (seq_idx[:, :, None] == seq_idx[:, None, :]).tril()[:, None]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def _blockwise_attention(q: Tensor, k: Tensor, v: Tensor, seq_idx: Tensor | None) -> Tensor:
    """The same in plain matrix products, in bf16 on a CPU twice as fast as PyTorch's fused kernel.

    A block of queries meets the keys up to its end, so that few masked scores are computed. Scores are rounded to q's
    dtype, the softmax is fp32 inside; autograd keeps the softmax's weights.
    """
    length = q.shape[2]
    q = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))  # [B, kv_heads, heads a kv_head, S, D]
    parts = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        unseen = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        if seq_idx is not None:
            unseen = unseen | (seq_idx[:, start:end, None] != seq_idx[:, None, :end])[:, None, None]
        scores = q[:, :, :, start:end].flatten(2, 3) @ k[:, :, :end].transpose(-1, -2)
        scores = scores.unflatten(2, (-1, end - start)).masked_fill(unseen, -torch.inf)
        part = scores.softmax(-1).flatten(2, 3) @ v[:, :, :end]
        parts.append(part.unflatten(2, (-1, end - start)))
    return torch.cat(parts, dim=3).flatten(1, 2)
