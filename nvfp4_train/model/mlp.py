"""The squared-ReLU feed-forward mixer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.producers import Activation, squared_relu


class MLP(nn.Module):
    """down_proj(relu(up_proj(x))^2), x [B, S, hidden_size]. It mixes no tokens, so documents don't matter."""

    def __init__(self, cfg: ModelConfig, device: torch.device | str | None = None):
        super().__init__()
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, device=device)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, device=device)

    def forward(self, x: Tensor | Activation, seq_idx: Tensor | None = None) -> Tensor:
        return self.down_proj(squared_relu(self.up_proj(x), into=self.down_proj))

    @property
    def entry(self) -> Linear:
        """The linear that takes the block's normed input."""
        return self.up_proj

    def new_cache(
        self, batch: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        return {}

    def prefill(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        return self(x)

    def step(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        return self(x)
