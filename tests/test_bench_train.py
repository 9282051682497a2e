"""The benchmark of training steps, at a tiny size: that it runs, and that its table says what was run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TINY

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_train.py"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(SCRIPT.parent))  # as when it is run
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
    json.dumps(results)  # it comes from a child process
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith(("| bf16", "| nvfp4"))]
    assert [row[1] for row in rows] == ["0 of 8", "6 of 8"]
    assert rows[0][3] == "1.000"
    assert all(float(row[8]) > 0 for row in rows)
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
        "triton_poi_fused__to_copy_add_linear_backward_3": "elementwise, norms, other",
        "amax_kernel": "quantize",
        "conv_backward_kernel": "convolution",
        "scan_bc_kernel": "scan",
        "void cudnn::fusion::convert_dq_to_16bits<true>": "attention",
        "DeviceScanInitKernel": "elementwise, norms, other",
        "Memcpy DtoD": "copies",
    }
    assert {name: bench.kind_of(name) for name in names} == names


def test_the_floor_is_that_of_the_reference_model(bench):
    """By hand, for micro-batch 4: 6 x 0.854 B parameters but the embeddings' x 32,768 tokens; two attention layers."""
    ceilings = importlib.import_module("ceilings")
    limits = ceilings.Ceilings(copy=4e12, bf16=800e12, fp8=1600e12, attention=500e12)
    words = ["+experiment=1b_hybrid", "training.micro_batch_size=4"]
    bf16, nvfp4, fp8 = (
        ceilings.floor(bench.configuration(words, arm), limits) for arm in ("bf16", "nvfp4", "fp8")
    )
    tokens = 4 * 8192
    assert bf16["GEMM"] == pytest.approx(6 * (0.988e9 - 65536 * 2048) * tokens / 800e12, rel=2e-3)
    assert bf16["attention"] == pytest.approx(2 * 3 * 2 * 8192 * 16 * 128 * tokens / 500e12)
    assert bf16["optimizer"] == pytest.approx(32 * 0.988e9 / 4e12, rel=1e-3)
    assert nvfp4["GEMM"] == bf16["GEMM"] > fp8["GEMM"] > bf16["GEMM"] / 2
    assert bf16["quantize"] < fp8["quantize"] < nvfp4["quantize"]


def test_the_command_and_its_errors():
    bad = subprocess.run(
        [sys.executable, SCRIPT, *TINY, "--arms", "bf16 training.seq_len=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2
    assert "training.seq_len=0 must be at least 1" in bad.stderr
