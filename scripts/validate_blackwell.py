"""Shows on a Blackwell GPU what no other machine can: that native NVFP4 computes what the emulation computes, and how fast.

    python scripts/validate_blackwell.py [--out blackwell.md] [--steps 200] [--quick] [key=value ...]

Bits of every quantize kernel against the reference, every GEMM backend against exact and emulated products, Transformer
Engine against ours, speeds beside their peaks, and a training of 125m_hybrid (further words go to it: data.source=DIR)
native against emulated. On another machine it does what needs no such chip and says what it skipped. Writes a report in
Markdown and exits with 1 when a check fails. About ten minutes on one B200; --quick leaves the training out.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nvfp4_kernels import SIGNS, amax, backend_report, gemm, quantize
from nvfp4_kernels.native import gemm as native
from nvfp4_kernels.native import self_test
from nvfp4_kernels.native.quantize import quantize_rows_and_columns, quantize_square
from nvfp4_kernels.native.tensor import NativeTensor

from nvfp4_train.atomic import write_text
from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision.backends import choose
from nvfp4_train.precision.gpu import this_machine
from nvfp4_train.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
# Dense FP4 peaks in TFLOP/s, fp32 accumulation (NVIDIA's data sheets, without sparsity), by compute capability.
FP4_TFLOPS = {(10, 0): 9000.0, (10, 3): 14000.0, (12, 0): 1676.0}
# M, N, K of up_proj's three products, 16384 tokens, in the 125M, 1B, 8B and 12B models.
PRODUCTS = [
    shape
    for hidden, wide in ((768, 3072), (2048, 8192), (4096, 21504), (5120, 20480))
    for shape in ((16384, wide, hidden), (16384, hidden, wide), (wide, hidden, 16384))
]
CUDA = torch.device("cuda")


class Skip(Exception):
    """A check that cannot be made here; the text says why."""


class Failed(Exception):
    """A check whose result is wrong; the text says what."""


def needs(backend: str) -> None:
    """Raise Skip where `backend` cannot run."""
    if not torch.cuda.is_available():
        raise Skip("no CUDA GPU is found")
    if reason := native.problem(backend, CUDA):
        raise Skip(reason)


def milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(call, warmup=20, rep=100, return_mode="median")


def machine_code(args: argparse.Namespace) -> str:
    """Machine code of the native kernels, compiled ahead of time for every chip."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise Skip("Triton is not installed") from None
    command = [sys.executable, ROOT / "kernels/benchmarks/compile_native.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


def layout_and_reference(args: argparse.Namespace) -> str:
    """Native layout, portable quantizer and emulated product (no FP4 chip needed)."""
    if found := self_test.problem("emulated", torch.device("cpu")):
        raise Failed(found)
    return "Exact products and the reference's bits, ragged sizes included, on the CPU."


def quantizer_bits(args: argparse.Namespace) -> str:
    """Bits of the native quantize kernels against the reference."""
    needs("triton")
    shapes = ((16, 16), (144, 208), (256, 1024), (2048, 4096))
    for shape in shapes:
        if found := self_test.quantizer_problem(CUDA, *shape):
            raise Failed(f"{shape}: {found}")
    return f"Rows, transformed columns (nearest, stochastic) and 16x16 weights both ways, {shapes}: no bit differs."


def hardware_rounding(args: argparse.Namespace) -> str:
    """Stochastic rounding by cvt.rs against the software rule (an option, off by default)."""
    needs("triton")
    if torch.cuda.get_device_capability() >= (12, 0):
        raise Skip("sm_120 has no cvt.rs")
    found = [self_test.quantizer_problem(CUDA, *shape, hardware=True) for shape in ((144, 208), (2048, 4096))]
    if any(found):
        raise Failed(f"cvt.rs rounds otherwise than the software rule, so the option must stay off: {found}")
    return "No bit differs: hardware rounding may be switched on."


def products_of(backend: str) -> Callable[[argparse.Namespace], str]:
    def check(args: argparse.Namespace) -> str:
        needs(backend)
        for shape in (*self_test.SHAPES, (16, 16, 16), (128, 4096, 2048), (1040, 528, 4096)):
            if found := self_test.product_problem(backend, CUDA, *shape):
                raise Failed(found)
        rows = [
            "| M x N x K | largest difference from the emulated product, over its root mean square |",
            "| --- | --- |",
        ]
        for m, n, k in PRODUCTS:
            a, b = (quantize(torch.randn(s, k, device=CUDA).bfloat16()) for s in (m, n))
            emulated = gemm(a, b, torch.float32)
            difference = (
                gemm(a, b, torch.float32, backend) - emulated
            ).abs().max() / emulated.square().mean().sqrt()
            rows.append(f"| {m} x {n} x {k} | {difference:.2e} |")
            if not difference < 1e-4:
                raise Failed("\n".join(rows))
        return "Exact where sums are exact (every bit).\n\n" + "\n".join(rows)

    check.__doc__ = f"Products of {backend} against exact and emulated ones."
    return check


def against_transformer_engine(args: argparse.Namespace) -> str:
    """Transformer Engine's quantizer and linear layer against ours, rounding to nearest."""
    try:
        choose(PrecisionConfig(name="nvfp4", backend="te"), this_machine())
    except ConfigError as error:
        raise Skip(str(error)) from None
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    lines, x = [], torch.randn(1024, 2048, device=CUDA).bfloat16()
    both = amax(x, SIGNS)
    rows, columns = quantize_rows_and_columns(x, (both[0], None), (both[1], None), SIGNS)
    square = quantize_square(x, both[0])
    for name, options, sides in (
        ("1x16, columns transformed", {"with_rht": True, "with_post_rht_amax": True}, (rows, columns)),
        ("16x16", {"with_2d_quantization": True}, square),
    ):
        theirs = NVFP4Quantizer(fp4_dtype=tex.DType.kFloat4E2M1, rowwise=True, columnwise=True, **options)(x)
        for side, ours, codes in zip(
            ("rows", "columns"), sides, (theirs._rowwise_data, theirs._columnwise_data), strict=True
        ):
            wrong = int((ours.codes != codes.view(torch.uint8).view(ours.codes.shape)).sum())
            lines.append(f"- {name}, {side}: {wrong} of {ours.codes.numel()} bytes of codes differ")
    layer = te.Linear(2048, 4096, bias=False, params_dtype=torch.bfloat16, device="cuda")
    from transformer_engine.common.recipe import NVFP4BlockScaling

    with torch.no_grad(), te.autocast(enabled=True, recipe=NVFP4BlockScaling()):
        y = layer(x).float()
    weight = layer.weight.detach()
    expected = gemm(rows, quantize_square(weight, amax(weight)[0])[0], torch.float32)
    error = float((y - expected).norm() / expected.norm())
    lines.append(f"- forward of a linear, 2048 -> 4096: relative difference {error:.1e}")
    if error > 2**-7:
        raise Failed("\n".join(lines))
    return "\n".join(lines)


def speed(args: argparse.Namespace) -> str:
    """Speed of the quantize kernels beside a copy, and of every GEMM backend beside its peak."""
    needs("triton")
    x = torch.randn(8192, 8192, device=CUDA).bfloat16()
    a = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    b = torch.empty_like(a)
    copy = 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e9
    both = amax(x, SIGNS)
    cases = {
        "amax, raw and transformed": (2, lambda: amax(x, SIGNS)),
        "rows": (2.5625, lambda: quantize_rows_and_columns(x, (both[0], None), None)),
        "columns, transformed": (2.5625, lambda: quantize_rows_and_columns(x, None, (both[1], None), SIGNS)),
        "rows + columns": (
            3.125,
            lambda: quantize_rows_and_columns(x, (both[0], None), (both[1], None), SIGNS),
        ),
        "16x16, both ways": (3.125, lambda: quantize_square(x, both[0])),
    }
    lines = [
        f"8192 x 8192 bf16; copy {copy:.2f} TB/s.",
        "",
        "| kernel | ms | TB/s | of the copy rate |",
        "| --- | --- | --- | --- |",
    ]
    for name, (size, call) in cases.items():
        ms = milliseconds(call)
        rate = size * x.numel() / ms / 1e9
        lines.append(f"| {name} | {ms:.4f} | {rate:.2f} | {rate / copy:.0%} |")
    peak = FP4_TFLOPS[torch.cuda.get_device_capability()]
    able = [name for name in native.BACKENDS if native.problem(name, CUDA) is None]
    lines += [
        "",
        f"Peak {peak:g} TFLOP/s dense FP4; TFLOP/s (share of the peak), operands quantized before:",
        "",
    ]
    lines += [f"| M x N x K | bf16 | {' | '.join(able)} |", "| --- | --- |" + " --- |" * len(able)]
    for m, n, k in PRODUCTS:
        left, right = (torch.randn(s, k, device=CUDA).bfloat16() for s in (m, n))
        plain = milliseconds(lambda l=left, r=right: l @ r.t())
        qa, qb = NativeTensor.of(quantize(left)), NativeTensor.of(quantize(right))
        cells = [f"{2e-9 * m * n * k / plain:.0f}"]
        for name in able:
            ms = milliseconds(lambda a=qa, b=qb, name=name: gemm(a, b, torch.bfloat16, name))
            flops = 2e-9 * m * n * k / ms
            cells.append(f"{flops:.0f} ({flops / peak:.0%})")
        lines.append(f"| {m} x {n} x {k} | {' | '.join(cells)} |")
    return "\n".join(lines)


def training(args: argparse.Namespace) -> str:
    """125m_hybrid native against emulated: the same batches, weights and random bits."""
    needs("triton")
    if args.quick:
        raise Skip("--quick")
    losses, folder = {}, args.out.with_suffix("")
    arms = ["emulated", *(name for name in native.BACKENDS if native.problem(name, CUDA) is None)]
    for backend in arms:
        run = folder / backend
        command = [
            sys.executable,
            "-m",
            "nvfp4_train.pretrain",
            "+experiment=125m_hybrid",
            f"training.max_steps={args.steps}",
        ]
        command += [*args.words, f"precision.backend={backend}", f"run_dir={run}"]
        if code := subprocess.run(command, cwd=ROOT).returncode:
            raise Failed(f"the {backend} run ended with code {code}")
        records = [r for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
        losses[backend] = (
            [r["loss"] for r in records],
            statistics.median(r["tokens_per_second"] for r in records[10:]),
        )
    lines = ["| backend | first loss | last 20 | tokens/s |", "| --- | --- | --- | --- |"]
    ends = {}
    for backend, (values, rate) in losses.items():
        ends[backend] = statistics.mean(values[-20:])
        lines.append(f"| {backend} | {values[0]:.4f} | {ends[backend]:.4f} | {rate:,.0f} |")
    text = "\n".join(lines)
    if max(abs(end / ends["emulated"] - 1) for end in ends.values()) > 0.005:
        raise Failed(text + "\n\nThe last 20 losses differ by more than 0.5 %.")
    return text


CHECKS = [
    layout_and_reference, machine_code, quantizer_bits, hardware_rounding,
    *map(products_of, native.BACKENDS), against_transformer_engine, speed, training,
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("blackwell.md"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="no training")
    parser.add_argument("words", nargs="*", help="key=value words for the training")
    args = parser.parse_args()
    report, failed, skipped = [_header()], [], []
    for check in CHECKS:
        title, start = check.__doc__.rstrip("."), time.monotonic()
        try:
            verdict, text = "passed", check(args)
        except Skip as reason:
            verdict, text = "skipped", f"{reason}."
            skipped.append(title)
        except Failed as problem:
            verdict, text = "FAILED", str(problem)
            failed.append(title)
        except Exception as error:  # one check must not hide the others' results
            verdict, text = "FAILED", f"{type(error).__name__}: {error}"
            failed.append(title)
        print(f"{verdict:8} {title} ({time.monotonic() - start:.0f} s)", flush=True)
        report.append(f"## {title}: {verdict}\n\n{text}")
    done = len(CHECKS) - len(failed) - len(skipped)
    report.insert(1, f"{done} checks passed, {len(failed)} failed, {len(skipped)} skipped.")
    write_text(args.out, "\n\n".join(report) + "\n")
    print(f"{report[1]} Report: {args.out}")
    return 1 if failed else 0


def _header() -> str:
    machine = dataclasses.asdict(this_machine())
    rows = [f"| {name} | {value} |" for name, value in machine.items()]
    rows += [
        f"| torch | {torch.__version__} |",
        f"| python | {platform.python_version()} |",
        f"| quantize | {backend_report()} |",
    ]
    return "# Native NVFP4 on this machine\n\n| what | here |\n| --- | --- |\n" + "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
