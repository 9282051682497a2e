"""The selective scan by mamba-ssm's Triton kernels, as a custom operator that torch.compile takes whole.

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
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.model import mamba_ssm_tiles

OLDEST = (2, 3)  # of those before, the backward pass was wrong for several groups, or not deterministic
MODULES = ("ssd_bmm", "ssd_chunk_state", "ssd_state_passing", "ssd_chunk_scan", "ssd_combined")
ALL_TILES = "TRITON_CACHE_AUTOTUNING"  # if "1", the package keeps all its tiles in its deterministic mode too
_kernels: Any = None  # the module mamba_ssm_kernels, once `load` has found the package
tiles = "not loaded"  # which tiles it runs, for the log


def load() -> str | None:
    """Import the kernels; None, or why they can't be used. The package needs no compiled extension for them.

    On a Hopper GPU they run the tiles of `mamba_ssm_tiles`, elsewhere those that the package chooses.
    """
    global _kernels, tiles
    if importlib.util.find_spec("mamba_ssm") is None:
        return "mamba-ssm is not installed"
    version = importlib.metadata.version("mamba-ssm")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"mamba-ssm {version} is older than {'.'.join(map(str, OLDEST))}"
    # Sums in a fixed order instead of atomic additions, whatever the environment says: the only way that was measured.
    os.environ["MAMBA_DETERMINISTIC"] = "1"
    stub = "selective_scan_cuda"  # Mamba-1's extension, which the package's __init__ imports come what may
    added = importlib.util.find_spec(stub) is None
    if added:
        sys.modules[stub] = types.ModuleType(stub)
    pinned, chosen = _on_hopper(), os.environ.get(ALL_TILES)
    if pinned:
        os.environ[ALL_TILES] = "1"
    try:
        modules = [importlib.import_module(f"mamba_ssm.ops.triton.{name}") for name in MODULES]
        from nvfp4_train.model import mamba_ssm_kernels
    except Exception as error:  # whatever its many dependencies raise
        return f"mamba-ssm {version} can't be imported ({' '.join(str(error).split())})"
    finally:
        if added:
            sys.modules.pop(stub, None)
        os.environ.pop(ALL_TILES, None)
        if chosen is not None:
            os.environ[ALL_TILES] = chosen
    tiles = "the package's tiles"
    if pinned:
        from mamba_ssm.utils.determinism import autotune_configs

        missing = mamba_ssm_tiles.pin(modules, autotune_configs)
        tiles = "tiles for Hopper" + (f", but the package's for {', '.join(missing)}" if missing else "")
    _kernels = mamba_ssm_kernels
    return None


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == mamba_ssm_tiles.HOPPER


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
    """`ssd.ssd_chunked` on a GPU, but that y is rounded to x's dtype.

    Chunks are an order of computation: here they are of 64 tokens, or of 128 where chunk_size says more.
    """
    chunk_size = 64 if chunk_size <= 64 else 128
    seq_idx = None if seq_idx is None else seq_idx.to(torch.int32)
    return torch.ops.nvfp4_train.ssd_mamba_ssm(x, dt, A, B, C, D, chunk_size, seq_idx)[0]


@torch.library.custom_op("nvfp4_train::ssd_mamba_ssm", mutates_args=())
def _forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _kernels.forward(x, dt, A, B, C, D, chunk_size, seq_idx)


@_forward.register_fake
def _(x, dt, A, B, C, D, chunk_size, seq_idx):
    batch, length, heads, head_dim = x.shape
    chunks = -(-length // chunk_size)
    sums = (batch, heads, chunks, chunk_size)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        dt.new_empty(sums),
        dt.new_empty(sums),
        C.new_empty(batch, chunks, heads, head_dim, C.shape[-1]),
    )


@torch.library.custom_op("nvfp4_train::ssd_mamba_ssm_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    kept: list[Tensor],
    chunk_size: int,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = _kernels.backward(dy.contiguous(), x, dt, A, B, C, D, *kept, chunk_size, seq_idx)
    inputs = (x, dt, A, B, C, D)
    return tuple(grad.to(t.dtype).contiguous() for grad, t in zip(grads, inputs, strict=True))


@_backward.register_fake
def _(dy, x, dt, A, B, C, D, kept, chunk_size, seq_idx):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, A, B, C, D))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size, seq_idx = inputs
    ctx.save_for_backward(*tensors, seq_idx, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, *_):
    if dy is None:
        return (None,) * 8
    *tensors, seq_idx, dt_chunks, decay, states = ctx.saved_tensors
    grads = torch.ops.nvfp4_train.ssd_mamba_ssm_backward(
        dy, *tensors, [dt_chunks, decay, states], ctx.chunk_size, seq_idx
    )
    return (*grads, None, None)


_forward.register_autograd(_gradients, setup_context=_setup_context)
