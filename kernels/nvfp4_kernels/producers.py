"""What makes a linear layer's input, with the input's amax: on GPUs in the same pass (`triton/producers.py`).

Elsewhere the same functions are plain PyTorch. The results of norms may differ in last bits between devices, as sums do;
amax is that of the result returned.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nvfp4_kernels.quantize import amax as measure
from nvfp4_kernels.triton import ops as gpu


def fused(device: torch.device) -> bool:
    """Whether these functions measure in the same pass on `device`."""
    return device.type == "cuda" and gpu.report()[0]


def rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    groups: int = 1,
    hadamard: tuple[int, ...] | None = None,
    measured: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of x, or of x * silu(gate), each of `groups` slices by itself.

    x: bf16 or fp32 [T, n]; gate: bf16 [T, n], rows anywhere, or None; weight: fp32 [n]. Returns y bf16 [T, n],
    1 / rms fp32 [T, groups], and amax fp32 [2] of y: raw, and after the transform along tokens (0 without `hadamard`); [0]
    unless `measured`. The kernel's lanes own four channels: groups of another width are normed in PyTorch.
    """
    if gpu.supports(x) and x.shape[1] // groups % 4 == 0:
        return gpu.rms_norm(x, gate, weight, eps, groups, hadamard, measured)
    v = x.float() if gate is None else x.float() * F.silu(gate.float())
    v = v.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(v.square().mean(-1) + eps)
    y = ((v * scale[..., None]).flatten(-2) * weight).to(torch.bfloat16)
    return y, scale, measure(y, hadamard) if measured else y.new_empty(0, dtype=torch.float32)


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradients of x and gate, in their dtypes, and of the weight, fp32, of `rms_norm`, which returned rstd = 1 / rms.

    What was normed is computed again, in fp32; nothing but the results is rounded. The weight's gradient is a sum in a fixed
    order: the same bits every time.
    """
    if gpu.supports(x):
        return gpu.rms_norm_backward(dy, x, gate, rstd, weight)
    groups, v = rstd.shape[-1], x.float()
    if gate is not None:
        z = gate.float()
        sigmoid = torch.sigmoid(z)
        silu, v = z * sigmoid, v * (z * sigmoid)
    normed = (v.unflatten(-1, (groups, -1)) * rstd[..., None]).flatten(-2)
    dy = dy.float()
    d = dy * weight
    mean = (d * normed).unflatten(-1, (groups, -1)).mean(-1, keepdim=True)
    dv = (d - (normed.unflatten(-1, (groups, -1)) * mean).flatten(-2)).unflatten(-1, (groups, -1))
    dv = (dv * rstd[..., None]).flatten(-2)
    dgate = None
    if gate is not None:
        dgate = (dv * x.float() * (sigmoid * (1 + z * (1 - sigmoid)))).to(gate.dtype)
        dv = dv * silu
    return dv.to(x.dtype), dgate, (dy * normed).sum(0)


def squared_relu(
    x: torch.Tensor, hadamard: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(x, 0)^2 of x bf16 [T, n], rounded once, and its amax fp32 [2] as in `rms_norm`."""
    if gpu.supports(x):
        return gpu.squared_relu(x, hadamard)
    y = F.relu(x).square()
    return y, measure(y, hadamard)
