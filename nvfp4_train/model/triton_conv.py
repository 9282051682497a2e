"""Convolution and SiLU by our Triton kernels, as custom operators that torch.compile takes whole."""

from __future__ import annotations

import torch
from nvfp4_kernels.triton import conv
from torch import Tensor

from nvfp4_train.precision.operators import operator


def split_conv_silu_triton(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor | None,
    before: int,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`conv.split_conv_silu` on a GPU. The convolved parts, and so their gradients, are tensors of their own."""
    return _SplitConvSilu.apply(projected, weight, bias, seq_idx, before, sizes)


class _SplitConvSilu(torch.autograd.Function):
    """Of a split autograd would put the gradients together in a pass of its own; here the kernel writes into their place."""

    @staticmethod
    def forward(ctx, projected, weight, bias, seq_idx, before, sizes):
        ctx.save_for_backward(projected, weight, bias, seq_idx)
        channels = sum(sizes)
        z, x, dt = projected.split((before, channels, projected.shape[-1] - before - channels), -1)
        return (z, *torch.ops.nvfp4_train.conv_silu(x, weight, bias, seq_idx, *sizes), dt)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dz, da, db, dc, ddt):
        grads = torch.ops.nvfp4_train.split_conv_silu_backward(dz, da, db, dc, ddt, *ctx.saved_tensors)
        return (*grads, None, None, None)


@operator("conv_silu")
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None, a: int, b: int, c: int
) -> tuple[Tensor, Tensor, Tensor]:
    return conv.forward(x, weight, bias, seq_idx, (a, b, c))


@_forward.register_fake
def _(x, weight, bias, seq_idx, a, b, c):
    return tuple(x.new_empty(*x.shape[:-1], size) for size in (a, b, c))


@operator("split_conv_silu_backward")
def _backward(
    dz: Tensor,
    da: Tensor,
    db: Tensor,
    dc: Tensor,
    ddt: Tensor,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = projected.new_empty(projected.shape)
    sizes = dz.shape[-1], sum(t.shape[-1] for t in (da, db, dc)), ddt.shape[-1]
    grad_z, grad_x, grad_dt = grad.split(sizes, -1)
    _copy(dz, grad_z)
    _copy(ddt, grad_dt)
    x = projected.split(sizes, -1)[1]
    _, dweight, dbias = conv.backward((da, db, dc), x, weight, bias, seq_idx, grad_x)
    return grad, dweight, dbias


def _copy(t: Tensor, into: Tensor) -> None:
    """into.copy_(t), eight bytes at once where both are made of them: PyTorch copies strided rows element by element."""
    size = 8 // t.element_size()
    starts = [n for x in (t, into) for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1])]
    if t.stride(-1) == into.stride(-1) == 1 and not any(n % size for n in starts):
        t, into = t.view(torch.int64), into.view(torch.int64)
    into.copy_(t)


@_backward.register_fake
def _(dz, da, db, dc, ddt, projected, weight, bias, seq_idx):
    return tuple(t.new_empty(t.shape) for t in (projected, weight, bias))
