"""Speed of the quantize kernels beside a copy, of products beside their peak, of a linear beside BF16's."""

from __future__ import annotations

import argparse

import torch
from blackwell.products import PRODUCTS
from blackwell.report import CUDA, milliseconds, needs, table, te_problem
from blackwell.transformer_engine import quantizer
from nvfp4_kernels import SIGNS, CounterKey, amax, gemm, quantize
from nvfp4_kernels.native import gemm as native
from nvfp4_kernels.native.quantize import ROUNDING_CHIPS, quantize_rows_and_columns, quantize_square
from nvfp4_kernels.native.tensor import NativeTensor

from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.native import NativeLinear
from nvfp4_train.precision.recipe import BF16_PLAN, OPERANDS, LinearPlan
from nvfp4_train.precision.te import TransformerEngine

# Dense FP4 peaks in TFLOP/s, fp32 accumulation (NVIDIA's data sheets, without sparsity), by compute capability.
FP4_TFLOPS = {(10, 0): 9000.0, (10, 3): 14000.0, (12, 0): 1676.0}
TOKENS, LINEARS = 16384, ((2048, 8192), (5120, 20480))
BOTH_WAYS = 3.125  # bytes an element: 2 read, two times 4 bits and a byte for 16


def able() -> list[str]:
    """Native backends that run here."""
    return [name for name in native.BACKENDS if native.problem(name, CUDA) is None]


def quantizing(args: argparse.Namespace) -> str:
    """Speed of the quantize kernels beside a copy"""
    needs("triton")
    x = torch.randn(8192, 8192, device=CUDA).bfloat16()
    a = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    b = torch.empty_like(a)
    copy = 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e9
    both, keys = amax(x, SIGNS), (CounterKey(1, 2, 3, 4), CounterKey(1, 2, 3, 4, 1))

    def ours(rows: bool, columns: bool, stochastic: bool = False, hardware: bool = False) -> None:
        requests = [
            (both[i], keys[i] if stochastic else None) if wanted else None
            for i, wanted in enumerate((rows, columns))
        ]
        quantize_rows_and_columns(x, *requests, SIGNS, hardware)

    cases = {
        "amax, raw and transformed": (2, lambda: amax(x, SIGNS)),
        "rows": (2.5625, lambda: ours(True, False)),
        "columns, transformed": (2.5625, lambda: ours(False, True)),
        "rows + columns": (BOTH_WAYS, lambda: ours(True, True)),
        "rows + columns, stochastic": (BOTH_WAYS, lambda: ours(True, True, True)),
        "16x16, both ways": (BOTH_WAYS, lambda: quantize_square(x, both[0])),
    }
    if torch.cuda.get_device_capability() in ROUNDING_CHIPS:
        cases["rows + columns, cvt.rs"] = (BOTH_WAYS, lambda: ours(True, True, True, True))
    if te_problem() is None:
        rht = {"with_rht": True, "with_post_rht_amax": True}
        for name, options in {
            "rows + columns": rht,
            "rows + columns, stochastic": {**rht, "stochastic_rounding": True},
            "16x16, both ways": {"with_2d_quantization": True},
        }.items():
            theirs = quantizer(**options)
            cases[f"Transformer Engine, its amax inside: {name}"] = (
                BOTH_WAYS,
                lambda theirs=theirs: theirs(x),
            )
    rows = []
    for name, (size, call) in cases.items():
        ms = milliseconds(call)
        rate = size * x.numel() / ms / 1e9
        rows.append([name, f"{ms:.4f}", f"{rate:.2f}", f"{rate / copy:.0%}"])
    head = ["kernel", "ms", "TB/s that must move", "of the copy rate"]
    return f"8192 x 8192 bf16; copy {copy:.2f} TB/s.\n\n" + table(head, rows)


def products(args: argparse.Namespace) -> str:
    """Speed of every GEMM backend beside its peak"""
    needs("triton")
    peak = FP4_TFLOPS[torch.cuda.get_device_capability()]
    rows = []
    for m, n, k in PRODUCTS:
        left, right = (torch.randn(s, k, device=CUDA).bfloat16() for s in (m, n))
        plain = milliseconds(lambda l=left, r=right: l @ r.t())
        qa, qb = NativeTensor.of(quantize(left)), NativeTensor.of(quantize(right))
        cells = [f"{2e-9 * m * n * k / plain:.0f}"]
        for name in able():
            ms = milliseconds(lambda a=qa, b=qb, name=name: gemm(a, b, torch.bfloat16, name))
            flops = 2e-9 * m * n * k / ms
            cells.append(f"{flops:.0f} ({flops / peak:.0%})")
        rows.append([f"{m} x {n} x {k}", *cells])
    head = f"Peak {peak:g} TFLOP/s dense FP4; TFLOP/s (share of the peak), operands quantized before.\n\n"
    return head + table(["M x N x K", "bf16", *able()], rows)


def linears(args: argparse.Namespace) -> str:
    """Speed of a quantized linear, forward and backward, beside BF16's"""
    needs("triton")
    engines = {"bf16": None, "emulated": None, **{name: NativeLinear(name) for name in able()}}
    te = None if te_problem() else TransformerEngine(PrecisionConfig(name="nvfp4", backend="te"))
    rows = []
    for n_in, n_out in LINEARS:
        if te is not None:
            engines["te"] = te.linear(n_in, n_out)
        x = torch.randn(TOKENS, n_in, device=CUDA).bfloat16().requires_grad_()
        dy = torch.randn(TOKENS, n_out, device=CUDA).bfloat16()
        cells = {}
        for name, engine in engines.items():
            linear = Linear(n_in, n_out, device="cuda")
            torch.nn.init.normal_(linear.weight, std=n_in**-0.5)
            linear.engine = engine
            plan = BF16_PLAN if name == "bf16" else LinearPlan(frozenset(OPERANDS))
            linear.set_plan(plan, torch.tensor([1, 2, 3, 4], device=CUDA))
            linear.prepare_weight()

            def step(linear=linear, x=x, dy=dy) -> None:
                x.grad = linear.weight.grad = None
                linear(x).backward(dy)

            cells[name] = milliseconds(step)
            linear.engine = None
            if isinstance(engine, NativeLinear):
                engine.release()
        plain = cells["bf16"]
        rows.append([f"{n_in} -> {n_out}", *(f"{ms:.3f} ({ms / plain:.2f})" for ms in cells.values())])
    head = f"{TOKENS} tokens; ms (beside bf16). Ours with weights quantized before, Transformer Engine's inside.\n\n"
    return head + table(["linear", *engines], rows)


CHECKS = [quantizing, products, linears]
