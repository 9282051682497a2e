"""A run of two ranks under the Slurm script and a fake srun: one rank is killed, the job is stopped, one process goes on."""

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


def test_a_killed_rank_and_a_stop_cost_nothing_but_time(words, tmp_path):
    alone = tmp_path / "alone"
    command = [sys.executable, "-m", "nvfp4_train.pretrain", *words, f"run_dir={alone}"]
    subprocess.run(command, check=True, capture_output=True)

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
    command[-1] = f"run_dir={run}"
    subprocess.run(command, check=True, capture_output=True)
    expected = losses(alone)
    got = losses(run)
    assert list(got) == list(expected) == list(range(1, STEPS + 1))
    for step, loss in expected.items():
        assert got[step] == pytest.approx(loss, rel=1e-5)
