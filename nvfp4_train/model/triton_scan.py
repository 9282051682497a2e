"""The selective scan by our Triton kernels, as a custom operator that torch.compile takes whole."""

from __future__ import annotations

import torch
from nvfp4_kernels.triton import scan
from nvfp4_kernels.triton.shapes import CHUNKS
from torch import Tensor

from nvfp4_train.precision.operators import operator


def chunk_of(chunk_size: int) -> int:
    """The chunks that the kernels take for `model.chunk_size`: chunks are an order of computation."""
    return next((size for size in CHUNKS if chunk_size <= size), CHUNKS[-1])


def ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """`ssd.ssd_chunked` on a GPU, but that y is rounded to x's dtype, and chunks are of 64 or 128 tokens."""
    seq_idx = None if seq_idx is None else seq_idx.to(torch.int32)
    return torch.ops.nvfp4_train.ssd(x, dt, A, B, C, D, chunk_of(chunk_size), seq_idx)[0]


@operator("ssd")
def _forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk: int, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return scan.forward(x, dt, A, B, C, D, chunk, seq_idx)


@_forward.register_fake
def _(x, dt, A, B, C, D, chunk, seq_idx):
    batch, length, heads, head_dim = x.shape
    chunks = -(-length // chunk)
    sums = (batch, heads, chunks, chunk)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        dt.new_empty(sums),
        dt.new_empty(sums),
        C.new_empty(batch, chunks, heads, head_dim, C.shape[-1]),
    )


@operator("ssd_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    kept: list[Tensor],
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return scan.backward(dy.contiguous(), x, dt, A, B, C, D, *kept, seq_idx)


@_backward.register_fake
def _(dy, x, dt, A, B, C, D, kept, seq_idx):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, A, B, C, D))


def _setup_context(ctx, inputs, output):
    *tensors, _, seq_idx = inputs
    ctx.save_for_backward(*tensors, seq_idx, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, *_):
    if dy is None:
        return (None,) * 8
    *tensors, seq_idx, steps, decay, states = ctx.saved_tensors
    grads = torch.ops.nvfp4_train.ssd_backward(dy, *tensors, [steps, decay, states], seq_idx)
    return (*grads, None, None)


_forward.register_autograd(_gradients, setup_context=_setup_context)
