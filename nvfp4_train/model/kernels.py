"""Which implementations of scan, convolution, norm, attention and cross entropy a model runs, chosen once and logged."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from nvfp4_kernels.triton import ops, scan
from nvfp4_kernels.triton.conv import LARGEST_KERNEL
from torch import Tensor

from nvfp4_train.errors import ConfigError
from nvfp4_train.model import conv, mamba_ssm_scan
from nvfp4_train.model.attention import Attention, attend
from nvfp4_train.model.hybrid import HybridModel, document_numbers
from nvfp4_train.model.loss import slice_loss, slice_loss_triton
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.ssd import ssd_chunked
from nvfp4_train.model.triton_conv import split_conv_silu_triton
from nvfp4_train.model.triton_scan import chunk_of, ssd_triton


def choose_kernels(model: HybridModel, kernels: str, device: torch.device, deterministic: bool = True) -> str:
    """Have `model` run the kernels that `training.kernels` names, and return a line for the log.

    "torch" is the reference, on every device. "auto" takes on a GPU, in BF16, our Triton kernels for the scan, the
    convolution, the gated norm and the cross entropy, each where it can. "mamba_ssm" is the same but for the scan, which is
    mamba-ssm's; raises ConfigError where that can't run.
    Attention is PyTorch's: on a GPU one whose gradients repeat their bits or, unless `deterministic`, the fastest.
    """
    reason = "training.kernels=torch" if kernels == "torch" else _unfit(model, device)
    package = kernels == "mamba_ssm"
    no_scan = reason or (mamba_ssm_scan.load() if package else _no_scan(model, device))
    no_conv, no_norm = reason or _no_convolution(model), reason or _no_norm(model)
    if package and no_scan:
        raise ConfigError(f"training.kernels=mamba_ssm, but {no_scan}: use training.kernels=auto or torch.")
    fast_scan = mamba_ssm_scan.ssd_mamba_ssm if package else ssd_triton
    for module in model.modules():
        if isinstance(module, Mamba2):
            module.scan = ssd_chunked if no_scan else fast_scan
            module.conv1d.split_conv_silu = conv.split_conv_silu if no_conv else split_conv_silu_triton
            module.norm.fused = no_norm is None
    attention = _choose_attention(model, device, deterministic)
    no_loss = reason or _no_triton()
    model.lm_head.slice_loss = slice_loss if no_loss else slice_loss_triton
    if attention is None:
        return f"scan, convolution, attention and cross entropy in PyTorch ({reason})"
    if reason:
        return f"scan, convolution and cross entropy in PyTorch ({reason}); attention {attention}"
    scans = _whose(no_scan)
    if package:
        scans = f"by mamba-ssm {importlib.metadata.version('mamba-ssm')} (Triton)"
    return (
        f"scan {scans}; convolution with SiLU {_whose(no_conv)}; gated norm {_whose(no_norm)}; attention {attention}; "
        f"cross entropy {_whose(no_loss)}"
    )


def _whose(missing: str | None) -> str:
    return f"in PyTorch ({missing})" if missing else "by nvfp4_kernels (Triton)"


def _unfit(model: HybridModel, device: torch.device) -> str | None:
    """Why none of the kernels can run, or None."""
    if device.type != "cuda":
        return f"the kernels run on GPUs, not on a {device.type.upper()}"
    if model.compute_dtype != torch.bfloat16:
        return f"activations are {str(model.compute_dtype).removeprefix('torch.')}, not bfloat16"
    return None


def _choose_attention(model: HybridModel, device: torch.device, deterministic: bool) -> str | None:
    """Set the model's attention and what it takes as mask; what to say of it, nothing on a CPU."""
    if device.type != "cuda":
        _set_attention(model, attend, document_numbers)  # whose sums have one order
        return None
    from torch._inductor import config as inductor  # which, as `flex`, takes seconds to import

    from nvfp4_train.model import flex

    # Not to choose tiles of reductions by their time: sums would have another order from process to process.
    inductor.deterministic = deterministic
    if unfit := flex.unfit(model.cfg.head_dim):
        _set_attention(model, flex.products if deterministic else attend, document_numbers)
        return f"{'in matrix products' if deterministic else 'as PyTorch chooses'} ({unfit})"
    if deterministic:
        _set_attention(model, flex.repeatable, flex.block_mask)
        return "by FlexAttention (Triton; training.deterministic=true: its gradients repeat their bits)"
    _set_attention(model, flex.fastest, flex.documents_mask)
    return (
        "by cuDNN where it can, by FlexAttention where documents are masked "
        "(training.deterministic=false: gradients need not repeat their last bits)"
    )


def _set_attention(model: HybridModel, kernel: Callable[..., Tensor], mask: Callable[..., Any]) -> None:
    model.attention_mask = mask
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = kernel


def _no_triton() -> str | None:
    """Why our Triton kernels can't run, or None."""
    found, report = ops.report()
    return None if found else report


def _no_scan(model: HybridModel, device: torch.device) -> str | None:
    """Why the scan's kernels can't run, or None."""
    cfg = model.cfg
    sizes = cfg.mamba_num_heads, cfg.mamba_head_dim, cfg.n_groups, cfg.ssm_state_size
    return _no_triton() or scan.unfit(*sizes, chunk_of(cfg.chunk_size), device)


def _no_norm(model: HybridModel) -> str | None:
    """Why the gated norm's kernels can't run, or None."""
    group = model.cfg.mamba_num_heads * model.cfg.mamba_head_dim // model.cfg.n_groups
    return _no_triton() or (f"its groups of {group} channels are no multiple of 4" if group % 4 else None)


def _no_convolution(model: HybridModel) -> str | None:
    """Why the convolution's kernels can't run, or None."""
    if missing := _no_triton():
        return missing
    if model.cfg.conv_kernel > LARGEST_KERNEL:
        return f"model.conv_kernel={model.cfg.conv_kernel} is more than {LARGEST_KERNEL}"
    return None
