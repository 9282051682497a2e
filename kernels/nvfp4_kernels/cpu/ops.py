"""PyTorch tensors in and out of the C++ kernels. Shapes and layouts as in `quantize.cpp`."""

from __future__ import annotations

import ctypes

import torch

from nvfp4_kernels.cpu.build import load
from nvfp4_kernels.format import BLOCK

DTYPES = {torch.bfloat16: 0, torch.float32: 1}
OPERANDS = {torch.bfloat16: 0, torch.float32: 1}
CODES = 2


class Half(ctypes.Structure):
    """One orientation of the result (struct Half in quantize.cpp)."""

    _fields_ = [(name, ctypes.c_int64) for name in ("enabled", "output", "stochastic", "hadamard")] + [
        (name, ctypes.c_void_p) for name in ("amax", "key", "operand", "codes", "scales")
    ]


def available() -> bool:
    """Whether the compiled kernels can be had on this machine."""
    return load()[0] is not None


def supports(x: torch.Tensor) -> bool:
    """Whether the compiled kernels take this tensor."""
    return x.device.type == "cpu" and x.dtype in DTYPES and available()


def _signs(hadamard: tuple[int, ...] | None) -> ctypes.Array | None:
    return None if hadamard is None else (ctypes.c_float * BLOCK)(*hadamard)


def _pointer(t: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


def amax_pair(x: torch.Tensor, hadamard: tuple[int, ...] | None) -> torch.Tensor:
    """fp32 [2]: amax of x, and of its transform along rows (0 without `hadamard`). x: contiguous [rows, cols]."""
    out = torch.empty(2, dtype=torch.float32)
    load()[0].nvfp4_amax(
        _pointer(x),
        DTYPES[x.dtype],
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        _signs(hadamard),
        _pointer(out),
    )
    return out


def _half(
    shape: tuple[int, int],
    columns: bool,
    amax: torch.Tensor,
    key: torch.Tensor | None,
    output: torch.dtype | None,
    hadamard: bool = False,
) -> tuple[Half, tuple[torch.Tensor, ...]]:
    """A request and its result tensors; output None asks for codes, a dtype for the operand."""
    rows, cols = shape
    half = Half(enabled=1, stochastic=key is not None, hadamard=hadamard, amax=amax.data_ptr())
    half.key = None if key is None else key.data_ptr()
    if output is not None:
        half.output = OPERANDS[output]
        out = (torch.empty(rows, cols, dtype=output),)
        half.operand = out[0].data_ptr()
        return half, out
    half.output = CODES
    codes = torch.empty((rows // 2, cols) if columns else (rows, cols // 2), dtype=torch.uint8)
    scales = torch.empty((rows // BLOCK, cols) if columns else (rows, cols // BLOCK), dtype=torch.uint8)
    half.codes, half.scales = codes.data_ptr(), scales.data_ptr()
    return half, (codes, scales)


def quantize(
    x: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor | None, torch.dtype | None] | None,
    columns: tuple[torch.Tensor, torch.Tensor | None, torch.dtype | None] | None,
    hadamard: tuple[int, ...] | None = None,
) -> tuple[tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
    """Row-wise and column-wise 1x16 results from one read of x, contiguous [rows, cols].

    Each request is (amax, key words or None, operand dtype or None for codes); each result is (operand,) or
    (codes, scales) in memory layout: column results keep channels contiguous.
    """
    shape = tuple(x.shape)
    r, r_out = _half(shape, False, *rows) if rows else (Half(), None)
    c, c_out = _half(shape, True, *columns, hadamard is not None) if columns else (Half(), None)
    load()[0].nvfp4_quantize(
        _pointer(x),
        DTYPES[x.dtype],
        ctypes.c_int64(shape[0]),
        ctypes.c_int64(shape[1]),
        ctypes.byref(r),
        ctypes.byref(c),
        _signs(hadamard),
    )
    return r_out, c_out


def quantize_square(
    x: torch.Tensor, amax: torch.Tensor, output: torch.dtype | None
) -> tuple[torch.Tensor, ...]:
    """16x16 blocks, nearest. x: contiguous [rows, cols] -> (operand,) or (codes, scales)."""
    half, out = _half(tuple(x.shape), False, amax, None, output)
    load()[0].nvfp4_quantize_square(
        _pointer(x),
        DTYPES[x.dtype],
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        ctypes.byref(half),
    )
    return out


def expand_columns(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Column codes uint8 [rows/2, cols] and scales [rows/16, cols], contiguous -> operand [rows, cols] in `dtype`."""
    rows, cols = codes.shape[0] * 2, codes.shape[1]
    out = torch.empty(rows, cols, dtype=dtype)
    load()[0].nvfp4_expand_columns(
        _pointer(codes),
        _pointer(scales),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        OPERANDS[dtype],
        _pointer(out),
    )
    return out
