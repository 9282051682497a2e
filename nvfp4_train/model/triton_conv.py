"""Convolution and SiLU by our Triton kernels, as a custom operator that torch.compile takes whole."""

from __future__ import annotations

import torch
from nvfp4_kernels.triton import conv
from torch import Tensor


def conv_silu_triton(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """`conv.conv_silu` on a GPU. Its parts, and so their gradients, are tensors of their own: nothing is copied together."""
    return torch.ops.nvfp4_train.conv_silu(x, weight, bias, seq_idx, *sizes)


@torch.library.custom_op("nvfp4_train::conv_silu", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None, a: int, b: int, c: int
) -> tuple[Tensor, Tensor, Tensor]:
    return conv.forward(x, weight, bias, seq_idx, (a, b, c))


@_forward.register_fake
def _(x, weight, bias, seq_idx, a, b, c):
    return tuple(x.new_empty(*x.shape[:-1], size) for size in (a, b, c))


@torch.library.custom_op("nvfp4_train::conv_silu_backward", mutates_args=())
def _backward(
    da: Tensor, db: Tensor, dc: Tensor, x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return conv.backward((da, db, dc), x, weight, bias, seq_idx)


@_backward.register_fake
def _(da, db, dc, x, weight, bias, seq_idx):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])


def _gradients(ctx, da, db, dc):
    grads = torch.ops.nvfp4_train.conv_silu_backward(da, db, dc, *ctx.saved_tensors)
    return (*grads, None, None, None, None)


_forward.register_autograd(_gradients, setup_context=_setup_context)
