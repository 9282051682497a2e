"""The native GEMM by cuBLAS, through torch's scaled matrix product: 1x16 E4M3 scales, swizzled, and a tensor scale each."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from nvfp4_kernels.native.tensor import NativeTensor


def matmul(
    a: NativeTensor, b: NativeTensor, alpha: torch.Tensor, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """out = (out +) alpha * a b^T. cuBLAS multiplies alpha into the fp32 sums; accumulation is a pass of its own."""
    scaling = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    layout = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    product = F.scaled_mm(
        _elements(a), _elements(b).t(),
        [a.scales, alpha.reshape(1)], scaling, [b.scales, _one(alpha.device)], scaling,
        swizzle_a=layout, swizzle_b=layout, output_dtype=out.dtype,
    )  # fmt: skip
    return out.add_(product) if accumulate else out.copy_(product)


def _elements(q: NativeTensor) -> torch.Tensor:
    """[rows, cols/2] pairs, cols rounded up to 32: the scales of what is added are zero."""
    rows, stride = q.codes.shape[0], q.codes.stride(0)
    return q.codes.as_strided((rows, stride), (stride, 1)).view(torch.float4_e2m1fn_x2)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)
