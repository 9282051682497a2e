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


def _output(output: str) -> int:
    return {"operand": 0, "operand_fp32": 1, "codes": CODES}[output]


def _is_e4m3(fmt) -> bool:
    return fmt.name == "fp8"


def quantize_blocks(x: torch.Tensor, fmt, block: tuple[int, int], key, rotate: bool, output: str):
    """MXFP4 or FP8 of x, contiguous [rows, cols], in blocks of `block` elements of x (a transform is done already).

    -> (operand,) or (codes, scales) in x's layout; E2M1 codes are paired along the blocks' longer side.
    """
    rows, cols = x.shape
    pair = (1, 1) if _is_e4m3(fmt) else (1, 2) if block[0] == 1 or block[0] == block[1] else (2, 1)
    scales = None
    if output == "codes":
        out = torch.empty(rows // pair[0], cols // pair[1], dtype=torch.uint8)
        scales = torch.empty(-(-rows // block[0]), -(-cols // block[1]), dtype=torch.uint8)
    else:
        out = torch.empty(rows, cols, dtype=torch.float32 if output == "operand_fp32" else torch.bfloat16)
    words = None if key is None else key.words("cpu")
    load()[0].nvfp4_quantize_blocks(
        _pointer(x), DTYPES[x.dtype], *map(ctypes.c_int64, (rows, cols, *block)), int(_is_e4m3(fmt)), fmt.round_up,
        fmt.offset, fmt.least, None if words is None else _pointer(words), ctypes.c_int64(_output(output)), _pointer(out),
        None if scales is None else _pointer(scales),
    )  # fmt: skip
    return (out,) if scales is None else (out, scales)


def expand_blocks(codes: torch.Tensor, scales: torch.Tensor, fmt, dtype: torch.dtype) -> torch.Tensor:
    """Column codes and scales of MXFP4 or FP8, contiguous -> operand [rows, cols] in `dtype`."""
    rows, cols = codes.shape[0] * (1 if _is_e4m3(fmt) else 2), codes.shape[1]
    out = torch.empty(rows, cols, dtype=dtype)
    load()[0].nvfp4_expand_blocks(
        _pointer(codes.contiguous()), _pointer(scales.contiguous()), *map(ctypes.c_int64, (rows, cols, fmt.block)),
        int(_is_e4m3(fmt)), ctypes.c_int64(OPERANDS[dtype]), _pointer(out),
    )  # fmt: skip
    return out


def hadamard32_columns(x: torch.Tensor, signs: tuple[int, ...]) -> torch.Tensor:
    """The 32-point transform along x's rows. x: bf16, contiguous [rows, cols], rows % 32 == 0."""
    out = torch.empty_like(x)
    load()[0].nvfp4_hadamard32(
        _pointer(x), ctypes.c_int64(x.shape[0]), ctypes.c_int64(x.shape[1]), (ctypes.c_float * 32)(*signs), _pointer(out)
    )  # fmt: skip
    return out
