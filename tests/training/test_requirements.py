from __future__ import annotations

import re
import shutil
from collections import namedtuple

import pytest
import torch

from nvfp4_train.config.load import compose_config, option_names
from nvfp4_train.errors import ConfigError
from nvfp4_train.model.flops import parameter_count
from nvfp4_train.training import machine, requirements
from nvfp4_train.training.memory import estimate

GIB = 2**30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """24 GiB of RAM, 100 GiB of disk, no GPU, whatever this machine is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "memory_bytes", lambda device: 24 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(200 * GIB, 100 * GIB, 100 * GIB))
    monkeypatch.setattr(requirements, "option_names", lambda group: ["quickstart"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        requirements.check(compose_config(overrides))
    return str(error.value)


def test_quickstart_runs_on_a_small_machine(tmp_path):
    requirements.check(compose_config(["+experiment=quickstart", f"run_dir={tmp_path / 'not' / 'yet'}"]))


def test_a_large_model_is_told_what_it_needs_what_is_there_and_what_to_try(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requirements, "option_names", option_names)
    message = refusal("+experiment=12b_hybrid")
    assert message.startswith("12b_hybrid can't run here as it stands:")
    need = estimate(compose_config(["+experiment=12b_hybrid"]), "cpu").total
    assert re.search(
        rf"memory +needs +{need / GIB:.0f} GiB on one device, for 12,310,001,152 parameters", message
    )
    assert "has    24.0 GiB of RAM" in message
    assert "data.source=data/12b_hybrid doesn't exist" in message
    assert re.search(r"try +data\.source=FOLDER", message)
    assert re.search(r"disk +needs +413 GiB for 3 checkpoints of 138 GiB\n +has +100 GiB free", message)
    assert "+experiment=quickstart" in message
    assert "+experiment=125m_hybrid" in message
    assert not re.search(r"experiment=(1b|8b|12b|56b)", message)


def test_only_what_lacks_is_told(tmp_path):
    (tmp_path / "text").mkdir()
    message = refusal("+experiment=1b_hybrid", f"data.source={tmp_path / 'text'}")
    assert "memory" in message
    assert "data.source" not in message
    assert "checkpoints" not in message
    message = refusal("+experiment=quickstart", "data.source=no/such/folder")
    assert "data.source=no/such/folder doesn't exist" in message
    assert "memory" not in message


def test_the_suggested_micro_batch_fits():
    given = ["+experiment=350m_hybrid", "data=stdlib"]
    message = refusal(*given, "training.micro_batch_size=8")
    (suggested,) = re.findall(r"try +(training\.micro_batch_size=\d+)", message)
    requirements.check(compose_config([*given, suggested]))
    larger = 2 * int(suggested.split("=")[1])
    assert "memory" in refusal(*given, f"training.micro_batch_size={larger}")


def test_an_earlier_checkpoint_counts_as_room(tmp_path, monkeypatch):
    given = ["+experiment=quickstart", f"run_dir={tmp_path}"]
    free = 2 * requirements.checkpoint_bytes(compose_config(given))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    assert re.search(rf"disk(.|\n)*free at {tmp_path}(.|\n)*checkpoint\.keep_last=1", refusal(*given))
    step = tmp_path / "checkpoints" / "step_00000050"
    step.mkdir(parents=True)
    with open(step / "data", "wb") as f:
        f.truncate(free // 2)
    requirements.check(compose_config(given))


def test_a_device_that_is_not_there():
    message = refusal("+experiment=quickstart", "device=cuda")
    assert message.startswith("device=cuda: ")
    assert "device=cpu" in message


def test_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    monkeypatch.undo()
    own = tmp_path / "slice" / "job"
    own.mkdir(parents=True)
    (tmp_path / "slice" / "memory.max").write_text("1073741824\n")
    (own / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine.Path, "read_text", _with_cgroup(machine.Path.read_text, "0::/slice/job\n"))
    assert machine.memory_bytes(torch.device("cpu")) == GIB


def _with_cgroup(read, text):
    return lambda path, *args, **kw: text if str(path) == "/proc/self/cgroup" else read(path, *args, **kw)


def test_a_gpu_machine_needs_memory_for_the_copies_of_all_its_ranks(monkeypatch):
    cfg = compose_config(["+experiment=350m_hybrid"])
    need = 3 * 12 * parameter_count(cfg.model)  # one to save from, two to rewind to
    monkeypatch.setattr(machine, "memory_bytes", lambda device: need)
    assert requirements._host(cfg, "cuda") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    problem = requirements._host(cfg, "cuda")
    assert "recovery=skip_nonfinite" in problem.remedy
    assert requirements._host(cfg, "cpu") is None  # counted with the rest
