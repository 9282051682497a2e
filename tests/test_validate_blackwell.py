"""The script for the first Blackwell GPU, as far as a machine without one goes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def blackwell():
    """The package scripts/blackwell, as the script finds it."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from blackwell import anywhere, report, training

        yield argparse.Namespace(anywhere=anywhere, report=report, training=training)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_without_a_gpu_it_checks_what_it_can_and_says_what_it_skipped(tmp_path):
    out = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/validate_blackwell.py", "--quick", "--out", out],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = out.read_text()
    assert "2 checks passed, 0 failed, 18 skipped." in report
    assert "NVFP4, MXFP4, FP8: passed" in report
    assert "- Bits of the native NVFP4 quantize kernels: no CUDA GPU is found\n" in report
    assert "- Transformer Engine's quantizer against ours: precision.backend=te can't run here: " in report
    assert "- Machine code of the native kernels, compiled ahead of time: --quick\n" in report


def test_one_failure_is_told_and_hides_no_other_result(blackwell, tmp_path, capsys):
    def right(args):
        """What is right"""
        return "All of it."

    def wrong(args):
        """What is wrong"""
        raise blackwell.report.Failed("3 bytes differ")

    def broken(args):
        """What breaks"""
        raise ZeroDivisionError("by zero")

    out = tmp_path / "report.md"
    assert blackwell.report.run([wrong, broken, right], argparse.Namespace(out=out)) == 2
    report = out.read_text()
    assert "1 checks passed, 2 failed, 0 skipped." in report
    assert "## What is wrong: FAILED, 0 s\n\n3 bytes differ" in report
    assert "ZeroDivisionError: by zero" in report
    assert "passed   What is right" in capsys.readouterr().out


def test_tests_in_child_processes(blackwell, tmp_path):
    run_tests, skip = blackwell.anywhere.run_tests, "import pytest\n@pytest.mark.skip(reason='no wheel')\n"
    (tmp_path / "test_some.py").write_text(f"def test_a(): pass\n{skip}def test_b(): pass\n")
    text = run_tests("test_some.py", folder=tmp_path)
    assert "1 passed, 1 skipped" in text
    assert "no wheel" in text
    with pytest.raises(blackwell.report.Skip, match="no wheel"):
        run_tests("test_some.py", "-k", "test_b", folder=tmp_path)
    (tmp_path / "test_some.py").write_text("def test_a(): assert 1 == 2\n")
    with pytest.raises(blackwell.report.Failed, match="assert 1 == 2"):
        run_tests("test_some.py", folder=tmp_path)


def test_the_files_that_it_runs_are_there(blackwell):
    for arguments in blackwell.anywhere.TESTS.values():
        for word in arguments:
            assert not word.endswith(".py") or (ROOT / word).is_file(), word


def test_trainings_are_compared_by_the_mean_of_their_last_losses(blackwell):
    losses = {"emulated": [9.0] + [5.0] * 20, "triton": [9.0] + [5.02] * 20, "te": [9.0] + [5.04] * 20}
    rates = dict.fromkeys(losses, 1e5)
    text = blackwell.training.compared(losses, rates)
    assert "| triton | 9.0000 | 5.0200 | +0.40% | 100,000 |" in text
    losses["triton"] = losses["te"]
    with pytest.raises(blackwell.report.Failed, match=r"allowed: triton \(0\.5%\)"):
        blackwell.training.compared(losses, rates)
    losses["triton"] = [float("nan")] * 21
    with pytest.raises(blackwell.report.Failed, match="triton"):
        blackwell.training.compared(losses, rates)
