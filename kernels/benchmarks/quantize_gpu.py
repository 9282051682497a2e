"""Quantize kernels and the quantized linear on one CUDA GPU, beside the ceilings measured in the same run.

    python kernels/benchmarks/quantize_gpu.py [kernels | producers | gemm | linear | fp8] ...

Bandwidth counts only the bytes that must move; the copy rate counts bytes read and written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
from nvfp4_kernels import ROLE_COLUMNS, SIGNS, CounterKey, amax, backend_report, gemm, producers, quantize
from nvfp4_kernels import quantize_rows_and_columns as both_of
from timing import median_ms, table

SIZE = 8192


def kernels() -> None:
    """Each quantize kernel on a bf16 matrix: time, bandwidth, share of the copy rate."""
    x = torch.randn(SIZE, SIZE, device="cuda").bfloat16()
    raw, turned = amax(x, SIGNS)
    fields = torch.tensor([1, 2, 3, 4], device="cuda")
    row_key, column_key = CounterKey(*fields), CounterKey(*fields, role=ROLE_COLUMNS)
    codes = quantize(x, transpose=True, hadamard=SIGNS, amax=turned)
    row_codes = quantize(x, amax=raw)
    cases = {
        "amax": (2, lambda: amax(x)),
        "amax, raw and after Hadamard": (2, lambda: amax(x, SIGNS)),
        "rows nearest -> operand": (4, lambda: both_of(x, (raw, None, "operand"), None)),
        "rows nearest -> codes": (2.5625, lambda: both_of(x, (raw, None, "codes"), None)),
        "rows stochastic -> operand": (4, lambda: both_of(x, (raw, row_key, "operand"), None)),
        "16x16 weights -> operand": (4, lambda: quantize(x, (16, 16), amax=raw, output="operand")),
        "columns nearest -> operand": (4, lambda: both_of(x, None, (turned, None, "operand"), SIGNS)),
        "columns nearest -> codes": (2.5625, lambda: both_of(x, None, (turned, None, "codes"), SIGNS)),
        "rows + columns nearest -> operands": (
            6,
            lambda: both_of(x, (raw, None, "operand"), (turned, None, "operand"), SIGNS),
        ),
        "rows -> operand, columns -> codes": (
            4.5625,
            lambda: both_of(x, (raw, None, "operand"), (turned, None, "codes"), SIGNS),
        ),
        "rows + columns nearest -> codes": (
            3.125,
            lambda: both_of(x, (raw, None, "codes"), (turned, None, "codes"), SIGNS),
        ),
        "rows + columns stochastic -> operands": (
            6,
            lambda: both_of(x, (raw, row_key, "operand"), (turned, column_key, "operand"), SIGNS),
        ),
        "column codes -> operand": (2.5625, codes.operand),
        "row codes -> operand": (2.5625, row_codes.operand),
    }
    table(f"{SIZE} x {SIZE} bf16, Hadamard on columns", x.numel(), cases)


def norms() -> None:
    """What makes a linear's input and measures it in the same pass, beside the copy rate. Bytes: inputs and result once."""
    x = torch.randn(2 * SIZE, SIZE // 2, device="cuda").bfloat16()
    scan, weight = torch.randn_like(x), torch.rand(SIZE // 2, device="cuda")
    z = torch.randn(2 * SIZE, SIZE, device="cuda").bfloat16()[:, : SIZE // 2]  # of a wider projection
    rstd, gated_rstd = (
        producers.rms_norm(scan, gate, weight, 1e-5, groups, measured=False)[1]
        for gate, groups in ((None, 1), (z, 8))
    )
    cases = {
        "RMSNorm + both amax": (4, lambda: producers.rms_norm(x, None, weight, 1e-5, 1, SIGNS)),
        "gated norm, 8 groups + both amax": (6, lambda: producers.rms_norm(scan, z, weight, 1e-5, 8, SIGNS)),
        "gated norm, 8 groups, unmeasured": (
            6,
            lambda: producers.rms_norm(scan, z, weight, 1e-5, 8, measured=False),
        ),
        "RMSNorm's gradients": (6, lambda: producers.rms_norm_backward(x, scan, None, rstd, weight)),
        "gated norm's gradients, 8 groups": (
            10,
            lambda: producers.rms_norm_backward(x, scan, z, gated_rstd, weight),
        ),
        "squared ReLU + both amax": (4, lambda: producers.squared_relu(x, SIGNS)),
    }
    table(f"{2 * SIZE} x {SIZE // 2} bf16", x.numel(), cases)
    x = x.view(-1, SIZE // 4)
    cases = {
        "RMSNorm + both amax": (4, lambda: producers.rms_norm(x, None, weight[: SIZE // 4], 1e-5, 1, SIGNS))
    }
    table(f"{4 * SIZE} x {SIZE // 4} bf16", x.numel(), cases)


def products() -> None:
    """The emulated GEMM against PyTorch's bf16 product of the same operands."""
    print(f"{'GEMM M x N x K':<28}{'output':>8}{'bf16 ms':>10}{'nvfp4 ms':>10}{'TFLOP/s':>9}{'ratio':>7}")
    for m, n, k in ((8192, 8192, 8192), (16384, 8192, 2048), (16384, 20480, 5120), (2048, 8192, 16384)):
        a, b = (quantize(torch.randn(s, k, device="cuda").bfloat16(), output="operand") for s in (m, n))
        left, right = a.operand(), b.operand().t()
        for dtype in (torch.bfloat16, torch.float32):
            plain = median_ms(lambda l=left, r=right, d=dtype: torch.mm(l, r, out_dtype=d))
            ours = median_ms(lambda l=a, r=b, d=dtype: gemm(l, r, d))
            print(
                f"{f'{m} x {n} x {k}':<28}{str(dtype)[6:]:>8}{plain:>10.3f}{ours:>10.3f}"
                f"{2e-9 * m * n * k / ours:>9.0f}{ours / plain:>7.2f}",
                flush=True,
            )


def native_fp8() -> None:
    """Hopper's FP8: the quantize kernels, the three products of a linear of 16384 tokens, and the linear, against bf16."""
    from nvfp4_kernels.native import fp8

    from nvfp4_train.precision.linear import Linear
    from nvfp4_train.precision.native_fp8 import Fp8Linear
    from nvfp4_train.precision.recipe import OPERANDS, LinearPlan

    x = torch.randn(SIZE, SIZE, device="cuda").bfloat16()
    cases = {
        "FP8 rows": (3, lambda: fp8.quantize_rows_and_columns(x, True, False)),
        "FP8 columns": (3, lambda: fp8.quantize_rows_and_columns(x, False, True)),
        "FP8 rows + columns": (4, lambda: fp8.quantize_rows_and_columns(x, True, True)),
        "FP8 128x128, both ways": (4, lambda: fp8.quantize_square(x)),
    }
    table(f"{SIZE} x {SIZE} bf16", x.numel(), cases)
    print(f"{'FP8 M x N x K':<28}{'blocks of B':>12}{'bf16 ms':>10}{'fp8 ms':>9}{'TFLOP/s':>9}{'ratio':>7}")
    tokens = 16384
    for n_in, n_out in ((2048, 8192), (5120, 20480)):
        for m, n, k, square in (
            (tokens, n_out, n_in, True),
            (tokens, n_in, n_out, True),
            (n_out, n_in, tokens, False),
        ):
            a, b = (torch.randn(size, k, device="cuda").bfloat16() for size in (m, n))
            dtype = torch.bfloat16 if square else torch.float32
            left = fp8.quantize_rows_and_columns(a, True, False)[0]
            right = fp8.quantize_square(b)[0] if square else fp8.quantize_rows_and_columns(b, True, False)[0]
            plain = median_ms(lambda a=a, b=b, d=dtype: torch.mm(a, b.t(), out_dtype=d))
            ours = median_ms(lambda a=left, b=right, d=dtype: fp8.multiply(a, b, d))
            print(
                f"{f'{m} x {n} x {k}':<28}{'128x128' if square else '1x128':>12}{plain:>10.3f}{ours:>9.3f}"
                f"{2e-9 * m * n * k / ours:>9.0f}{ours / plain:>7.2f}",
                flush=True,
            )
        linear = Linear(n_in, n_out, device="cuda")
        torch.nn.init.normal_(linear.weight, std=n_in**-0.5)
        weight = linear.weight.detach().bfloat16().requires_grad_()
        linear.engine = Fp8Linear("cublas")
        linear.set_plan(
            LinearPlan(frozenset(OPERANDS), format="fp8"), torch.tensor([1, 2, 3, 4], device="cuda")
        )
        linear.prepare_weight()
        x, dy = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (n_in, n_out))
        x.requires_grad_()

        def step(forward: Callable, parameter: torch.Tensor, x=x, dy=dy) -> None:
            x.grad = parameter.grad = None
            torch.autograd.backward(forward(x), dy)

        plain = median_ms(lambda s=step, w=weight: s(lambda t: torch.nn.functional.linear(t, w), w))
        ours = median_ms(lambda s=step, layer=linear: s(layer, layer.weight))
        print(
            f"linear {n_in} -> {n_out}: bf16 {plain:.3f} ms, fp8 {ours:.3f} ms, {ours / plain:.2f}",
            flush=True,
        )


def linears() -> None:
    """Forward and backward of one linear, weights already prepared; x's amax given by its producer or computed inside."""
    from nvfp4_train.precision.linear import Linear
    from nvfp4_train.precision.producers import Activation
    from nvfp4_train.precision.recipe import OPERANDS, LinearPlan

    print(
        f"{'linear, 16384 tokens':<28}{'bf16 ms':>10}{'nvfp4 ms':>10}{'ratio':>7}"
        f"{'amax inside':>13}{'ratio':>7}{'saved MiB':>11}"
    )
    for n_in, n_out in ((2048, 8192), (5120, 20480)):
        x = torch.randn(16384, n_in, device="cuda").bfloat16().requires_grad_()
        dy = torch.randn(16384, n_out, device="cuda").bfloat16()
        weight = (torch.randn(n_out, n_in, device="cuda") / n_in**0.5).bfloat16().requires_grad_()
        linear = Linear(n_in, n_out, device="cuda")
        torch.nn.init.normal_(linear.weight, std=n_in**-0.5)
        linear.set_plan(LinearPlan(frozenset(OPERANDS)), torch.tensor([1, 2, 3, 4], device="cuda"))
        linear.prepare_weight()

        def run(forward: Callable, x=x, dy=dy) -> None:
            torch.autograd.backward(forward(x), dy)

        measured = amax(x.detach(), SIGNS)
        times = []
        for parameter, forward in (
            (weight, lambda x, w=weight: torch.nn.functional.linear(x, w)),
            (linear.weight, lambda x, linear=linear, amax=measured: linear(Activation(x, amax))),
            (linear.weight, linear),
        ):

            def step(forward=forward, parameter=parameter, x=x) -> None:
                x.grad = parameter.grad = None
                run(forward)

            times.append(median_ms(step))
        before = torch.cuda.memory_allocated()
        y = linear(x)
        saved = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        print(
            f"{f'{n_in} -> {n_out}':<28}{times[0]:>10.3f}{times[1]:>10.3f}{times[1] / times[0]:>7.2f}"
            f"{times[2]:>13.3f}{times[2] / times[0]:>7.2f}{saved / 2**20:>11.1f}",
            flush=True,
        )
        del y


if __name__ == "__main__":
    properties = torch.cuda.get_device_properties(0)
    print(
        f"{properties.name}, torch {torch.__version__}, Triton {triton.__version__}, quantize {backend_report('cuda')}"
    )
    parts = {"kernels": kernels, "producers": norms, "gemm": products, "linear": linears, "fp8": native_fp8}
    for name in sys.argv[1:] or parts:
        parts[name]()
