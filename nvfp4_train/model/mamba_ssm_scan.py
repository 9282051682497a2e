"""The selective scan by mamba-ssm's Triton kernels, as a custom operator that torch.compile takes whole: `ssd_triton`'s
counterpart, to compare with.

Only the scan: the package's larger kernel would multiply with out_proj itself, past its quantization.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
import warnings
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.precision.operators import operator

OLDEST = (2, 3)  # of those before, the backward pass was wrong for several groups, or not deterministic
_package: Any = None  # its module ssd_combined, once `load` has found it


def load() -> str | None:
    """Import the kernels; None, or why they can't be used. The package needs no compiled extension for them."""
    global _package
    if importlib.util.find_spec("mamba_ssm") is None:
        return "mamba-ssm is not installed"
    version = importlib.metadata.version("mamba-ssm")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"mamba-ssm {version} is older than {'.'.join(map(str, OLDEST))}"
    # Sums in a fixed order instead of atomic additions, whatever the environment says; its tiles then are the smallest.
    os.environ["MAMBA_DETERMINISTIC"] = "1"
    stub = "selective_scan_cuda"  # Mamba-1's extension, which the package's __init__ imports come what may
    added = importlib.util.find_spec(stub) is None
    if added:
        sys.modules[stub] = types.ModuleType(stub)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            package = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        for name in ("_mamba_chunk_scan_combined_fwd", "_mamba_chunk_scan_combined_bwd"):
            getattr(package, name)
    except Exception as error:  # whatever its many dependencies raise
        return f"mamba-ssm {version} can't be imported ({' '.join(str(error).split())})"
    finally:
        if added:
            sys.modules.pop(stub, None)
    _package = package
    return None


def ssd_mamba_ssm(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """`ssd.ssd_chunked` on a GPU, but that y is rounded to x's dtype."""
    seq_idx = None if seq_idx is None else seq_idx.to(torch.int32)
    return torch.ops.nvfp4_train.ssd_mamba_ssm(x, dt, A, B, C, D, chunk_size, seq_idx)


@operator("ssd_mamba_ssm")
def _forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int, seq_idx: Tensor | None
) -> Tensor:
    return _package._mamba_chunk_scan_combined_fwd(x, dt, A, B, C, chunk_size, D=D, seq_idx=seq_idx)[0]


@_forward.register_fake
def _(x, dt, A, B, C, D, chunk_size, seq_idx):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("ssd_mamba_ssm_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dy, inputs = dy.contiguous(), (x, dt, A, B, C, D)
    # y, which it takes next, it reads with a gate alone: dy has its shape.
    grads = _package._mamba_chunk_scan_combined_bwd(dy, x, dt, A, B, C, dy, chunk_size, D=D, seq_idx=seq_idx)
    return tuple(grad.to(t.dtype).contiguous() for grad, t in zip(grads[:6], inputs, strict=True))


@_backward.register_fake
def _(dy, x, dt, A, B, C, D, chunk_size, seq_idx):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, A, B, C, D))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size, seq_idx = inputs
    ctx.save_for_backward(*tensors, seq_idx)


def _gradients(ctx, dy):
    *tensors, seq_idx = ctx.saved_tensors
    grads = torch.ops.nvfp4_train.ssd_mamba_ssm_backward(dy, *tensors, ctx.chunk_size, seq_idx)
    return (*grads, None, None)


_forward.register_autograd(_gradients, setup_context=_setup_context)
