"""Runs with rehearsed faults, from the command line to the exit code."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import signal
import subprocess
import sys

import pytest

from nvfp4_train import cli, pretrain
from nvfp4_train.distributed import checkpoint
from nvfp4_train.training.history import History
from nvfp4_train.training.metrics import MetricsWriter, read_metrics
from nvfp4_train.training.trainer import _BrokenOff
from tests.text import data_words
from tests.tiny import TINY

WALL_CLOCK = ("tokens_per_second", "tflops", "memory_gib", "data_wait_fraction")
STEPS = 60
WORDS = [
    *TINY,
    f"training.max_tokens={STEPS * 256}",
    "training.validate_every=0",
    "training.sample_tokens=0",
    "checkpoint.every_steps=30",
    "recovery=auto",
    "recovery.window=20",
    "recovery.snapshot_every=20",
    "recovery.skip_margin=2",
    "recovery.careful_steps=10",
    "precision.health_every=10",
]
WRONG_RATE = "faults=[{kind:lr,step:35,steps:4,factor:1000}]"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return data_words(tmp_path_factory.mktemp("text"))


def train(run: pathlib.Path, *words: str) -> tuple[int, str]:
    """(exit code, standard error) of pretrain, in this process."""
    error, argv = io.StringIO(), sys.argv
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    sys.argv = ["pretrain", *WORDS, *words, f"run_dir={run}"]
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            return cli.exit_code(pretrain.main), error.getvalue()
    finally:
        sys.argv = argv
        for number, handler in handlers.items():  # a stopped run ignores more of them, and so would children
            signal.signal(number, handler)


def steps(run: pathlib.Path) -> list[dict]:
    """The records of steps, without what the clock decides."""
    records = [r for r in read_metrics(run / "metrics.jsonl") if "event" not in r]
    return [{k: v for k, v in r.items() if k not in WALL_CLOCK} for r in records]


def rollbacks(run: pathlib.Path) -> list[dict]:
    return [r for r in read_metrics(run / "metrics.jsonl") if r.get("event") == "rollback"]


@pytest.fixture(scope="module")
def healthy(data, tmp_path_factory) -> list[dict]:
    run = tmp_path_factory.mktemp("healthy") / "run"
    assert train(run, *data)[0] == 0
    return steps(run)


@pytest.fixture(scope="module")
def rewound(data, tmp_path_factory) -> pathlib.Path:
    run = tmp_path_factory.mktemp("rewound") / "run"
    code, error = train(run, *data, WRONG_RATE)
    assert code == 0, error
    return run


def test_without_events_recovery_changes_no_bit(data, healthy, tmp_path):
    for name in ("skip_nonfinite", "off"):
        assert train(tmp_path / name, *data, f"recovery.name={name}", "precision.health_every=0")[0] == 0
        other = steps(tmp_path / name)
        assert other == [{k: v for k, v in r.items() if not k.startswith("health/")} for r in healthy]
    assert any(k.endswith("/sqnr_db") for k in healthy[9])
    assert not rollbacks(tmp_path / "off")


def test_a_wrong_learning_rate_is_rewound_and_every_step_stands_once(rewound, healthy):
    records, (rollback,) = steps(rewound), rollbacks(rewound)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert rollback["back_to"] == 30  # the checkpoint, newer than the snapshot of step 20
    first, last = rollback["skip"]
    assert (first, last) == (rollback["onset"] - 3, rollback["found"] + 1)
    before = first  # steps up to there see the same batches once more
    assert records[:before] == healthy[:before]
    assert records[before]["loss"] != healthy[before]["loss"]
    assert abs(records[-1]["valid/heldout/loss"] / healthy[-1]["valid/heldout/loss"] - 1) < 0.02
    left = read_metrics(rewound / "recovery" / "rewind_001.jsonl")
    assert [r["step"] for r in left if "event" not in r] == list(range(31, rollback["found"] + 1))
    assert json.loads((rewound / "recovery.json").read_text())["rewinds"][0]["back_to"] == 30


@pytest.mark.parametrize("moment", ["before the metrics are cut back", "after the rewind"])
def test_a_kill_in_the_middle_of_a_recovery_resumes_it(data, rewound, tmp_path, monkeypatch, moment):
    run = tmp_path / "run"
    if moment == "after the rewind":
        with monkeypatch.context() as patch:
            patch.setattr("nvfp4_train.training.trainer.Trainer._read_ahead", _on_call(2, interrupted))
            assert train(run, *data, WRONG_RATE)[0] == 130
    else:
        killed_while_rewinding(run, *data, WRONG_RATE)
        assert not (run / "recovery").exists()  # the journal alone is written
    code, error = train(run, *data, WRONG_RATE)
    assert code == 0, error
    assert steps(run) == steps(rewound)
    assert rollbacks(run) == rollbacks(rewound)
    assert (run / "recovery" / "rewind_001.jsonl").exists()


def test_killed_in_a_recovery_it_goes_on_with_another_folder_for_checkpoints(
    data, rewound, tmp_path, monkeypatch
):
    """Those of the way that is left are passed over where they are."""
    words = [*data, WRONG_RATE, "checkpoint.every_steps=18"]  # step 36 is in trouble that nobody has seen yet
    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "rewind", interrupted)
        patch.setattr("nvfp4_train.training.rewinding.discard_abandoned", lambda *_: None)
        assert train(tmp_path / "run", *words)[0] == 130
    assert (tmp_path / "run" / "checkpoints" / "step_00000036").exists()
    code, error = train(tmp_path / "run", *words, f"checkpoint.dir={tmp_path / 'elsewhere'}")
    assert code == 0, error
    (resume,) = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r.get("event") == "resume"]
    assert resume["step"] == 18
    assert [r["step"] for r in steps(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert abs(steps(tmp_path / "run")[-1]["loss"] / steps(rewound)[-1]["loss"] - 1) < 0.1


def test_a_fault_in_the_last_steps_is_recovered_from(data, healthy, tmp_path):
    fault = f"faults=[{{kind:bit_flip,step:{STEPS - 1},tensor:'norm_f*'}}]"
    assert train(tmp_path / "run", *data, fault)[0] == 0
    records, (rollback,) = steps(tmp_path / "run"), rollbacks(tmp_path / "run")
    assert (rollback["onset"], rollback["found"]) == (STEPS - 1, STEPS)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert abs(records[-1]["valid/heldout/loss"] / healthy[-1]["valid/heldout/loss"] - 1) < 0.02


def test_a_record_that_waited_for_its_validation_is_written_once(data, tmp_path, monkeypatch):
    """A rewind to the checkpoint that held it doesn't bring it back."""
    run, words = tmp_path / "run", [*data, WRONG_RATE, "training.validate_every=30"]
    with monkeypatch.context() as patch:
        patch.setattr("nvfp4_train.training.trainer.Trainer._validate", _broken_off)
        assert train(run, *words)[0] == 75
    with monkeypatch.context() as patch:
        patch.setattr("nvfp4_train.training.snapshots.Snapshots.newest", lambda self, up_to: None)
        assert train(run, *words)[0] == 0
    assert rollbacks(run)[0]["back_to"] == 30
    assert [r["step"] for r in steps(run)] == list(range(1, STEPS + 1))
    assert checkpoint.open_checkpoint(run / "checkpoints" / f"step_{STEPS:08d}").values["unfinished"] is None


def interrupted(*_, **__):
    raise KeyboardInterrupt


def _broken_off(*_):
    raise _BrokenOff


def killed_while_rewinding(run: pathlib.Path, *words: str) -> None:
    """A process of its own that gets SIGKILL once a rewind's journal is written."""
    code = (
        "import os, signal, sys\n"
        "from nvfp4_train import cli, pretrain\n"
        "from nvfp4_train.training.metrics import MetricsWriter\n"
        "MetricsWriter.rewind = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(cli.exit_code(pretrain.main))"
    )
    done = subprocess.run([sys.executable, "-c", code, *WORDS, *words, f"run_dir={run}"], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def _on_call(number: int, then):
    """Trainer._read_ahead, but for one call."""
    from nvfp4_train.training.trainer import Trainer

    real, calls = Trainer._read_ahead, []

    def function(self):
        calls.append(None)
        return then() if len(calls) == number else real(self)

    return function


def test_one_nan_costs_one_step_and_nothing_else(data, healthy, tmp_path):
    assert train(tmp_path / "run", *data, "faults=[{kind:nan,step:30}]")[0] == 0
    records = steps(tmp_path / "run")
    assert records[:29] == healthy[:29]
    assert [r["step"] for r in records if r["skipped"]] == [30]
    assert records[29]["loss"] == healthy[29]["loss"]
    assert not rollbacks(tmp_path / "run")


def test_trouble_that_stays_goes_up_the_ladder_and_ends_with_a_report(data, tmp_path, monkeypatch):
    words = ["faults=[{kind:nan,step:33,steps:99,repeat:true}]", "recovery.max_rollbacks=2"]
    code, error = train(tmp_path / "run", *data, *words)
    assert code == 76
    assert "2 rewinds have not helped (recovery.max_rollbacks=2)" in error
    first, second = History.from_state(
        json.loads((tmp_path / "run" / "recovery.json").read_text())["rewinds"]
    ).rewinds
    assert (first.lr_factor, second.lr_factor, len(second.bf16)) == (1.0, 0.5, 6)
    assert second.back_to < first.back_to
    report = (tmp_path / "run" / "recovery_report.md").read_text()
    for part in (
        "gradient norm nan",
        "rewind 1",
        "rewind 2",
        "6 layers in BF16",
        "layers.0.mixer.in_proj",
        "def ",
    ):
        assert part in report, report
    assert (tmp_path / "run" / "recovery_report.png").stat().st_size > 1000
    # The cause put right, the same run goes on from its last sound state.
    assert train(tmp_path / "run", *data, "faults=[]")[0] == 0
    assert [r["step"] for r in steps(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_a_batch_that_cannot_be_read_is_tried_again(data, healthy, tmp_path, monkeypatch):
    monkeypatch.setattr("nvfp4_train.training.batches.time.sleep", lambda seconds: None)
    fault = "faults=[{kind:read_error,step:10,steps:3}]"
    assert train(tmp_path / "run", *data, fault, "training.max_steps=20")[0] == 0
    assert [r["loss"] for r in steps(tmp_path / "run")] == [r["loss"] for r in healthy[:20]]
    code, error = train(tmp_path / "gives_up", *data, fault, "recovery.read_retries=2")
    assert code == 76
    assert "batch 9 of step 10 could not be read in 3 attempts" in error
    assert "could not be read" in (tmp_path / "gives_up" / "recovery_report.md").read_text()
