"""Runs that are killed or stopped go on bit for bit: real processes, real signals."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from nvfp4_train.training.metrics import read_metrics
from tests.text import data_words
from tests.tiny import CHECKPOINT_EVERY, STEPS, TINY

WALL_CLOCK = ("tokens_per_second", "tflops", "mfu", "memory_gib", "data_wait_fraction")


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    return [sys.executable, "-m", "nvfp4_train.pretrain", *TINY, *data_words(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def unbroken(command, tmp_path_factory) -> list[dict]:
    """Records of a run that nothing disturbed."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    done = launch(command, run).wait(timeout=180)
    assert done == 0, (run / "console.log").read_text()
    records = steps(run)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    return records


def launch(command: list[str], run: pathlib.Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, f"run_dir={run}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


def run_with(patch: str, command: list[str], run: pathlib.Path) -> subprocess.CompletedProcess:
    """The command's entry point after `patch`, Python source, has run in its process."""
    code = (
        f"import sys\n{patch}\nfrom nvfp4_train import cli, pretrain\nsys.exit(cli.exit_code(pretrain.main))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *command[3:], f"run_dir={run}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def steps(run: pathlib.Path) -> list[dict]:
    """The records of steps, without what the clock decides."""
    records = [r for r in read_metrics(run / "metrics.jsonl") if "event" not in r]
    return [{k: v for k, v in r.items() if k not in WALL_CLOCK} for r in records]


def wait_for_step(process: subprocess.Popen, run: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended before step {step}: {process.stderr.read()}"
        if any(r["step"] >= step for r in steps(run)):
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def test_killed_at_a_random_step_it_goes_on_bit_for_bit(command, unbroken, tmp_path):
    run = tmp_path / "run"
    for _ in range(2):  # the resumed run is killed too
        step = random.randint(1, STEPS // 2)
        process = launch(command, run)
        wait_for_step(process, run, step)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    resumed = launch(command, run)
    assert resumed.wait(timeout=180) == 0, resumed.stderr.read()
    assert steps(run) == unbroken  # every number of every step, each step once


def test_sigterm_saves_exits_75_and_goes_on_bit_for_bit(command, unbroken, tmp_path):
    run = tmp_path / "run"
    process = launch(command, run)
    wait_for_step(process, run, CHECKPOINT_EVERY + 2)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 75
    assert "is saved: run the same command to go on" in error
    stopped_at = steps(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{stopped_at:08d}").is_dir()
    resumed = launch(command, run)
    assert resumed.wait(timeout=180) == 0, resumed.stderr.read()
    assert steps(run) == unbroken

    finished = subprocess.run([*command, f"run_dir={run}"], capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0
    assert "is finished" in finished.stdout
    changed = subprocess.run(
        [*command, f"run_dir={run}", "training.seed=7"], capture_output=True, text=True, timeout=60
    )
    assert changed.returncode == 2
    assert "training.seed: was 1234, now 7" in changed.stderr


# A signal in the second of a validation's four micro-batches, at step 15.
_SIGNAL_IN_VALIDATION = """
import os, signal
from nvfp4_train.training import trainer
score = trainer.score
def scored(model, cfg, dataset, limit, look, *more):
    def progress(share):
        if share == 0.5:
            os.kill(os.getpid(), signal.SIGTERM)
        look(share)
    return score(model, cfg, dataset, limit, progress, *more)
trainer.score = scored
"""


def test_sigterm_in_a_validation_breaks_it_off_and_the_next_launch_makes_up_for_it(
    command, unbroken, tmp_path
):
    run = tmp_path / "run"
    stopped = run_with(_SIGNAL_IN_VALIDATION, command, run)
    assert stopped.returncode == 75, stopped.stderr
    assert "after step 15, which is saved" in stopped.stderr
    assert [r["step"] for r in steps(run)] == list(range(1, 15))
    assert launch(command, run).wait(timeout=180) == 0
    assert steps(run) == unbroken


def test_sigterm_while_data_is_prepared_stops_at_once(command, tmp_path):
    patch = """
import os, signal, time, sentencepiece
def train(**_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
sentencepiece.SentencePieceTrainer.train = train
"""
    run = tmp_path / "run"
    words = [f"data.cache_dir={tmp_path / 'cache'}", "training.max_steps=1"]
    stopped = run_with(patch, [*command, *words], run)
    assert stopped.returncode == 75, stopped.stderr
    assert "nothing had to be saved" in stopped.stderr
    assert launch([*command, *words], run).wait(timeout=180) == 0
