"""The command line as a user meets it: exit codes, one-sentence errors, and a full disk."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest

from nvfp4_train import cli, pretrain
from nvfp4_train.config.load import compose_config
from nvfp4_train.data import corpora
from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.saving import Saver
from nvfp4_train.errors import DataError
from nvfp4_train.training.metrics import read_metrics
from nvfp4_train.training.run_folder import RunFolder
from tests.text import write_documents
from tests.tiny import TINY


def pretrain_process(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "nvfp4_train.pretrain", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture
def text(tmp_path) -> pathlib.Path:
    return write_documents(tmp_path / "text")


def in_process(tmp_path: pathlib.Path, *words: str) -> tuple[int, str]:
    """(exit code, what a user reads on standard error) of pretrain in this process: one import of torch for all."""
    import contextlib
    import io

    error = io.StringIO()
    argv = sys.argv
    sys.argv = ["pretrain", *words, f"run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = cli.exit_code(pretrain.main)
    finally:
        sys.argv = argv
    return code, error.getvalue()


def test_a_misspelt_key_stops_within_the_first_second_or_two_with_exit_code_2():
    begin = time.monotonic()
    done = pretrain_process("+experiment=quickstart", "training.max_token=1e6")
    assert time.monotonic() - begin < 10
    assert done.returncode == 2
    assert "training.max_token" in done.stderr
    assert "did you mean training.max_tokens?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.pattern=M*X-"], ["model.pattern", "'X'"]),
        (["model.hidden_size=250"], ["hidden_size", "250", "16"]),
        (
            ["training.seq_len=20", "training.micro_batch_size=1", "training.global_batch_size=1"],
            ["16", "seq_len"],
        ),
        (["data.source=/no/such/folder"], ["/no/such/folder"]),
    ],
)
def test_bad_configuration_is_one_sentence_and_exit_code_2(tmp_path, words, says):
    code, error = in_process(tmp_path, "+experiment=quickstart", *words)
    assert code == 2, error
    assert all(part in error for part in says), error
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_data_that_cannot_be_used_is_one_sentence_and_exit_code_2(tmp_path, text):
    empty = tmp_path / "empty"
    empty.mkdir()
    code, error = in_process(tmp_path, *TINY, f"data.source={empty}")
    assert code == 2
    assert str(empty) in error

    (text / "latin1.txt").write_bytes(b"caf\xe9 au lait\n" * 10)
    code, error = in_process(tmp_path, *TINY, f"data.source={text}")
    assert code == 2
    assert "latin1.txt" in error
    assert "UTF-8" in error


def test_truncated_shard_stops_the_run_by_name(tmp_path, text):
    from nvfp4_train.data.build import prepare

    cfg = compose_config([*TINY, f"data.source={text}", "data.valid_fraction=0.2", "run_dir=x"])
    cfg.data.cache_dir = str(tmp_path / "cache")
    dataset = prepare(cfg.data, cfg.model.vocab_size, lambda line: None)
    shard = max(dataset.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size - 2)
    code, error = in_process(tmp_path, *TINY, f"data.source={text}", "data.valid_fraction=0.2")
    assert code == 2
    assert shard.name in error


def test_damaged_checkpoint_falls_back_and_a_foreign_one_is_refused(tmp_path, text):
    words = [*TINY, f"data.source={text}", "data.valid_fraction=0.2", "training.validate_every=0"]
    assert in_process(tmp_path, *words, "training.max_steps=14")[0] == 0
    folder = tmp_path / "run" / "checkpoints"
    newest = folder / "step_00000014"
    weights = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(weights, weights.stat().st_size // 2)
    assert in_process(tmp_path, *words, "training.max_steps=15")[0] == 0  # from step 7
    log = (tmp_path / "run" / "console.log").read_text()
    assert "step_00000014 is passed over" in log
    assert (folder / "step_00000015").is_dir()

    (folder / "step_00000099").mkdir()
    (folder / "step_00000099" / checkpoint.INFO_NAME).write_text('{"format": "of another program"}')
    code, error = in_process(tmp_path, *words, "training.max_steps=16")
    assert code == 2
    assert "step_00000099 is not a checkpoint of this program" in error


def test_full_disk_while_saving_harms_nothing_that_was_saved(tmp_path, text, monkeypatch):
    words = [*TINY, f"data.source={text}", "data.valid_fraction=0.2", "training.validate_every=0"]
    assert in_process(tmp_path, *words, "training.max_steps=7")[0] == 0
    before = checkpoint.open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000007")

    real_open = open

    def full(file, mode="r", *args, **kwargs):
        if ".step_00000014" in str(file) and "w" in mode:
            raise OSError(28, "No space left on device", str(file))
        return real_open(file, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", full)
    code, error = in_process(tmp_path, *words, "training.max_steps=20")
    monkeypatch.undo()
    assert code == 1
    assert "step 14" in error
    assert "No space left on device" in error
    assert checkpoint.open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000007") == before
    assert (
        in_process(tmp_path, *words, "training.max_steps=20")[0] == 0
    )  # once there is room, the same command goes on


def test_12b_on_this_machine_says_what_it_needs_has_and_what_to_try():
    begin = time.monotonic()
    done = pretrain_process("+experiment=12b_hybrid")
    assert done.returncode == 2
    assert time.monotonic() - begin < 60  # 10 s is the aim, on a machine that runs nothing else
    for part in ("memory", "12,310,001,152 parameters", "data", "data.source", "+experiment=quickstart"):
        assert part in done.stderr, done.stderr


def test_plan_of_the_12b_run():
    done = pretrain_process("+experiment=12b_hybrid", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "12,310,001,152" in done.stdout
    assert "72.10 GFLOP" in done.stdout


def test_an_error_while_data_is_read_keeps_its_sentence(tmp_path, text, monkeypatch):
    def broken(*_):
        raise DataError("shard train-0 is gone: put it back.")

    monkeypatch.setattr(corpora, "open_dataset", broken)
    code, error = in_process(tmp_path, *TINY, f"data.source={text}", "data.valid_fraction=0.2")
    assert (code, error) == (2, "Error: shard train-0 is gone: put it back.\n")


def test_losses_that_are_not_finite_skip_the_update_and_then_stop_with_exit_code_76(
    tmp_path, text, monkeypatch
):
    from nvfp4_train.model.hybrid import HybridModel

    real = HybridModel.loss

    def poisoned(self, *args, **kwargs):
        nll, count = real(self, *args, **kwargs)
        return (nll * float("nan") if self.training else nll), count

    monkeypatch.setattr(HybridModel, "loss", poisoned)
    words = [*TINY, f"data.source={text}", "data.valid_fraction=0.2"]
    words += ["recovery=skip_nonfinite", "recovery.max_consecutive_skips=3"]
    code, error = in_process(tmp_path, *words)
    assert code == 76
    assert "recovery.max_consecutive_skips=3" in error
    assert "weights were left as they are" in (tmp_path / "run" / "console.log").read_text()


def test_a_checkpoint_finds_every_step_up_to_its_own_in_the_metrics(tmp_path, text, monkeypatch):
    save, missing = Saver.save, []

    def checked(self, step, *args):
        written = [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")]
        missing.extend(sorted(set(range(1, step + 1)) - set(written)))
        return save(self, step, *args)

    monkeypatch.setattr(Saver, "save", checked)
    words = ["training.log_every=10", "training.validate_every=0", "checkpoint.every_steps=7"]
    code, error = in_process(tmp_path, *TINY, f"data.source={text}", *words, "training.max_steps=16")
    assert code == 0, error
    assert missing == []


def test_a_run_killed_after_its_last_checkpoint_finishes_with_the_same_command(tmp_path, text, monkeypatch):
    def killed(self, step):
        raise KeyboardInterrupt

    words = [*TINY, f"data.source={text}", "training.max_steps=4"]
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", killed)
        assert in_process(tmp_path, *words)[0] == 130
    code, error = in_process(tmp_path, *words)
    assert code == 0, error
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "event" not in r] == [1, 2, 3, 4]


def test_a_budget_below_what_was_trained_already_ends_the_run(tmp_path, text, monkeypatch):
    save = Saver.save

    def saved_then_killed(self, *args):
        save(self, *args)
        self.wait()
        raise KeyboardInterrupt

    words = [*TINY, f"data.source={text}"]
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", saved_then_killed)
        assert in_process(tmp_path, *words)[0] == 130
    code, error = in_process(tmp_path, *words, "training.max_steps=5")  # the checkpoint is of step 7
    assert code == 0, error
