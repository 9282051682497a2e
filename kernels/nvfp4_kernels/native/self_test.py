"""Proofs on the machine itself that the native kernels give the bits they must: exact products, and the reference's codes.

Their data make every sum exact in fp32 whatever its order, so that results are compared by bits.
"""

from __future__ import annotations

import torch

from nvfp4_kernels.format import BLOCK, QuantizedTensor
from nvfp4_kernels.gemm import gemm
from nvfp4_kernels.hadamard import SIGNS
from nvfp4_kernels.native import fp8
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


def _uneven(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers drawn with rows of very different magnitudes, and among them zeros of both signs."""
    draw = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=draw) * torch.exp(2 * torch.randn(rows, 1, generator=draw))
    x[:, :BLOCK], x[3, 20:40] = 0, -0.0
    return x.to(dtype)


def quantizer_problem(
    device: torch.device, rows: int, cols: int, hardware: bool = False, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """What differs between the native quantize kernels on `device` and the reference; None when no bit does.

    `dtype`: of the input; columns are transformed if it is bf16.
    """
    x, signs = _uneven(rows, cols, dtype), SIGNS if dtype == torch.bfloat16 else None
    both = amax(x, signs, "reference")
    amaxes = both[0], both[1 if signs else 0]
    there = x.to(device)
    for rounding in ("stochastic",) if hardware else ("nearest", "stochastic"):
        keys = [None, None]
        if rounding == "stochastic":
            keys = [CounterKey(5, 7, 1, 9), CounterKey(2**32 - 1, 2**32 - 2, 1, 9, ROLE_COLUMNS)]
        requests = [(amaxes[i], keys[i], "codes") for i in range(2)]
        expected = quantize_rows_and_columns(x, *requests, signs, "reference")
        requests = [(amaxes[i].to(device), keys[i]) for i in range(2)]
        got = native.quantize_rows_and_columns(there, *requests, signs, hardware)
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


def rounding_grid(rows: int) -> torch.Tensor:
    """fp32 [rows, 4096], drawn from where rounding changes: multiples of 1/512 of E2M1's steps (with 8 random bits every
    threshold is one) and the fp32 numbers beside them. A maximum of 6 in every block and an amax of 2688 make all scales 1.
    """
    draw = torch.Generator().manual_seed(rows)
    size = (rows, 4096)
    low, step = torch.tensor(
        [(0, 0.5), (0.5, 0.5), (1, 0.5), (1.5, 0.5), (2, 1), (3, 1), (4, 2)]
    ).T  # E2M1's values below 6
    grid = (low[:, None] + step[:, None] * torch.arange(512) / 512).flatten()
    x = grid[torch.randint(len(grid), size, generator=draw)]
    beside = torch.randint(-1, 2, size, dtype=torch.int32, generator=draw)
    x = (x.view(torch.int32) + beside).clamp_(0).view(torch.float32)
    x = torch.where(torch.rand(size, generator=draw) < 0.5, -x, x)
    x[:, ::BLOCK] = 6
    return x


def rounding_problem(device: torch.device, rows: int = 4096) -> str | None:
    """What differs between stochastic rounding by `cvt.rs` and by the software rule on `device`; None when nothing does.

    On data like training's and, against the software kernels that `problem` has proved, on rows x 4096 thresholds: with
    4096 rows each grid point of each sign meets each random byte nearly three times, on average.
    """
    if found := quantizer_problem(device, 144, 208, hardware=True):
        return found
    x, key = rounding_grid(rows).to(device), CounterKey(11, 13, 0, 3)
    request = (torch.tensor(2688.0, device=device), key)
    hardware, software = (
        native.quantize_rows_and_columns(x, request, None, hardware_rounding=h)[0] for h in (True, False)
    )
    wrong = int((hardware.codes != software.codes).sum())
    return f"at thresholds {wrong} of {hardware.codes.numel()} bytes of codes differ" if wrong else None


def fp8_problem(device: torch.device, backend: str = "cublas") -> str | None:
    """What is wrong with the native FP8 products and quantize kernels on `device`; None when every bit is right."""
    if backend == "cublas" and (reason := fp8.problem(device)):
        return reason
    for m, n, k in SHAPES:
        if found := fp8_quantizer_problem(device, m, k) or fp8_product_problem(backend, device, m, n, k):
            return f"{m} x {n} x {k}: {found}"
    return None


def fp8_product_problem(backend: str, device: torch.device, m: int, n: int, k: int) -> str | None:
    """What is wrong with FP8 products M x N x K of `backend`: small integers times powers of two, whose sums in a block
    need 11 bits, so that any order and 14 bits give every bit."""
    draw = torch.Generator().manual_seed(m + n + k)
    x, w = (torch.randint(-3, 4, (size, k), generator=draw).float() for size in (m, n))
    powers = 2.0 ** torch.randint(-2, 3, (m, -(-k // fp8.BLOCK)), generator=draw)
    x = x * powers.repeat_interleave(fp8.BLOCK, 1)[:, :k]
    exact = x.double() @ w.double().t()
    a = fp8.quantize_rows_and_columns(x.to(device), True, False)[0]
    w = w.to(device)
    for blocks, b in (
        ("128x128", fp8.quantize_square(w)[0]),
        ("1x128", fp8.quantize_rows_and_columns(w, True, False)[0]),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            got = fp8.multiply(a, b, dtype, backend).cpu()
            if wrong := int((got != exact.to(dtype)).sum()):
                return f"{wrong} of {got.numel()} results to {dtype} of a product with blocks of {blocks} are wrong"
    return None


def fp8_quantizer_problem(
    device: torch.device, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """What differs between the FP8 quantize kernels on `device` and the reference; None when no bit does."""
    x = _uneven(rows, cols, dtype)
    got, expected = (
        (*fp8.quantize_rows_and_columns(t, True, True), *fp8.quantize_square(t)) for t in (x.to(device), x)
    )
    for side, g, e in zip(("rows", "columns", "128x128", "128x128 transposed"), got, expected, strict=True):
        if wrong := int((g.codes.cpu().view(torch.uint8) != e.codes.view(torch.uint8)).sum()):
            return f"{side}: {wrong} of {e.codes.numel()} codes differ"
        if wrong := int((g.scales.cpu() != e.scales).sum()):
            return f"{side}: {wrong} of {e.scales.numel()} scales differ"
    return None
