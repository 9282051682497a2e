"""Grouped-query attention without position embedding (the Mamba blocks carry the order of tokens)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.precision.linear import Linear


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

    def forward(self, x: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        """x [B, S, hidden_size]; with seq_idx [B, S] a token sees only its own document."""
        q, k, v = self._heads(x)
        mask = None if seq_idx is None else (seq_idx[:, :, None] == seq_idx[:, None, :]).tril()[:, None]
        return self._attend(q, k, v, mask, is_causal=mask is None)

    def new_cache(
        self, batch: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Keys and values so far, each [batch, kv_heads, tokens, head_dim]."""
        empty = torch.empty(batch, self.kv_heads, 0, self.head_dim, dtype=dtype, device=device)
        return {"k": empty, "v": empty.clone()}

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """One token x [B, 1, hidden_size], whose key and value join the cache."""
        q, k, v = self._heads(x)
        cache["k"] = torch.cat((cache["k"], k), dim=2)
        cache["v"] = torch.cat((cache["v"], v), dim=2)
        return self._attend(q, cache["k"], cache["v"])

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [B, heads, S, head_dim]."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))
