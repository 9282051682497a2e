from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from nvfp4_train.config.schema import Config
from nvfp4_train.errors import CheckpointError
from nvfp4_train.training.run_folder import RunFolder


@pytest.fixture
def cfg(tmp_path) -> Config:
    cfg = Config(run_dir=str(tmp_path / "run"))
    cfg.optimizer.lr = 1e-3
    cfg.data.source = "Texte/ä"
    return cfg


def test_a_run_keeps_its_id_and_records_each_launch(cfg):
    first = RunFolder(cfg.run_dir)
    assert first.saved_config is None
    first.start(cfg)
    first.finish(7)
    first.close()
    second = RunFolder(cfg.run_dir)
    assert (second.run_id, second.finished_step) == (first.run_id, 7)
    second.start(cfg)
    assert second.finished_step is None
    second.close()

    saved = yaml.safe_load((first.path / "config.yaml").read_text(encoding="utf-8"))
    assert saved["optimizer"] == {
        "name": "adamw",
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert saved["data"]["source"] == "Texte/ä"
    environment = json.loads((first.path / "environment.json").read_text())
    assert len(environment["launches"]) == 2
    launch = environment["launches"][1]
    assert launch["packages"]["torch"]
    assert launch["threads"] >= 1
    assert launch["command"] == sys.argv
    assert json.loads((first.path / "run.json").read_text())["format_version"] == 1


def test_two_trainers_cannot_hold_one_folder(cfg):
    folder = RunFolder(cfg.run_dir)
    code = f"""
from nvfp4_train.training.run_folder import RunFolder
try:
    RunFolder({cfg.run_dir!r})
except Exception as error:
    print(type(error).__name__, error.exit_code, error)
"""
    tries = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2)]
    for done in tries:
        assert "CheckpointError 2 run_dir=" in done.stdout, done.stderr
        assert "in use by process" in done.stdout
    folder.close()
    RunFolder(cfg.run_dir).close()


def test_folders_of_others_are_refused_and_left_alone(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1")
    with pytest.raises(CheckpointError, match=r"holds config\.yaml but no run\.json"):
        RunFolder(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1"
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "nvfp4_train.run", "format_version": 9}', "format 9.*update the program"),
        ('{"format": "other"}', "isn't of this program"),
        ("{", "unreadable"),
    ],
)
def test_run_json_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    for _ in range(2):  # the failed one lets go of the lock
        with pytest.raises(CheckpointError, match=message):
            RunFolder(tmp_path)


def test_a_path_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="can't be written"):
        RunFolder(tmp_path / "file" / "run")
