"""Bits of every quantize kernel against the reference, and of stochastic rounding in hardware."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from blackwell.report import CUDA, Failed, Skip, needs
from nvfp4_kernels import (
    FP8,
    MXFP4,
    ROLE_COLUMNS,
    SIGNS,
    CounterKey,
    amax,
    backend_report,
    quantize,
    quantize_blocks,
    quantize_rows_and_columns,
)
from nvfp4_kernels.native import self_test
from nvfp4_kernels.native.quantize import ROUNDING_CHIPS

DTYPES = (torch.bfloat16, torch.float32)
SMALL = ((32, 16), (288, 208))  # ragged: no whole tiles, no whole blocks of 128
LARGE = ((2048, 4096),)


def native_nvfp4(args: argparse.Namespace) -> str:
    """Bits of the native NVFP4 quantize kernels"""
    needs("triton")
    shapes = ((16, 16), (144, 208), (256, 1024), *LARGE)
    for dtype in DTYPES:
        for shape in shapes:
            if found := self_test.quantizer_problem(CUDA, *shape, dtype=dtype):
                raise Failed(f"{dtype}, {shape}: {found}")
    return (
        f"Rows and columns (of bf16 transformed; nearest, stochastic), 16x16 weights both ways, bf16 and fp32, {shapes}: "
        "no bit differs from the reference."
    )


def portable(args: argparse.Namespace) -> str:
    """Bits of the portable quantize kernels: NVFP4, MXFP4, FP8"""
    gpu = torch.cuda.is_available()
    device, shapes = (CUDA, SMALL + LARGE) if gpu else (torch.device("cpu"), SMALL)
    count = 0
    for dtype in DTYPES:
        for shape in shapes:
            draw = torch.Generator().manual_seed(sum(shape))
            x = torch.randn(shape, generator=draw) * torch.exp(2 * torch.randn(shape[0], 1, generator=draw))
            x[:, :16], x[3, 4:12] = 0, -0.0
            x = x.to(dtype)
            for (name, got), (_, expected) in zip(
                results(x.to(device), "auto"), results(x, "reference"), strict=True
            ):
                wrong = int((got.cpu().view(torch.uint8) != expected.view(torch.uint8)).sum())
                if wrong:
                    raise Failed(f"{name} of {dtype} {shape}: {wrong} bytes differ")
                count += 1
    return (
        f"{count} tensors of bf16 and fp32, {shapes}, on {device} ({backend_report(device)}): no bit differs."
    )


def results(x: torch.Tensor, backend: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all that the portable quantizers give for x."""
    signs = SIGNS if x.dtype == torch.bfloat16 else None
    both = amax(x, signs, backend)
    yield "amax", both.view(torch.int32)
    values = both[0], both[1 if signs else 0]
    keys = CounterKey(5, 7, 1, 9), CounterKey(2**32 - 1, 2**32 - 2, 1, 9, ROLE_COLUMNS)
    made = {}
    for rounding, (row_key, column_key) in {"nearest": (None, None), "stochastic": keys}.items():
        requests = (values[0], row_key, "codes"), (values[1], column_key, "codes")
        rows, columns = quantize_rows_and_columns(x, *requests, signs, backend)
        made |= {f"NVFP4 rows, {rounding}": rows, f"NVFP4 columns, {rounding}": columns}
        for turned in (False, True):
            key = column_key if turned else row_key
            q = quantize_blocks(
                x, MXFP4, key=key, transpose=turned, rotate=turned and bool(signs), backend=backend
            )
            made[f"MXFP4 {'columns' if turned else 'rows'}, {rounding}"] = q
    made["NVFP4 16x16"] = quantize(x, (16, 16), amax=values[0], backend=backend)
    made["FP8 rows"] = quantize_blocks(x, FP8, backend=backend)
    made["FP8 columns"] = quantize_blocks(x, FP8, transpose=True, backend=backend)
    for fmt in (MXFP4, FP8):
        made[f"{fmt.name} square"] = quantize_blocks(x, fmt, square=True, backend=backend)
    for name, q in made.items():
        yield f"{name}: codes", q.codes.contiguous()
        yield f"{name}: scales", q.scales.contiguous()


def native_fp8(args: argparse.Namespace) -> str:
    """Bits of the FP8 quantize kernels in the layout of block-scaled products"""
    if not torch.cuda.is_available():
        raise Skip("no CUDA GPU is found")
    for dtype in DTYPES:
        for shape in (*self_test.SHAPES, (128, 2048, 4096)):
            if found := self_test.fp8_quantizer_problem(CUDA, shape[0], shape[2], dtype):
                raise Failed(f"{dtype}, {shape[0]} x {shape[2]}: {found}")
    return "Rows, columns and 128x128 both ways, of bf16 and fp32: no bit differs from the reference."


def hardware_rounding(args: argparse.Namespace) -> str:
    """Stochastic rounding by cvt.rs against the software rule (precision.hardware_rounding)"""
    needs("triton")
    if torch.cuda.get_device_capability() not in ROUNDING_CHIPS:
        raise Skip("this chip has no cvt.rs")
    if found := self_test.rounding_problem(CUDA) or self_test.quantizer_problem(
        CUDA, *LARGE[0], hardware=True
    ):
        raise Failed(f"cvt.rs rounds otherwise than the software rule, so the option must stay off: {found}")
    return "No bit differs, at 16 million thresholds and on drawn data: the option may be switched on."


CHECKS = [portable, native_fp8, native_nvfp4, hardware_rounding]
