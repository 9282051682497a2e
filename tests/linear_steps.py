"""A step of one linear layer, and its capture in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def forward_and_gradients(
    linear, tokens: int, call: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, ...]:
    """y, dx and dW for two sequences of `tokens` / 2 drawn tokens and a drawn dy, by `call` or the layer itself."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, tokens // 2, linear.in_features, generator=draw).bfloat16().requires_grad_()
    dy = torch.randn(2, tokens // 2, linear.out_features, generator=draw).bfloat16()
    linear.weight.grad = None
    y = (linear if call is None else call)(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


def captured(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """`step`, run once to warm up, in a graph; and the tensors that hold its results after every replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
