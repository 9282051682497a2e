"""Mamba-2's short depthwise causal convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """y[t] = bias + sum_i weight[k - 1 - i] * x[t - i], channel by channel; tokens before the start are zeros.

    Args:
        x: [B, S, C] in any floating dtype.
        weight: [C, 1, k] fp32; its last tap multiplies the current token.
        bias: [C] fp32.
        seq_idx: [B, S] integer document numbers; taps never reach into another document.

    Returns [B, S, C] in the promoted dtype of x and weight (fp32 for bf16 x), so that the activation that follows
    works on the unrounded sum. k shifted multiply-adds fuse into one pass under torch.compile; a library
    convolution would want the channels before the tokens, a transposed copy in and out.
    """
    length, k = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, k - 1, 0))
    ids = None if seq_idx is None else F.pad(seq_idx, (k - 1, 0), value=-1)
    y = bias + x * weight[:, 0, k - 1]
    for i in range(1, k):
        tap = padded[:, k - 1 - i : k - 1 - i + length]
        if ids is not None:
            same = ids[:, k - 1 - i : k - 1 - i + length] == seq_idx
            tap = torch.where(same[..., None], tap, 0)
        y = y + tap * weight[:, 0, k - 1 - i]
    return y


class CausalConv1d(nn.Module):
    """Holds the parameters under nn.Conv1d's names and shapes: weight [C, 1, k], bias [C], both fp32."""

    def __init__(self, channels: int, kernel: int, device: torch.device | str | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.empty(channels, dtype=torch.float32, device=device))

    def forward(self, x: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        return causal_conv1d(x, self.weight, self.bias, seq_idx)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One token x [B, C]; state [B, k - 1, C] holds the inputs before it and is moved on in place."""
        window = torch.cat((state, x[:, None]), dim=1)
        state.copy_(window[:, 1:])
        return self.bias + (window * self.weight[:, 0].T).sum(1)
