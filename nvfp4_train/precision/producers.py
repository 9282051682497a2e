"""What the model computes right before a linear layer, with the amax that the linear needs taken on the way.

The seam: a producer is told which linear its result goes `into`; where that linear quantizes its input and the device has
the fused kernel it returns an `Activation`, which `Linear` accepts in a tensor's place. Everywhere else it returns the
plain tensor, computed by ordinary operations that torch.compile fuses with their neighbours; or, told to, by the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from nvfp4_kernels import SIGNS, producers
from torch import Tensor
from torch.nn import functional as F

from nvfp4_train.precision.operators import operator


class Activation(NamedTuple):
    """A linear layer's input and what was measured while it was made.

    `value` bf16 [..., n]; `amax` fp32 [2]: of the value, and of its Hadamard transform along tokens (0 where not asked for).
    """

    value: Tensor
    amax: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, decays and states beside activations of `dtype`: fp32, or fp64 when they are fp64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    into=None,
    gate: Tensor | None = None,
    groups: int = 1,
    fused: bool = False,
) -> Tensor | Activation:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, of x * silu(gate) where there is a gate.

    Each of `groups` contiguous slices is normed by itself. Arithmetic in fp32 (fp64 for fp64 inputs), the result in the
    gate's or else x's dtype. into: the `Linear` that takes the result, or None. fused: by the kernel even where nothing is
    to be measured.
    """
    dtype = x.dtype if gate is None else gate.dtype
    measured = into.measures() if dtype == torch.bfloat16 and into is not None else None
    if measured or (fused and dtype == torch.bfloat16):
        n = x.shape[-1]
        gate = None if gate is None else gate.reshape(-1, n)
        y, _, amax = torch.ops.nvfp4_train.rms_norm(x.reshape(-1, n), gate, weight, eps, groups, measured)
        y = y.view(x.shape)
        return Activation(y, amax) if measured else y
    y = x.to(accumulation_dtype(dtype))
    if gate is not None:
        y = y * F.silu(gate.to(y.dtype))
    y = y.unflatten(-1, (groups, -1)) if groups > 1 else y
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y.flatten(-2) if groups > 1 else y
    return (y * weight).to(dtype)


def squared_relu(x: Tensor, into=None) -> Tensor | Activation:
    """max(x, 0)^2 in x's dtype. into: the `Linear` that takes the result, or None."""
    if x.dtype == torch.bfloat16 and into is not None and (wanted := into.measures()):
        y, amax = torch.ops.nvfp4_train.squared_relu(x.reshape(-1, x.shape[-1]), wanted == "rotated")
        return Activation(y.view(x.shape), amax)
    return F.relu(x).square()


@operator("rms_norm")
def _rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, groups: int, measured: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    signs = SIGNS if measured == "rotated" else None
    return producers.rms_norm(x, gate, weight, eps, groups, signs, measured is not None)


@_rms_norm.register_fake
def _(x, gate, weight, eps, groups, measured):
    fp32 = {"dtype": torch.float32}
    y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[0], groups, **fp32), x.new_empty(2 if measured else 0, **fp32)


@operator("rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgate, dweight = producers.rms_norm_backward(dy, x, gate, rstd, weight)
    return dx, dy.new_empty(0) if dgate is None else dgate, dweight


@_rms_norm_backward.register_fake
def _(dy, x, gate, rstd, weight):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgate = dy.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return dx, dgate, weight.new_empty(weight.shape)


def _save_norm(ctx, inputs, output):
    x, gate, weight, *_ = inputs
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.set_materialize_grads(False)


def _norm_gradients(ctx, dy, *_):
    if dy is None:
        return (None,) * 6
    x, gate, weight, rstd = ctx.saved_tensors
    dx, dgate, dweight = torch.ops.nvfp4_train.rms_norm_backward(dy, x, gate, rstd, weight)
    return dx, None if gate is None else dgate, dweight, None, None, None


_rms_norm.register_autograd(_norm_gradients, setup_context=_save_norm)


@operator("squared_relu")
def _squared_relu(x: Tensor, rotated: bool) -> tuple[Tensor, Tensor]:
    return producers.squared_relu(x, SIGNS if rotated else None)


@_squared_relu.register_fake
def _(x, rotated):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(2, dtype=torch.float32)


def _save_relu(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.set_materialize_grads(False)


def _relu_backward(ctx, dy, *_):
    if dy is None:
        return None, None
    (x,) = ctx.saved_tensors
    return dy * (2 * F.relu(x)), None


_squared_relu.register_autograd(_relu_backward, setup_context=_save_relu)
