"""Proofs on the machine itself that the native kernels give the bits they must: exact products, and the reference's codes.

Their data make every sum exact in fp32 whatever its order, so that results are compared by bits.
"""

from __future__ import annotations

import torch

from nvfp4_kernels.format import BLOCK, QuantizedTensor
from nvfp4_kernels.gemm import gemm
from nvfp4_kernels.hadamard import SIGNS
from nvfp4_kernels.native import quantize as native
from nvfp4_kernels.native.tensor import NativeTensor, transposed_square
from nvfp4_kernels.quantize import SQUARE_BLOCK, amax, quantize, quantize_rows_and_columns
from nvfp4_kernels.random_bits import ROLE_COLUMNS, CounterKey

SHAPES = ((144, 272, 336), (272, 400, 208), (256, 256, 1024))  # M, N, K: ragged ones too


def exact_operand(rows: int, cols: int, device: torch.device, seed: int) -> QuantizedTensor:
    """Random codes with block scales of 1/2, 1 and 2 and a tensor scale of 1: sums of 2^12 products are exact in fp32."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=draw)
    exponents = torch.randint(-1, 2, (rows, cols // BLOCK), generator=draw)
    scales = (2.0 ** exponents.float()).to(torch.float8_e4m3fn)
    q = QuantizedTensor(codes, scales, torch.tensor(2688.0), (1, BLOCK))
    return QuantizedTensor(q.codes.to(device), q.scales.to(device), q.amax.to(device), q.block)


def product_problem(backend: str, device: torch.device, m: int, n: int, k: int) -> str | None:
    """What is wrong with one M x N x K product of `backend`; None when every bit is right."""
    a, b = exact_operand(m, k, device, 1), exact_operand(n, k, device, 2)
    exact = a.operand(torch.float64) @ b.operand(torch.float64).t()
    there = torch.randint(-8, 8, (m, n), device=device).float()
    cases = {
        "fp32": (gemm(a, b, torch.float32, backend), exact.float()),
        "bf16": (gemm(a, b, torch.bfloat16, backend), exact.to(torch.bfloat16)),
        "fp32 added": (gemm(a, b, torch.float32, backend, there.clone()), (exact + there).float()),
    }
    for name, (got, expected) in cases.items():
        if wrong := int((got != expected).sum()):
            return f"{m} x {n} x {k} to {name}: {wrong} of {got.numel()} results are wrong"
    return None


def quantizer_problem(device: torch.device, rows: int, cols: int, hardware: bool = False) -> str | None:
    """What differs between the native quantize kernels on `device` and the reference; None when no bit does."""
    draw = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=draw) * torch.exp(2 * torch.randn(rows, 1, generator=draw))
    x[:, :BLOCK], x[3, 20:40] = 0, -0.0
    x = x.bfloat16()
    amaxes = amax(x, SIGNS, "reference")
    there = x.to(device)
    for rounding in ("stochastic",) if hardware else ("nearest", "stochastic"):
        keys = [None, None]
        if rounding == "stochastic":
            keys = [CounterKey(5, 7, 1, 9), CounterKey(2**32 - 1, 2**32 - 2, 1, 9, ROLE_COLUMNS)]
        requests = [(amaxes[i], keys[i], "codes") for i in range(2)]
        expected = quantize_rows_and_columns(x, *requests, SIGNS, "reference")
        requests = [(amaxes[i].to(device), keys[i]) for i in range(2)]
        got = native.quantize_rows_and_columns(there, *requests, SIGNS, hardware)
        for side, g, e in zip(("rows", "columns"), got, expected, strict=True):
            if problem := _difference(g, e):
                return f"{side}, {'cvt.rs' if hardware else rounding}: {problem}"
    square = quantize(x, SQUARE_BLOCK, backend="reference")
    got = native.quantize_square(there, square.amax.to(device))
    for side, g, e in zip(
        ("16x16", "16x16 transposed"), got, (square, transposed_square(square)), strict=True
    ):
        if problem := _difference(g, e):
            return f"{side}: {problem}"
    return None


def _difference(got: NativeTensor, expected: QuantizedTensor) -> str | None:
    codes, scales = got.codes.cpu(), got.scales.view(torch.uint8).cpu()
    wanted = NativeTensor.of(expected)
    if wrong := int((codes != wanted.codes).sum()):
        return f"{wrong} of {codes.numel()} bytes of codes differ"
    if wrong := int((scales != wanted.scales.view(torch.uint8)).sum()):
        return f"{wrong} of {scales.numel()} bytes of scales differ"
    return None


def problem(backend: str, device: torch.device) -> str | None:
    """What is wrong with `backend` and the quantize kernels on `device`: a few small products, some seconds."""
    found = quantizer_problem(device, 144, 208)
    return found or next((p for shape in SHAPES if (p := product_problem(backend, device, *shape))), None)
