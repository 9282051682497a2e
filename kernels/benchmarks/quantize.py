"""Quantize kernels and the emulated GEMM of this machine, beside the ceilings measured in the same run (`make bench`).

On a machine with a CUDA GPU the tables are `quantize_gpu.py`'s. Bandwidth counts only the bytes that must move; the copy
rate counts bytes read and written. OMP_NUM_THREADS sets the number of threads.
"""

from __future__ import annotations

import functools
import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nvfp4_kernels import ROLE_COLUMNS, SIGNS, CounterKey, amax, backend_report, quantize
from nvfp4_kernels import quantize_rows_and_columns as both_of
from nvfp4_kernels.gemm import scale_product, scaled_matmul

ROWS, COLUMNS = 4096, 1024  # tokens, channels
GEMMS = ((2048, 2048, 2048), (4096, 1024, 2048), (1024, 4096, 1024))  # M, N, K


def best_ms(call: Callable[[], object]) -> float:
    """Shortest time of a call, of at least ten and a second's worth: whatever else the machine does only adds to it."""
    times = []
    while len(times) < 10 or sum(times) < 1:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def copy_rate(source: torch.Tensor) -> float:
    """Bytes read and written in a second by copies of `source`."""
    target = torch.zeros_like(source)
    return 2 * source.nbytes / best_ms(lambda: target.copy_(source)) * 1e3


def kernels() -> None:
    """Each quantize kernel on a bf16 matrix: time, bandwidth, share of the copy rate."""
    x = torch.randn(ROWS, COLUMNS).bfloat16()
    ceiling, memory = copy_rate(x), copy_rate(torch.zeros(1 << 28, dtype=torch.uint8))
    raw, turned = amax(x, SIGNS)
    row_key, column_key = CounterKey(1, 2, 3, 4), CounterKey(1, 2, 3, 4, ROLE_COLUMNS)
    codes = quantize(x, transpose=True, hadamard=SIGNS, amax=turned)
    cases = {
        "amax": (2, lambda: amax(x)),
        "amax, raw and after Hadamard": (2, lambda: amax(x, SIGNS)),
        "16x16 weights -> operand": (4, lambda: quantize(x, (16, 16), amax=raw, output="operand")),
        "rows nearest -> operand": (4, lambda: both_of(x, (raw, None, "operand"), None)),
        "rows nearest -> codes": (2.5625, lambda: both_of(x, (raw, None, "codes"), None)),
        "rows stochastic -> operand": (4, lambda: both_of(x, (raw, row_key, "operand"), None)),
        "columns nearest -> codes": (2.5625, lambda: both_of(x, None, (turned, None, "codes"), SIGNS)),
        "rows -> operand, columns -> codes": (
            4.5625,
            lambda: both_of(x, (raw, None, "operand"), (turned, None, "codes"), SIGNS),
        ),
        "rows + columns stochastic -> operands": (
            8,  # the columns' in fp32, as the weight gradient takes them here
            lambda: both_of(x, (raw, row_key, "operand"), (turned, column_key, "operand_fp32"), SIGNS),
        ),
        "column codes -> fp32 operand": (4.5625, lambda: codes.operand(torch.float32)),
    }
    print(
        f"{ROWS} x {COLUMNS} bf16, Hadamard on columns; copy rate {ceiling / 1e9:.1f} GB/s at this size, "
        f"{memory / 1e9:.1f} GB/s at 256 MiB"
    )
    print(f"{'kernel':<40}{'B/element':>10}{'ms':>9}{'GB/s':>8}{'of copy':>9}")
    for name, (size, call) in cases.items():
        ms = best_ms(call)
        rate = size * x.numel() / ms * 1e3
        print(f"{name:<40}{size:>10.4g}{ms:>9.2f}{rate / 1e9:>8.1f}{rate / ceiling:>9.0%}", flush=True)


def products() -> None:
    """The emulated GEMM of operands already quantized, against PyTorch's bf16 product of the same matrices."""
    print(
        f"{'GEMM M x N x K':<24}{'output':>9}{'ms':>9}{'GFLOP/s':>9}{'bf16 ms':>9}{'GFLOP/s':>9}{'of bf16':>9}"
    )
    for m, n, k in GEMMS:
        a, b = (quantize(torch.randn(size, k).bfloat16(), output="operand") for size in (m, n))
        alpha = scale_product([a.amax, b.amax])
        left, right = a.operand(), b.operand()
        plain = best_ms(functools.partial(torch.mm, left, right.t()))
        for dtype in (
            torch.bfloat16,
            torch.float32,
        ):  # of the result, and on CPUs of the operands that give it fastest
            operands = left.to(dtype), right.to(dtype)
            ours = best_ms(functools.partial(scaled_matmul, *operands, alpha, dtype))
            rate, ceiling = (2e-6 * m * n * k / ms for ms in (ours, plain))
            print(
                f"{f'{m} x {n} x {k}':<24}{str(dtype)[6:]:>9}{ours:>9.2f}{rate:>9.0f}{plain:>9.2f}{ceiling:>9.0f}"
                f"{rate / ceiling:>9.0%}",
                flush=True,
            )


if __name__ == "__main__":
    if torch.cuda.is_available():
        runpy.run_path(str(Path(__file__).with_name("quantize_gpu.py")), run_name="__main__")
    else:
        threads, load = torch.get_num_threads(), os.getloadavg()[0]
        print(f"CPU threads {threads}, torch {torch.__version__}, quantize {backend_report()}")
        if load > threads / 2:
            print(f"The machine is busy (load average {load:.1f}): an idle one is faster than these numbers.")
        kernels()
        print()
        products()
