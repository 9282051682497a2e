"""The benchmark of training steps, at a tiny size: that it runs, and that its table says what was run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TINY

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_train.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arms_are_compared(bench):
    arms = ["bf16", "nvfp4 training.recompute=block"]
    words = [w for w in TINY if not w.startswith(("training.log", "checkpoint"))]
    results = {
        arm: bench.measure(
            bench.configuration([*words, "checkpoint.every_steps=1", "logging.peak_tflops=0.001"], arm),
            2,
            1,
            True,
        )
        for arm in arms
    }
    table = bench.report(results)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith(("| bf16", "| nvfp4"))]
    assert [row[1] for row in rows] == ["0 of 8", "6 of 8"]
    assert rows[0][3] == "1.00"
    assert all(float(row[5]) > 0 for row in rows)
    assert "every block, from its input" in table
    assert "GEMM" in table
    losses = [r["loss"] for r in results.values()]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_kinds_of_kernels(bench):
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "GEMM",
        "_chunk_scan_fwd_kernel": "scan",
        "pytorch_flash::flash_bwd_kernel": "attention",
        "nvfp4_train::linear": "quantize",
        "triton_red_fused_norm": "elementwise, norms, other",
        "Memcpy DtoD": "copies",
    }
    assert {name: bench.kind_of(name) for name in names} == names


def test_the_command_and_its_errors():
    bad = subprocess.run(
        [sys.executable, SCRIPT, *TINY, "--arms", "bf16 training.seq_len=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2
    assert "training.seq_len=0 must be at least 1" in bad.stderr
