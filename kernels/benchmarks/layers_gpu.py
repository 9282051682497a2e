"""The kernels around the quantized linears on one CUDA GPU, beside the copy rate of the same run.

    python kernels/benchmarks/layers_gpu.py [scan | convolution | loss | blocks] ...

The selective scan part by part, convolution with SiLU, cross entropy; and the quantize kernels of MXFP4 and emulated FP8.
Bandwidth counts every input and result once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
from nvfp4_kernels import ROLE_COLUMNS, CounterKey
from nvfp4_kernels.blockscaled import FP8, MXFP4, quantize_blocks
from nvfp4_kernels.triton import (
    conv,
    cross_entropy,
    scan_bc,
    scan_decay,
    scan_inside,
    scan_output,
    scan_states,
)
from timing import table

CHUNK = 128


def scan() -> None:
    """Forward and backward of 1b_hybrid's scan on four sequences and of 12b_hybrid's on one."""
    for batch, heads, head_dim in ((4, 64, 64), (1, 128, 80)):
        length, groups, state = 8192, 8, 128
        x, dy = (_bf16(batch, length, heads, head_dim) for _ in range(2))
        b, c = (_bf16(batch, length, groups, state) for _ in range(2))
        dt = torch.rand(batch, length, heads, device="cuda")
        a, d = -torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda")
        steps, decay = scan_decay.chunk_decay(dt, a, CHUNK)
        states = scan_states.chunk_states(x, b, steps, decay, None)
        dstates, last = scan_states.chunk_states_backward(c, dy, decay, states, None)
        inside = scan_inside.inside_chunks_backward(x, dy, steps, decay, b, c, dstates, d, None)
        _, dsteps, ddecay, dscores, _ = inside
        _, _, after, before = scan_bc.bc_gradients(x, dy, steps, decay, b, c, states, dstates, dscores, None)
        parts = {
            "steps and decays": (scan_decay.chunk_decay, (dt, a, CHUNK)),
            "states": (scan_states.chunk_states, (x, b, steps, decay, None)),
            "output": (scan_output.chunk_outputs, (x, steps, decay, b, c, states, d, None)),
            "backward: states": (scan_states.chunk_states_backward, (c, dy, decay, states, None)),
            "backward: inside chunks": (
                scan_inside.inside_chunks_backward,
                (x, dy, steps, decay, b, c, dstates, d, None),
            ),
            "backward: B and C": (
                scan_bc.bc_gradients,
                (x, dy, steps, decay, b, c, states, dstates, dscores, None),
            ),
            "backward: steps and decays": (
                scan_decay.chunk_decay_backward,
                (dt, a, dsteps, ddecay, before, last, after),
            ),
        }
        _table(f"scan, {heads} heads x {head_dim}, state {state}", batch * length, parts)


def convolution() -> None:
    """On a slice of in_proj's output, as 1b_hybrid has it."""
    sizes = (4096, 1024, 1024)
    x = _bf16(4, 8192, 4096 + sum(sizes) + 64)[..., 4096 : 4096 + sum(sizes)]
    weight, bias = torch.randn(sum(sizes), 1, 4, device="cuda"), torch.randn(sum(sizes), device="cuda")
    grads = conv.forward(x, weight, bias, None, sizes)
    parts = {
        "forward": (conv.forward, (x, weight, bias, None, sizes)),
        "backward": (conv.backward, (grads, x, weight, bias, None)),
    }
    _table("convolution with SiLU, 6144 channels", 4 * 8192, parts)


def loss() -> None:
    """The logits of a slice, each time replaced by what the time before left."""
    logits = _bf16(4096, 65536)
    targets = torch.randint(65536, (4096,), device="cuda")
    keep = torch.ones(4096, dtype=torch.bool, device="cuda")
    size = logits.element_size()
    cases = {
        "losses": (size, lambda: cross_entropy.cross_entropy(logits, targets, keep, False)),
        "losses and gradients": (
            2 * size,
            lambda: cross_entropy.cross_entropy(logits, targets, keep, True),
        ),
    }
    table("cross entropy, 4096 x 65536 bf16", logits.numel(), cases)


def blocks() -> None:
    """MXFP4 and emulated FP8."""
    x = _bf16(8192, 8192)
    key = CounterKey(*torch.tensor([1, 2, 3, 4], device="cuda"), role=ROLE_COLUMNS)
    turned = {"transpose": True, "rotate": True}
    parts = {
        "MXFP4 rows nearest -> operand": (MXFP4, {"output": "operand"}),
        "MXFP4 columns nearest -> codes": (MXFP4, turned),
        "MXFP4 columns stochastic -> operand": (MXFP4, {**turned, "key": key, "output": "operand"}),
        "FP8 rows -> operand": (FP8, {"output": "operand"}),
        "FP8 128x128 -> operand": (FP8, {"square": True, "output": "operand"}),
        "FP8 columns -> codes": (FP8, {"transpose": True}),
    }
    cases = {
        name: (
            2 + (2 if options.get("output") else {"mxfp4": 0.53125, "fp8": 1 + 1 / 128}[fmt.name]),
            lambda fmt=fmt, options=options: quantize_blocks(x, fmt, backend="triton", **options),
        )
        for name, (fmt, options) in parts.items()
    }
    table("8192 x 8192 bf16, 32-point Hadamard on MXFP4's columns", x.numel(), cases)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _table(title: str, tokens: int, parts: dict[str, tuple[Callable, tuple]]) -> None:
    cases = {
        name: (
            (_bytes(arguments) + _bytes(function(*arguments))) / tokens,
            lambda f=function, a=arguments: f(*a),
        )
        for name, (function, arguments) in parts.items()
    }
    table(f"{title}; an element is a token, of {tokens}", tokens, cases)


def _bytes(values: object) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(map(_bytes, values)) if isinstance(values, (tuple, list)) else 0


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, Triton {triton.__version__}")
    tables = {"scan": scan, "convolution": convolution, "loss": loss, "blocks": blocks}
    for name in sys.argv[1:] or tables:
        tables[name]()
