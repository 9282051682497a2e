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
    same = None if seq_idx is None else _same_document(seq_idx, weight.shape[-1])
    return _CausalConv1d.apply(x, weight, bias, same)


def conv_silu(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU of `causal_conv1d`, rounded once to x's dtype, in three parts of the channels."""
    return F.silu(causal_conv1d(x, weight, bias, seq_idx)).to(x.dtype).split(sizes, dim=-1)


def split_conv_silu(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor | None,
    before: int,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """projected [B, S, before + channels + after], split: what is before, `conv_silu` of the channels, what is after."""
    channels = sum(sizes)
    z, x, dt = projected.split((before, channels, projected.shape[-1] - before - channels), dim=-1)
    return (z, *conv_silu(x, weight, bias, seq_idx, sizes), dt)


class _CausalConv1d(torch.autograd.Function):
    """With the gradient written out: autograd's own makes several passes over zero-filled copies of every tap.

    Padded tensors and taps are made by cat, whose result torch.compile stores; what it inlines it computes once a tap.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, same: Tensor | None) -> Tensor:
        length, k = x.shape[1], weight.shape[-1]
        padded = torch.cat((x.new_zeros(x.shape[0], k - 1, x.shape[2]), x), dim=1)
        ctx.save_for_backward(padded, weight, same)
        taps = _taps(weight)
        y = bias + x * taps[0]
        for i in range(1, k):
            y = y + _masked(padded[:, k - 1 - i : k - 1 - i + length], same, i) * taps[i]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, same = ctx.saved_tensors
        length, k = grad.shape[1], weight.shape[-1]
        taps = _taps(weight)
        zeros = padded.new_zeros(grad.shape[0], k - 1, grad.shape[2])
        grad = torch.cat((grad.to(padded.dtype), zeros), dim=1)
        ahead = None if same is None else F.pad(same, (0, 0, 0, k - 1))
        grad_x, grad_taps = 0, []
        for i in range(k):
            grad_x = grad_x + _masked(grad, ahead, i)[:, i : i + length] * taps[i]
            tap = _masked(padded[:, k - 1 - i : k - 1 - i + length], same, i)
            grad_taps.append((grad[:, :length].to(taps.dtype) * tap).sum((0, 1)))
        grad_weight = torch.stack(grad_taps[::-1], dim=1)[:, None]
        grad_bias = grad[:, :length].to(taps.dtype).sum((0, 1))
        return grad_x.to(padded.dtype), grad_weight, grad_bias, None


def _taps(weight: Tensor) -> Tensor:
    """weight [C, 1, k] as [k, C]: row i multiplies the token i before the current one."""
    return torch.cat(weight[:, 0].unbind(1)[::-1]).view(weight.shape[-1], -1)


def _same_document(seq_idx: Tensor, k: int) -> Tensor:
    """bool [k, B, S, 1]: whether token t - i is in the document of token t."""
    length, padded = seq_idx.shape[1], F.pad(seq_idx, (k - 1, 0), value=-1)
    return torch.stack([padded[:, k - 1 - i : k - 1 - i + length] == seq_idx for i in range(k)])[..., None]


def _masked(x: Tensor, same: Tensor | None, i: int) -> Tensor:
    return x if same is None or i == 0 else torch.where(same[i], x, 0)


class CausalConv1d(nn.Module):
    """Holds the parameters under nn.Conv1d's names and shapes: weight [C, 1, k], bias [C], both fp32."""

    def __init__(self, channels: int, kernel: int, device: torch.device | str | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.empty(channels, dtype=torch.float32, device=device))
        self.split_conv_silu = split_conv_silu  # or another of its signature: kernels.choose_kernels

    def split(
        self, projected: Tensor, before: int, sizes: tuple[int, int, int], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """in_proj's output split, the channels from `before` on convolved; see `split_conv_silu`."""
        return self.split_conv_silu(projected, self.weight, self.bias, seq_idx, before, sizes)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One token x [B, C]; state [B, k - 1, C] holds the inputs before it and is moved on in place."""
        window = torch.cat((state, x[:, None]), dim=1)
        state.copy_(window[:, 1:])
        return self.bias + (window * self.weight[:, 0].T).sum(1)
