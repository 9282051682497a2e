"""alpha * a b^T (+ what is there) by cuBLAS with alpha in device memory, which PyTorch does not offer.

Alpha is applied to the fp32 sums, before their one rounding, without a host sync and without a pass of its own.
PyTorch's own handle, stream and workspace are used; partial sums stay in fp32.
"""

from __future__ import annotations

import ctypes
import functools

import torch

_HOST, _DEVICE = 0, 1  # cublasPointerMode_t
_N, _T = 0, 1  # cublasOperation_t
_R_32F, _R_16BF = 0, 14  # cudaDataType_t
_COMPUTE_32F = 68
_GEMM_DEFAULT = -1
_NO_REDUCED_PRECISION_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """(the library that PyTorch itself uses, its name), or (None, reason)."""
    if torch.version.cuda is None:
        return None, "this PyTorch has no cuBLAS"
    torch.cuda.current_blas_handle()  # loads it
    name = f"libcublas.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name), name
    except OSError as e:
        return None, str(e)


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _layout(t: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
    """(tensor, whether its last dimension is contiguous, the other's stride)."""
    if t.stride(1) == 1 and t.stride(0) >= t.shape[1]:
        return t, True, t.stride(0)
    if t.stride(0) == 1 and t.stride(1) >= t.shape[0]:
        return t, False, t.stride(1)
    t = t.contiguous()
    return t, True, t.shape[1]


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: torch.Tensor | None = None,
) -> torch.Tensor:
    """alpha * a b^T. a: bf16 [M, K], b: bf16 [N, K], alpha: fp32 scalar on the device or None for 1 -> [M, N].

    Either may be transposed in memory. `accumulate`: contiguous [M, N] of `out_dtype`, to which the product is added in
    place, on the fp32 sums, in the pass that writes it. Raises RuntimeError when cuBLAS refuses.
    """
    library = load()[0]
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device) if accumulate is None else accumulate
    a, a_rows, lda = _layout(a)
    b, b_rows, ldb = _layout(b)
    alpha = _constant(1.0, a.device) if alpha is None else alpha
    beta = _constant(0.0 if accumulate is None else 1.0, a.device)
    pointer = ctypes.c_void_p
    with torch.cuda.device(a.device):
        handle = pointer(torch.cuda.current_blas_handle())
        mode = ctypes.c_int()
        library.cublasGetMathMode(handle, ctypes.byref(mode))
        library.cublasSetMathMode(handle, mode.value | _NO_REDUCED_PRECISION_SUMS)
        library.cublasSetPointerMode_v2(handle, _DEVICE)
        # cuBLAS counts columns first: there the row-major result is out^T = b a^T.
        status = library.cublasGemmEx(
            handle, _T if b_rows else _N, _N if a_rows else _T, n, m, k,
            pointer(alpha.data_ptr()), pointer(b.data_ptr()), _R_16BF, ldb, pointer(a.data_ptr()), _R_16BF, lda,
            pointer(beta.data_ptr()), pointer(out.data_ptr()), _R_32F if out_dtype == torch.float32 else _R_16BF, n,
            _COMPUTE_32F, _GEMM_DEFAULT,
        )  # fmt: skip
        library.cublasSetPointerMode_v2(handle, _HOST)
        library.cublasSetMathMode(handle, mode.value)
    if status:
        raise RuntimeError(f"cuBLAS refused a {m} x {n} x {k} product (status {status})")
    return out
