from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch

from nvfp4_train.config.schema import Config, RuleConfig
from nvfp4_train.distributed import saving
from nvfp4_train.errors import CheckpointError
from nvfp4_train.training import resume
from nvfp4_train.training.run_folder import RunFolder


@pytest.fixture
def cfg(tmp_path) -> Config:
    cfg = Config(run_dir=str(tmp_path / "run"))
    cfg.training.max_tokens, cfg.training.seq_len, cfg.training.global_batch_size = 1000, 10, 5
    cfg.precision.rules = [RuleConfig(modules="*.out_proj", format="bf16")]
    cfg.optimizer.eps = 1e-8
    return cfg


@pytest.fixture
def folder(cfg):
    folder = RunFolder(cfg.run_dir)
    yield folder
    folder.close()


def save(folder: RunFolder, step: int):
    return saving.save(folder.checkpoints, step, step * 50, {"x": torch.ones(3)}, {})


def write_metrics(folder: RunFolder, steps: int, torn: str = ""):
    lines = [json.dumps({"step": s, "loss": 1.0 / s}) + "\n" for s in range(1, steps + 1)]
    folder.metrics.write_text("".join(lines) + torn)


def recorded_steps(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]


def no_warning(text):
    raise AssertionError(text)


def test_a_new_run_and_one_without_checkpoint_start_from_nothing(folder, cfg):
    assert resume.begin(folder, cfg, no_warning) == resume.Start(None, {})
    write_metrics(folder, 3)
    cfg.optimizer.lr = 5.0
    assert resume.begin(folder, cfg, no_warning) == resume.Start(None, {})
    assert recorded_steps(folder) == []
    assert folder.saved_config["optimizer"]["lr"] == 5.0


def test_resume_cuts_metrics_back_to_the_checkpoint(folder, cfg):
    resume.begin(folder, cfg, no_warning)
    save(folder, 4)
    write_metrics(folder, 7, torn='{"step": 8, "lo')
    start = resume.begin(folder, cfg, no_warning)
    assert (start.checkpoint.step, start.changed, start.finished) == (4, {}, False)
    assert recorded_steps(folder) == [1, 2, 3, 4]


def test_a_damaged_newest_checkpoint_takes_the_metrics_back_further(folder, cfg):
    resume.begin(folder, cfg, no_warning)
    save(folder, 2)
    (save(folder, 4) / ".metadata").write_bytes(b"")
    write_metrics(folder, 5)
    warnings = []
    assert resume.begin(folder, cfg, warnings.append).checkpoint.step == 2
    assert "step_00000004" in warnings[0]
    assert recorded_steps(folder) == [1, 2]


def test_changes_are_recorded_or_refused_key_by_key(folder, cfg):
    resume.begin(folder, cfg, no_warning)
    save(folder, 4)
    write_metrics(folder, 5)
    allowed = deepcopy(cfg)
    allowed.training.max_tokens, allowed.logging.wandb, allowed.parallel.fsdp = 2000, "offline", 2
    expected = {
        "parallel.fsdp": [None, 2],
        "logging.wandb": ["off", "offline"],
        "training.max_tokens": [1000, 2000],
    }
    assert resume.begin(folder, allowed, no_warning).changed == expected

    refused = deepcopy(allowed)
    refused.optimizer.lr, refused.model.hidden_size, refused.precision.rules[0].format = 1.0, 128, "nvfp4"
    before = {p: p.read_bytes() for p in folder.path.iterdir() if p.is_file()}
    with pytest.raises(CheckpointError) as caught:
        resume.begin(folder, refused, no_warning)
    message = str(caught.value)
    assert "set run_dir to a new folder" in message
    for line in (
        "optimizer.lr: was '???', now 1.0",
        "model.hidden_size: was '???', now 128",
        "precision.rules: was [{",
    ):
        assert line in message
    assert "max_tokens" not in message
    assert {p: p.read_bytes() for p in folder.path.iterdir() if p.is_file()} == before


def test_a_key_added_since_counts_as_its_default(cfg):
    saved = resume.dataclasses.asdict(cfg)
    del saved["optimizer"]["weight_decay"]
    saved["optimizer"]["gone"] = 3
    assert resume.differences(saved, cfg) == {"optimizer.gone": [3, "(absent)"]}
    cfg.optimizer.weight_decay = 0.2
    assert resume.differences(saved, cfg)["optimizer.weight_decay"] == [0.1, 0.2]


def test_a_finished_run_is_told_and_untouched_until_the_budget_grows(folder, cfg):
    resume.begin(folder, cfg, no_warning)
    save(folder, 20)
    write_metrics(folder, 20)
    assert not resume.begin(
        folder, cfg, no_warning
    ).finished  # killed before the summary: that is still to do
    folder.finish(20)
    assert resume.begin(folder, cfg, no_warning).finished
    assert folder.finished_step == 20
    cfg.training.max_tokens = 1001
    start = resume.begin(folder, cfg, no_warning)
    assert (start.finished, start.changed) == (False, {"training.max_tokens": [1000, 1001]})
    assert folder.finished_step is None


@pytest.mark.parametrize(
    ("max_tokens", "max_steps", "steps"),
    [(1000, None, 20), (1001, None, 21), (1, None, 1), (1000, 7, 7), (1000, 99, 20)],
)
def test_total_steps(cfg, max_tokens, max_steps, steps):
    cfg.training.max_tokens, cfg.training.max_steps = max_tokens, max_steps
    assert resume.total_steps(cfg.training) == steps


def test_checkpoints_without_their_configuration_are_refused(folder, cfg):
    resume.begin(folder, cfg, no_warning)
    save(folder, 4)
    (folder.path / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"has checkpoints but no config\.yaml"):
        resume.begin(folder, cfg, no_warning)
