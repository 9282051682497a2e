"""Quantizing into the native GEMM's layout: kernels for Blackwell and, under the same signature, their reference."""

from __future__ import annotations

import torch

from nvfp4_kernels.native.gemm import CHIPS
from nvfp4_kernels.native.tensor import NativeTensor, transposed_square
from nvfp4_kernels.quantize import SQUARE_BLOCK
from nvfp4_kernels.quantize import quantize as portable_quantize
from nvfp4_kernels.quantize import quantize_rows_and_columns as portable_rows_and_columns
from nvfp4_kernels.random_bits import CounterKey
from nvfp4_kernels.triton.ops import OPTIONS, _key, _sign_bits, _words

BACKENDS = ("auto", "portable", "triton")
ROUNDING_CHIPS = ((10, 0), (10, 3))  # compute capabilities that have cvt.rs
Request = tuple[torch.Tensor, CounterKey | None]  # amax, key or None for nearest


def _kernels(x: torch.Tensor, backend: str):
    """The kernels, or None where the portable quantizer is to be laid out anew."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown native quantize backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "portable":
        return None
    if backend == "auto" and not (x.is_cuda and torch.cuda.get_device_capability(x.device) in CHIPS):
        return None
    from nvfp4_kernels.native import quantize_kernels

    return quantize_kernels


def quantize_rows_and_columns(
    x: torch.Tensor,
    rows: Request | None,
    columns: Request | None,
    hadamard: tuple[int, ...] | None = None,
    hardware_rounding: bool = False,
    backend: str = "auto",
) -> tuple[NativeTensor | None, NativeTensor | None]:
    """Row-wise and column-wise 1x16 results from one read of x [rows, cols] (multiples of 16; bf16 or fp32).

    The codes and scales of `nvfp4_kernels.quantize_rows_and_columns`, laid out for the native GEMM: the column result is
    [cols, rows]. `hardware_rounding`: stochastic rounding by `cvt.rs` (`ROUNDING_CHIPS` only; the portable quantizer has the
    software rule), whose equality only hardware can show: `self_test.rounding_problem`. `backend`: auto takes the kernels
    on FP4 chips, the portable quantizer elsewhere.
    """
    kernels = _kernels(x, backend)
    if kernels is None:
        wanted = [None if request is None else (*request, "codes") for request in (rows, columns)]
        results = portable_rows_and_columns(x, *wanted, hadamard)
        return tuple(None if q is None else NativeTensor.of(q) for q in results)
    m, n = x.shape
    arguments, results = [], []
    for request, shape in ((rows, (m, n)), (columns, (n, m))):
        out = None if request is None else NativeTensor.empty(*shape, request[0])
        results.append(out)
        arguments += [None] * 5 if out is None else [out.amax, _key(request[1], x.device), *_arguments(out)]
    kernels.quantize_kernel[(_tiles(m, n),)](
        _words(x), m, n, *arguments, BF16=x.dtype == torch.bfloat16,
        ROW=_rounding(rows, hardware_rounding), COLUMN=_rounding(columns, hardware_rounding),
        SIGNS=_sign_bits(hadamard), num_warps=2, **OPTIONS,
    )  # fmt: skip
    return tuple(results)


def quantize_square(
    x: torch.Tensor, amax: torch.Tensor, backend: str = "auto"
) -> tuple[NativeTensor, NativeTensor]:
    """16x16 blocks of x [rows, cols], nearest: the matrix and its transpose [cols, rows], the same numbers."""
    kernels = _kernels(x, backend)
    if kernels is None:
        q = portable_quantize(x, SQUARE_BLOCK, amax=amax)
        return NativeTensor.of(q), NativeTensor.of(transposed_square(q))
    (m, n), bf16 = x.shape, x.dtype == torch.bfloat16
    rows, columns = NativeTensor.empty(m, n, amax), NativeTensor.empty(n, m, amax)
    kernels.quantize_square_kernel[(_tiles(m, n),)](
        _words(x), m, n, amax, *_arguments(rows, torch.int16), *_arguments(columns), bf16, num_warps=2, **OPTIONS
    )  # fmt: skip
    return rows, columns


def _rounding(request: Request | None, hardware: bool) -> str | None:
    if request is None:
        return None
    return "nearest" if request[1] is None else "hardware" if hardware else "stochastic"


def _tiles(rows: int, cols: int) -> int:
    return -(-rows // 64) * -(-cols // 64)


def _arguments(q: NativeTensor, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, int, torch.Tensor]:
    """(codes as words of `dtype`, how many of them a row is apart, scales as bytes)."""
    rows, stride = q.shape[0], q.codes.stride(0)
    codes = q.codes.as_strided((rows, stride), (stride, 1)).view(dtype)
    return codes, codes.stride(0), q.scales.view(torch.uint8)
