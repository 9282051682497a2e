"""The emulated FP4 GEMM: exact operands, fp32 accumulation, the tensor scales applied once.

An FP4 tensor core sums e2m1 x e2m1 products times their block scales in fp32 and multiplies by the tensor scales
at the end. Operands here are those block-scaled numbers, exact in bf16, so a bf16 matrix product with fp32
accumulation computes the same sum up to its order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from nvfp4_kernels import cublas
from nvfp4_kernels.format import QuantizedTensor, tensor_scale
from nvfp4_kernels.native import gemm as native
from nvfp4_kernels.native.tensor import NativeTensor
from nvfp4_kernels.triton import ops as gpu

BACKENDS = ("auto", "emulated", *native.BACKENDS)
Operand = QuantizedTensor | NativeTensor | torch.Tensor


def gemm(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    accumulate: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [M, K] x b [N, K]^T -> [M, N] in `out_dtype` (bf16 or fp32); added to `accumulate` (contiguous, of that dtype), in
    place, when that is given: the emulated product on GPUs and Triton's add it to their fp32 sums, the others afterwards.

    A plain bf16 tensor stands for an operand that is not quantized (its tensor scale is 1). `auto` is `emulated`, which runs
    everywhere; `triton` and `cublas` use FP4 tensor cores, take two quantized operands, and raise ValueError where they
    cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown GEMM backend {backend!r}; there are {', '.join(BACKENDS)}")
    alpha = scale_product([q.amax for q in (a, b) if not isinstance(q, torch.Tensor)])
    if backend in native.BACKENDS:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            raise ValueError(f"the {backend} GEMM multiplies two quantized operands")
        return native.gemm(a, b, alpha, out_dtype, backend, accumulate)
    return scaled_matmul(_operand(a), _operand(b), alpha, out_dtype, accumulate)


def gemm_report(device: torch.device | str = "cpu") -> str:
    """How products are computed on `device`, for the log; where it is not the fast way, why."""
    kind, text = torch.device(device).type, "exact bf16 operands, fp32 sums"
    if kind == "cuda" and cublas.load()[0] is None:
        text += f" by torch.mm with the tensor scales in a pass of their own, since cuBLAS is not found: {cublas.load()[1]}"
    if kind == "cpu" and not cpu_has_bf16_matmul():
        text += " in fp32, since this processor has no bf16 products"
    return text


def scale_product(amaxes: list[torch.Tensor]) -> torch.Tensor | None:
    """Product of the tensor scales g = amax / 2688 of the quantized operands: fp32 scalar; None when there is none."""
    if not amaxes:
        return None
    if gpu.supports(amaxes[0]):
        return gpu.scale_product(amaxes)
    return functools.reduce(torch.mul, [tensor_scale(a) for a in amaxes])


def _operand(q: Operand) -> torch.Tensor:
    if isinstance(q, NativeTensor):
        q = q.plain()
    return q.operand() if isinstance(q, QuantizedTensor) else q


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: torch.Tensor | None = None,
) -> torch.Tensor:
    """alpha * a b^T with fp32 accumulation and one rounding; added to `accumulate` as in `gemm`.

    a: bf16 [M, K], b: bf16 [N, K], alpha: fp32 scalar.
    """
    if a.device.type == "cuda" and cublas.load()[0] is not None:
        return cublas.matmul(a, b, alpha, out_dtype, accumulate)
    if a.device.type == "cpu":
        product = _matmul_cpu(a, b, alpha, out_dtype)
    else:
        product = torch.mm(a, b.t(), out_dtype=torch.float32)
        product = (product if alpha is None else product.mul_(alpha)).to(out_dtype)
    return product if accumulate is None else accumulate.add_(product)


@functools.cache
def cpu_has_bf16_matmul() -> bool:
    """Whether oneDNN multiplies bf16 matrices with fp32 accumulation on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _matmul_cpu(
    a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    factor = 1.0 if alpha is None else float(alpha)  # on the CPU reading a scalar is no sync
    if out_dtype == torch.bfloat16 and cpu_has_bf16_matmul():
        # oneDNN applies alpha to the fp32 sums, before their one rounding.
        return torch.addmm(a.new_zeros(1, b.shape[0]), a, b.t(), beta=0, alpha=factor)
    with _bf16_matrix_units():
        out = torch.addmm(
            torch.zeros(1, b.shape[0], dtype=torch.float32, device=a.device),
            a.float(),
            b.float().t(),
            beta=0,
            alpha=factor,
        )
    return out.to(out_dtype)


@contextlib.contextmanager
def _bf16_matrix_units() -> Iterator[None]:
    """Allow fp32 products on the bf16 units where oneDNN has such a kernel (AMX has; AVX-512 computes in fp32): nothing is
    lost, since every fp32 input here is a bf16 number."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if cpu_has_bf16_matmul() else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
