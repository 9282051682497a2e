"""Checks one after the other, and the report of what they found. A check is a function whose docstring is its title."""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nvfp4_kernels import backend_report
from nvfp4_kernels.native import gemm as native

from nvfp4_train.atomic import write_text
from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision.backends import choose
from nvfp4_train.precision.gpu import this_machine

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")
Check = Callable[[argparse.Namespace], str]  # returns Markdown


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


def te_problem() -> str | None:
    """Why Transformer Engine's NVFP4 cannot run here; None when it can."""
    try:
        choose(PrecisionConfig(name="nvfp4", backend="te"), this_machine())
    except ConfigError as error:
        return str(error).rstrip(".")
    return None


def milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(call, warmup=20, rep=100, return_mode="median")


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def run(checks: list[Check], args: argparse.Namespace) -> int:
    """Make all checks and write the report to args.out; how many failed."""
    sections, failed, skipped = [], [], []
    for check in checks:
        title, start = check.__doc__.strip().rstrip("."), time.monotonic()
        try:
            verdict, text = "passed", check(args)
        except Skip as reason:
            verdict, text = "skipped", f"{reason}."
            skipped.append(f"- {title}: {reason}")
        except Failed as problem:
            verdict, text = "FAILED", str(problem)
            failed.append(title)
        except Exception as error:  # one check must not hide the others' results
            verdict, text = "FAILED", f"{type(error).__name__}: {error}"
            failed.append(title)
        seconds = f"{time.monotonic() - start:.0f} s"
        print(f"{verdict:8} {title} ({seconds})", flush=True)
        sections.append(f"## {title}: {verdict}, {seconds}\n\n{text}")
    passed = len(checks) - len(failed) - len(skipped)
    summary = f"{passed} checks passed, {len(failed)} failed, {len(skipped)} skipped."
    not_made = ["Not shown here:\n\n" + "\n".join(skipped)] if skipped else []
    write_text(args.out, "\n\n".join([_header(), summary, *not_made, *sections]) + "\n")
    print(f"{summary} Report: {args.out}")
    return len(failed)


def _header() -> str:
    rows = [[name, value] for name, value in dataclasses.asdict(this_machine()).items()]
    rows += [["torch", torch.__version__], ["python", platform.python_version()]]
    rows += [["quantize", backend_report("cuda" if torch.cuda.is_available() else "cpu")]]
    return "# Native NVFP4 on this machine\n\n" + table(["what", "here"], rows)
