"""What needs no chip: tests in child processes, and machine code compiled ahead of time."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from blackwell.report import ROOT, Check, Failed, Skip
from nvfp4_kernels.native import gemm as native
from nvfp4_kernels.native import self_test

KERNELS, PRECISION = "tests/kernels", "tests/precision"
TESTS = {
    "The native kernels' indices and bits, in Triton's interpreter": (
        f"{KERNELS}/test_native_without_gpu.py",
        "-k",
        "interpreter",
    ),
    "The swizzled layout against torch's own and Transformer Engine's": (f"{KERNELS}/test_native_layout.py",),
    "cuBLAS's arguments against torch's own checks": (f"{KERNELS}/test_native_cublas.py",),
    "The layer, with the emulated product in the tensor core's place": (f"{PRECISION}/test_native.py",),
    "Transformer Engine's Python reference against ours": (f"{PRECISION}/test_te_reference.py",),
    "Transformer Engine's interface, and our rules in it": (
        f"{PRECISION}/test_te.py",
        f"{PRECISION}/test_te_import.py",
    ),
}


def layout_and_reference(args: argparse.Namespace) -> str:
    """The self-test of layout, quantizer and emulated product, on the CPU."""
    if found := self_test.problem("emulated", torch.device("cpu")):
        raise Failed(found)
    return "Exact products and the reference's bits, ragged sizes included."


def run_tests(*arguments: str, folder: Path = ROOT) -> str:
    """Pytest in a child process: its last line, and what it skipped. Raises Skip when that is all, Failed when one fails."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise Skip("pytest and hypothesis are not installed (pip install '.[dev]')")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:]
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    if done.returncode:
        raise Failed("```\n" + "\n".join(lines[-30:]) + "\n```")
    if not re.search(r"\d+ passed", lines[-1]):
        raise Skip("; ".join(line.partition(": ")[2] for line in skipped) or lines[-1])
    return "\n".join(
        [f"`{' '.join(arguments)}`: {lines[-1].strip('= ')}", *(f"- {line}" for line in skipped)]
    )


def tests() -> list[Check]:
    """A check for each entry of TESTS."""

    def of(title: str, arguments: tuple[str, ...]) -> Check:
        def check(args: argparse.Namespace) -> str:
            if args.quick:
                raise Skip("--quick")
            return run_tests(*arguments)

        check.__doc__ = title
        return check

    return [of(*item) for item in TESTS.items()]


def machine_code(args: argparse.Namespace) -> str:
    """Machine code of the native kernels, compiled ahead of time"""
    if args.quick:
        raise Skip("--quick")
    if importlib.util.find_spec("triton") is None:
        raise Skip("Triton is not installed")
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    chips = ["{}{}".format(*here)] if here in native.CHIPS else []  # else all of them
    command = [sys.executable, ROOT / "kernels/benchmarks/compile_native.py", *chips]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


CHECKS = [layout_and_reference, *tests(), machine_code]
