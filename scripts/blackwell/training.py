"""A training by each native backend, and Transformer Engine, beside the emulated one."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from blackwell.report import CUDA, ROOT, Check, Failed, Skip, needs, table, te_problem
from nvfp4_kernels.native import gemm as native

from nvfp4_train.training.metrics import read_metrics

# 32 sequences a step, no validation on the way: some 40 s an arm on a B200, its start included.
WORDS = ("+experiment=125m_hybrid", "training.global_batch_size=32", "training.micro_batch_size=16")
WORDS += ("training.sample_tokens=0", "training.validate_tokens=2e5")
# Relative, of the mean of the last 20 losses. Transformer Engine draws other random bits, as another seed would.
ALLOWED = {"triton": 0.005, "cublas": 0.005, "te": 0.01}


def compared(losses: dict[str, list[float]], rates: dict[str, float]) -> str:
    """The table of all arms. Raises Failed when one ends too far from the emulated one."""
    ends = {arm: statistics.mean(values[-20:]) for arm, values in losses.items()}
    off = {arm: ends[arm] / ends["emulated"] - 1 for arm in losses}
    rows = [
        [arm, f"{losses[arm][0]:.4f}", f"{ends[arm]:.4f}", f"{off[arm]:+.2%}", f"{rates[arm]:,.0f}"]
        for arm in losses
    ]
    text = table(["backend", "first loss", "mean of the last 20", "beside emulated", "tokens/s"], rows)
    if far := [
        f"{arm} ({ALLOWED[arm]:.1%})"
        for arm in ALLOWED.keys() & off.keys()
        if not abs(off[arm]) <= ALLOWED[arm]
    ]:
        raise Failed(f"{text}\n\nFurther from the emulated losses than allowed: {', '.join(far)}.")
    return text


def training(args: argparse.Namespace) -> str:
    """A training of 125m_hybrid by every backend beside the emulated one: the same batches and weights"""
    needs("triton")
    if args.quick:
        raise Skip("--quick")
    arms = ["emulated", *(name for name in native.BACKENDS if native.problem(name, CUDA) is None)]
    without = te_problem()
    losses, rates = {}, {}
    for arm in arms if without else [*arms, "te"]:
        folder = args.out.with_suffix("") / arm
        words = (
            *WORDS,
            f"training.max_steps={args.steps}",
            *args.words,
            f"precision.backend={arm}",
            f"run_dir={folder}",
        )
        if code := subprocess.run(
            [sys.executable, "-m", "nvfp4_train.pretrain", *words], cwd=ROOT
        ).returncode:
            raise Failed(f"the {arm} run ended with code {code}")
        records = [r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]
        losses[arm] = [r["loss"] for r in records]
        rates[arm] = statistics.median(r["tokens_per_second"] for r in records[10:] or records)
    return compared(losses, rates) + (f"\n\nWithout te: {without}." if without else "")


CHECKS: list[Check] = [training]
