"""The squared-ReLU feed-forward mixer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.producers import Activation, squared_relu


class MLP(nn.Module):
    """down_proj(relu(up_proj(x))^2), x [B, S, hidden_size]. It mixes no tokens, so documents don't matter."""

    def __init__(self, cfg: ModelConfig, device: torch.device | str | None = None):
        super().__init__()
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, device=device)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, device=device)
        self.recompute_activation = False  # set by recompute.apply_recompute

    def forward(self, x: Tensor | Activation, seq_idx: Tensor | None = None) -> Tensor:
        h = self.up_proj(x)
        # A down_proj whose wgrad is in NVFP4 keeps 4-bit codes of its input: there is nothing to gain.
        keeps_input = "wgrad.input" not in self.down_proj.plan.quantized
        if self.recompute_activation and keeps_input and torch.is_grad_enabled():
            return checkpoint(self._down, h, use_reentrant=False, preserve_rng_state=False)
        return self._down(h)

    @property
    def entry(self) -> Linear:
        """The linear that takes the block's normed input."""
        return self.up_proj

    def _down(self, h: Tensor) -> Tensor:
        return self.down_proj(squared_relu(h, into=self.down_proj))

    def new_cache(
        self, batch: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        return {}

    def prefill(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        return self(x)

    def step(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        return self(x)
