"""One front for the native GEMMs: which can run on a device, and running them."""

from __future__ import annotations

import importlib.util

import torch
from torch.nn import functional as F

from nvfp4_kernels.format import QuantizedTensor
from nvfp4_kernels.native.tensor import NativeTensor

BACKENDS = ("triton", "cublas")
# Compute capabilities with FP4 tensor cores that both compile for; 12.1 does with Triton 3.8 and newer, untried here.
CHIPS = ((10, 0), (10, 3), (12, 0))
CUDA = (12, 8)  # the first cuBLAS with FP4 products


def problem(backend: str, device: torch.device) -> str | None:
    """Why `backend` cannot run on `device`; None when it can."""
    if device.type != "cuda":
        return f"FP4 tensor cores are in Blackwell GPUs, not in a {device.type.upper()}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CHIPS:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"{name} (compute capability {major}.{minor}) has no FP4 tensor cores"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if backend == "cublas" and not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if backend == "cublas" and tuple(map(int, torch.version.cuda.split("."))) < CUDA:
        return f"cuBLAS multiplies FP4 from CUDA 12.8 on, and this torch brings {torch.version.cuda}"
    return None


def gemm(
    a: QuantizedTensor | NativeTensor, b: QuantizedTensor | NativeTensor, alpha: torch.Tensor, out_dtype: torch.dtype,
    backend: str, accumulate: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """alpha * a b^T (+ accumulate, in place) on FP4 tensor cores. Raises ValueError when `backend` cannot run there."""
    if reason := problem(backend, alpha.device):
        raise ValueError(f"the {backend} GEMM cannot run: {reason}")
    a, b = (q if isinstance(q, NativeTensor) else NativeTensor.of(q) for q in (a, b))
    if backend == "triton":
        from nvfp4_kernels.native.matmul_triton import matmul
    else:
        from nvfp4_kernels.native.matmul_cublas import matmul
    out = accumulate
    if out is None:
        out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=alpha.device)
    return matmul(a, b, alpha, out, accumulate is not None)
