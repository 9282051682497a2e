"""Runs of two ranks under the Slurm script with a fake srun, and under torchrun: a rank is killed, the job is stopped."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from nvfp4_train.training.metrics import read_metrics
from tests.distributed import disturbed_in_ranks
from tests.text import data_words
from tests.tiny import CHECKPOINT_EVERY, TINY

ROOT = pathlib.Path(__file__).parents[1]
FAKE = ROOT / "tests" / "launch" / "fake"
STEPS = 18


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    data = data_words(tmp_path_factory.mktemp("text"))
    return [*TINY, *data, "precision=fp32", "training.sample_tokens=0", f"training.max_steps={STEPS}"]


def start(words: list[str], run: pathlib.Path) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "slurm" / "pretrain.sbatch"), *words, f"run_dir={run}"],
        env=os.environ
        | {
            "PATH": f"{FAKE}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "OMP_NUM_THREADS": "1",
            "FAKE_LOG": str(run.parent / "scontrol.log"),
            "FAKE_GPUS": "1",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "a,b",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_SUBMIT_DIR": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(run: pathlib.Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if "event" not in r}


def ranks_at(job: subprocess.Popen, run: pathlib.Path, step: int) -> list[psutil.Process]:
    """The ranks of the job, once the run has reached `step`."""
    while max(losses(run), default=0) < step:
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.01)
    found = [
        p for p in psutil.Process(job.pid).children(recursive=True) if "nvfp4_train.pretrain" in p.cmdline()
    ]
    return sorted(
        (p for p in found if "srun" not in " ".join(p.cmdline())), key=lambda p: int(p.environ()["RANK"])
    )


@pytest.fixture(scope="module")
def expected(words, tmp_path_factory) -> dict[int, float]:
    """Losses of one process that nothing disturbs."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train_alone(words, run)
    return losses(run)


def train_alone(words: list[str], run: pathlib.Path) -> None:
    command = [sys.executable, "-m", "nvfp4_train.pretrain", *words, f"run_dir={run}"]
    subprocess.run(command, check=True, capture_output=True)


def torchrun(deed: str, words: list[str], run: pathlib.Path) -> subprocess.CompletedProcess:
    """Two ranks that are disturbed (disturbed_in_ranks.py), started again by nvfp4_train.torchrun at most twice."""
    command = [
        sys.executable,
        "-m",
        "nvfp4_train.torchrun",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=2",
    ]
    return subprocess.run(
        [*command, disturbed_in_ranks.__file__, deed, *words, f"run_dir={run}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


def test_a_killed_rank_and_a_stop_cost_nothing_but_time(words, expected, tmp_path):
    run = tmp_path / "run"
    job = start(words, run)
    ranks_at(job, run, CHECKPOINT_EVERY + 2)[1].send_signal(signal.SIGKILL)
    while not any(r.get("event") == "resume" for r in read_metrics(run / "metrics.jsonl")):
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.01)
    ranks_at(job, run, CHECKPOINT_EVERY + 2)[1].send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 75, output
    assert "going on from the last checkpoint" in output
    assert "rank 1" in output  # the other one names it
    assert "stopped by a signal to another rank after step" in output
    assert "requeued" in (tmp_path / "scontrol.log").read_text()
    stopped_at = max(losses(run))
    assert (run / "checkpoints" / f"step_{stopped_at:08d}").is_dir()

    # One process goes on with what two have written.
    train_alone(words, run)
    got = losses(run)
    assert list(got) == list(expected) == list(range(1, STEPS + 1))
    for step, loss in expected.items():
        assert got[step] == pytest.approx(loss, rel=1e-5)


def test_torchrun_goes_on_after_rank_0_is_killed_and_a_stop_in_a_validation_ends_it(
    words, expected, tmp_path
):
    run = tmp_path / "run"
    done = torchrun("kill_rank_0_then_stop_rank_1_in_a_validation", words, run)
    assert done.returncode == 75, done.stderr
    resumed = [r["step"] for r in read_metrics(run / "metrics.jsonl") if r.get("event") == "resume"]
    assert resumed == [CHECKPOINT_EVERY]
    assert "stopped by a signal to another rank after step 15, which is saved" in done.stderr
    assert (run / "checkpoints" / "step_00000015").is_dir()
    got = losses(run)  # step 15 has its record when its validation has been made up for
    assert list(got) == list(range(1, 15))
    for step, loss in got.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


def test_a_rank_stopped_before_the_ranks_have_met_does_not_leave_the_other_waiting(words, tmp_path):
    done = torchrun("stop_rank_1_before_it_meets_rank_0", words, tmp_path / "run")
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("before the first step; nothing had to be saved") == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
