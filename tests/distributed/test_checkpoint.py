from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvfp4_train.distributed import checkpoint as ckpt
from nvfp4_train.distributed.saving import save
from nvfp4_train.errors import CheckpointError


def tensors(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    matrix = torch.randn(64, 48)
    return {
        "model": {"layers.0.weight": matrix, "view": matrix[:4], "bf16": torch.randn(8).bfloat16()},
        "optimizer": {"layers.0.weight": {"step": torch.tensor(7.0), "exp_avg": torch.randn(64, 48)}},
        "counters": {"skips": torch.tensor(3, dtype=torch.int64)},
        "rng": {"cpu": torch.get_rng_state()},
    }


def flat(state: dict) -> dict:
    return ckpt.flatten(state)


def empty_like(state: dict) -> dict:
    return {k: empty_like(v) if isinstance(v, dict) else torch.zeros_like(v) for k, v in state.items()}


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in folder.glob("step_*"))


@pytest.fixture
def warned():
    return []


def test_everything_comes_back_bit_for_bit(tmp_path, warned):
    state = tensors()
    save(tmp_path, 100, 6400, state, {"wandb_id": "abc", "ema": 0.1})
    found = ckpt.newest(tmp_path, warned.append)
    assert (found.step, found.tokens, found.values) == (100, 6400, {"wandb_id": "abc", "ema": 0.1})
    loaded = empty_like(state)
    ckpt.load(found, loaded)
    for name, value in flat(state).items():
        got = flat(loaded)[name]
        assert got.dtype == value.dtype
        assert torch.equal(got, value), name
    assert warned == []
    assert [p for p in os.listdir(tmp_path) if p.startswith(".")] == []


def test_a_view_is_stored_without_the_tensor_it_looks_into(tmp_path):
    big = torch.zeros(1_000_000)
    path = save(tmp_path, 1, 1, {"row": big[:10]}, {})
    assert sum(p.stat().st_size for p in path.iterdir()) < 20_000


def test_a_part_can_be_loaded_and_mismatches_are_named(tmp_path):
    state = tensors()
    found = ckpt.open_checkpoint(save(tmp_path, 1, 1, state, {}))
    part = {"model": {"layers.0.weight": torch.zeros(64, 48)}}
    ckpt.load(found, part)
    assert torch.equal(part["model"]["layers.0.weight"], state["model"]["layers.0.weight"])
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.weight has shape \[64, 48\].*\[64, 50\]"):
        ckpt.load(found, {"model": {"layers.0.weight": torch.zeros(64, 50)}})
    with pytest.raises(CheckpointError, match=r"no tensor model\.other"):
        ckpt.load(found, {"model": {"other": torch.zeros(1)}})


def truncate(path: Path):
    os.truncate(path / "__0_0.distcp", 1000)


def flip(path: Path):
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def drop(path: Path):
    (path / ".metadata").unlink()


def no_info(path: Path):
    (path / "checkpoint.json").unlink()


def cut_info(path: Path):
    os.truncate(path / "checkpoint.json", 60)


def edit_info(path: Path):
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace('"tokens": 2', '"tokens": 3'))


@pytest.mark.parametrize("harm", [truncate, flip, drop, no_info, cut_info, edit_info])
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, warned, harm):
    save(tmp_path, 1, 1, tensors(), {})
    harm(save(tmp_path, 2, 2, tensors(1), {}))
    assert ckpt.newest(tmp_path, warned.append).step == 1
    assert len(warned) == 1
    assert "step_00000002" in warned[0]
    with pytest.raises(CheckpointError, match="step_00000002 is not whole"):
        ckpt.open_checkpoint(tmp_path / "step_00000002")


def test_no_whole_checkpoint_is_an_error_and_none_at_all_is_not(tmp_path, warned):
    assert ckpt.newest(tmp_path / "absent", warned.append) is None
    assert ckpt.newest(tmp_path, warned.append) is None
    truncate(save(tmp_path, 5, 5, tensors(), {}))
    with pytest.raises(CheckpointError, match=r"none of the checkpoints.*step_00000005.*step 0"):
        ckpt.newest(tmp_path, warned.append)


def test_foreign_and_newer_formats_are_refused_with_a_remedy(tmp_path, warned):
    path = save(tmp_path, 1, 1, tensors(), {})
    info = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(info | {"format_version": 99}))
    with pytest.raises(CheckpointError, match=r"format 99.*update the program"):
        ckpt.newest(tmp_path, warned.append)
    (path / "checkpoint.json").write_text('{"format": "other"}')
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        ckpt.newest(tmp_path, warned.append)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="foreign holds no checkpoint"):
        ckpt.open_checkpoint(tmp_path / "foreign")


def test_open_takes_a_run_folder_its_checkpoints_or_one_of_them(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, 1, 1, tensors(), {})
    path = save(folder, 2, 2, tensors(), {})
    assert {ckpt.open_checkpoint(p).step for p in (tmp_path, folder, path)} == {2}
    assert ckpt.open_checkpoint(folder / "step_00000001").step == 1


def test_retention_keeps_the_newest_and_the_milestones(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, step, {"x": torch.zeros(1)}, {}, keep_last=2, keep_every=3)
    assert steps(tmp_path) == [3, 6, 7]


def test_a_damaged_newer_checkpoint_neither_displaces_nor_outlives_the_run(tmp_path, warned):
    save(tmp_path, 1, 1, tensors(), {})
    truncate(save(tmp_path, 3, 3, tensors(), {}))
    save(tmp_path, 2, 2, tensors(), {}, keep_last=1)
    assert steps(tmp_path) == [2, 3]
    assert ckpt.newest(tmp_path, warned.append).step == 2
    save(tmp_path, 3, 3, tensors(), {}, keep_last=1)
    assert steps(tmp_path) == [3]
    assert ckpt.open_checkpoint(tmp_path).step == 3


def test_leftovers_of_a_killed_save_are_ignored_and_swept(tmp_path, warned):
    save(tmp_path, 1, 1, tensors(), {})
    (tmp_path / ".step_00000002.tmp-deadbeef").mkdir()
    (tmp_path / ".step_00000002.tmp-deadbeef" / "__0_0.distcp").write_bytes(b"half")
    assert ckpt.newest(tmp_path, warned.append).step == 1
    ckpt.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["step_00000001"]


# The limit counts what one file may hold, so it strikes where a full disk would: in the first tensor, in a later
# one, in DCP's own index, in checkpoint.json.
_FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from nvfp4_train.distributed import checkpoint as ckpt
from nvfp4_train.distributed.saving import Saver, save
from nvfp4_train.errors import CheckpointError
folder = Path(sys.argv[1])
state = {"a": torch.ones(100_000), "b": torch.ones(300_000)}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save(folder, 1, 1, state, {}, keep_last=1)
for limit, values in [(0, {}), (200_000, {}), (900_000, {}), (1_700_000, {"x": "y" * 2_000_000})]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(folder, 2, 2, state, values, keep_last=1)
    except CheckpointError as error:
        print(limit, error)
    print(sorted(p.name for p in folder.iterdir()), ckpt.open_checkpoint(folder).step)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
save(folder, 2, 2, state, {}, keep_last=1)
print(sorted(p.name for p in folder.iterdir()))
"""


def test_full_disk_harms_nothing_and_the_next_save_works(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 9, done.stdout + done.stderr
    for message, left in zip(lines[:8:2], lines[1:8:2], strict=True):
        assert "step 2 could not be written" in message
        assert "free some space" in message
        assert "File too large" in message
        assert left == "['step_00000001'] 1"
    assert lines[8] == "['step_00000002']"


def test_a_failed_rename_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1, 1, tensors(), {}, keep_last=1)
    rename = os.rename

    def fail(source, target):
        if os.path.basename(target) == "step_00000002":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 2, 2, tensors(), {}, keep_last=1)
    assert os.listdir(tmp_path) == ["step_00000001"]
