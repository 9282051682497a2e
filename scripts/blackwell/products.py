"""Products on FP4 tensor cores against exact and emulated ones."""

from __future__ import annotations

import argparse

import torch
from blackwell.report import CUDA, Check, Failed, needs, table
from nvfp4_kernels import gemm, quantize
from nvfp4_kernels.native import gemm as native
from nvfp4_kernels.native import self_test

# M, N, K of up_proj's three products, 16384 tokens, in the 125M, 1B, 8B and 12B models.
PRODUCTS = [
    shape
    for hidden, wide in ((768, 3072), (2048, 8192), (4096, 21504), (5120, 20480))
    for shape in ((16384, wide, hidden), (16384, hidden, wide), (wide, hidden, 16384))
]


def products_of(backend: str) -> Check:
    def check(args: argparse.Namespace) -> str:
        needs(backend)
        for shape in (*self_test.SHAPES, (16, 16, 16), (128, 4096, 2048), (1040, 528, 4096)):
            if found := self_test.product_problem(backend, CUDA, *shape):
                raise Failed(found)
        rows = []
        for m, n, k in PRODUCTS:
            a, b = (quantize(torch.randn(s, k, device=CUDA).bfloat16()) for s in (m, n))
            emulated = gemm(a, b, torch.float32)
            difference = gemm(a, b, torch.float32, backend) - emulated
            rows.append([f"{m} x {n} x {k}", difference.abs().max() / emulated.square().mean().sqrt()])
        text = table(
            ["M x N x K", "largest difference from the emulated product, over its root mean square"],
            [[shape, f"{value:.2e}"] for shape, value in rows],
        )
        if not all(value < 1e-4 for _, value in rows):
            raise Failed(text)
        return "Exact where sums are exact (every bit).\n\n" + text

    check.__doc__ = f"Products of {backend} against exact and emulated ones"
    return check


CHECKS = [products_of(backend) for backend in native.BACKENDS]
