"""The Mamba-2 mixer (Dao and Gu, arXiv 2405.21060) as Nemotron-H arranges it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.model.conv import CausalConv1d
from nvfp4_train.model.norm import GatedRMSNorm, accumulation_dtype
from nvfp4_train.model.ssd import ssd_chunked, ssd_prefill, ssd_step
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.producers import Activation


class Mamba2(nn.Module):
    """in_proj -> z | xBC | dt; causal convolution and SiLU on xBC; selective scan; gated norm; out_proj.

    dt = softplus(dt + dt_bias) without a clamp, A = -exp(A_log); dt, decays and carried states are fp32 (fp64
    for fp64 inputs).
    """

    def __init__(self, cfg: ModelConfig, device: torch.device | str | None = None):
        super().__init__()
        self.heads, self.head_dim = cfg.mamba_num_heads, cfg.mamba_head_dim
        self.groups, self.state = cfg.n_groups, cfg.ssm_state_size
        self.chunk_size = cfg.chunk_size
        self.inner = self.heads * self.head_dim
        self.sizes = (self.inner, self.groups * self.state, self.groups * self.state)  # x, B, C
        self.conv_channels = sum(self.sizes)
        self.in_proj = Linear(cfg.hidden_size, self.inner + self.conv_channels + self.heads, device=device)
        self.conv1d = CausalConv1d(self.conv_channels, cfg.conv_kernel, device)
        self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=torch.float32, device=device))
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32, device=device))
        self.D = nn.Parameter(torch.empty(self.heads, dtype=torch.float32, device=device))
        self.norm = GatedRMSNorm(self.inner, self.groups, cfg.norm_eps, device)
        self.out_proj = Linear(self.inner, cfg.hidden_size, device=device)
        self.scan = ssd_chunked  # or another of its signature: kernels.choose_kernels

    def forward(self, x: Tensor | Activation, seq_idx: Tensor | None = None) -> Tensor:
        """x [B, S, hidden_size]; with seq_idx [B, S] convolution and state restart at every document."""
        z, xs, B, C, dt = self._convolved(self.in_proj(x), seq_idx)
        y = self.scan(xs, dt, -self.A_log.exp(), B, C, self.D, self.chunk_size, seq_idx)
        return self.out_proj(self.norm(y.flatten(2), z, into=self.out_proj))

    @property
    def entry(self) -> Linear:
        """The linear that takes the block's normed input."""
        return self.in_proj

    def prefill(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        """`forward`, and the empty cache becomes that after the last token."""
        projected = self.in_proj(x)
        k, xBC = cache["conv"].shape[1], projected.narrow(-1, self.inner, self.conv_channels)
        cache["conv"].copy_(F.pad(xBC, (0, 0, k, 0))[:, xBC.shape[1] :])
        z, xs, B, C, dt = self._convolved(projected)
        y, state = ssd_prefill(xs, dt, -self.A_log.exp(), B, C, self.D, self.chunk_size)
        cache["ssm"].copy_(state)
        return self.out_proj(self.norm(y.flatten(2), z, into=self.out_proj))

    def new_cache(
        self, batch: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """The convolution's last inputs [batch, k - 1, channels] and the state [batch, heads, head_dim, state]."""
        k = self.conv1d.weight.shape[-1]
        acc = accumulation_dtype(dtype)
        return {
            "conv": torch.zeros(batch, k - 1, self.conv_channels, dtype=dtype, device=device),
            "ssm": torch.zeros(batch, self.heads, self.head_dim, self.state, dtype=acc, device=device),
        }

    def step(self, x: Tensor | Activation, cache: dict[str, Tensor]) -> Tensor:
        """One token x [B, 1, hidden_size]; both states move on in place."""
        z, xBC, dt = self.in_proj(x).split((self.inner, self.conv_channels, self.heads), dim=-1)
        xBC = F.silu(self.conv1d.step(xBC[:, 0], cache["conv"])).to(z.dtype)
        xs, B, C = self._heads(*xBC.split(self.sizes, dim=-1))
        y, state = ssd_step(cache["ssm"], xs, self._positive(dt)[:, 0], -self.A_log.exp(), B, C, self.D)
        cache["ssm"].copy_(state)
        return self.out_proj(self.norm(y.flatten(1)[:, None], z, into=self.out_proj))

    def _convolved(self, projected: Tensor, seq_idx: Tensor | None = None) -> tuple[Tensor, ...]:
        """The gate, the scan's x, B and C in heads, and dt."""
        z, x, B, C, dt = self.conv1d.split(projected, self.inner, self.sizes, seq_idx)
        return (z, *self._heads(x, B, C), self._positive(dt))

    def _positive(self, dt: Tensor) -> Tensor:
        return F.softplus(dt.to(accumulation_dtype(dt.dtype)) + self.dt_bias)

    def _heads(self, x: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (self.groups, self.state)
        return x.unflatten(-1, (self.heads, self.head_dim)), B.unflatten(-1, shape), C.unflatten(-1, shape)
