"""Times of kernels on a CUDA GPU, as bandwidth beside the copy rate of the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.testing import do_bench, do_bench_cudagraph


def median_ms(call: Callable[[], object]) -> float:
    """Median time of a call, caches flushed before it."""
    return do_bench(call, warmup=20, rep=100, return_mode="median")


def kernel_ms(call: Callable[[], object]) -> float:
    """Median time of a call replayed from a CUDA graph: the kernel without its launch. Its data exceed the caches."""
    return do_bench_cudagraph(call, rep=30, return_mode="median")


def copy_rate() -> float:
    """Bytes read and written in a second by a large device-to-device copy."""
    a = torch.randint(0, 256, (1 << 31,), dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / median_ms(lambda: b.copy_(a)) * 1e3


def table(title: str, elements: int, cases: dict[str, tuple[float, Callable[[], object]]]) -> None:
    """Print time, bandwidth and share of the copy rate. cases: {kernel: (bytes an element that must move, call)}."""
    ceiling = copy_rate()
    print(f"{title}; copy rate {ceiling / 1e12:.2f} TB/s")
    print(f"{'kernel':<40}{'B/element':>10}{'ms':>9}{'GB/s':>8}{'of copy':>9}")
    for name, (size, call) in cases.items():
        ms = kernel_ms(call)
        rate = size * elements / ms * 1e3
        print(f"{name:<40}{size:>10.4g}{ms:>9.4f}{rate / 1e9:>8.0f}{rate / ceiling:>9.0%}", flush=True)
