from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nvfp4_train.config.load import CONFIG_DIR, compose_config, groups, load
from nvfp4_train.config.schema import Config
from nvfp4_train.errors import ConfigError

ROOT = Path(__file__).parents[2]
OVERRIDES = [
    "+experiment=12b_hybrid",
    "optimizer.lr=3e-4",
    "precision.rules=[{modules:'*.out_proj',format:bf16}]",
    "training.sample_prompt='def f(x): # 100%, \"quoted\"'",
    "logging.wandb=off",
]


def test_values_come_from_schema_group_experiment_and_command_line():
    cfg = compose_config(OVERRIDES)
    assert cfg.model.conv_kernel == 4
    assert cfg.schedule.name == "wsd"
    assert (cfg.training.global_batch_size, cfg.precision.last_blocks_bf16) == (736, 8)
    assert cfg.optimizer.lr == 3e-4
    assert cfg.precision.rules[0].modules == "*.out_proj"
    assert cfg.run_dir == "runs/12b_hybrid"


def test_a_model_without_an_experiment():
    given = ["model=quickstart", "optimizer.lr=1e-3", "schedule.warmup_tokens=0", "training.max_tokens=1e6"]
    given += ["training.seq_len=64", "training.global_batch_size=2", "training.micro_batch_size=1"]
    assert compose_config(given).run_dir == "runs/custom"
    with pytest.raises(ConfigError, match=r"^training\.micro_batch_size: no value given; set "):
        compose_config(given[:-1])


def test_precision_is_one_key():
    nvfp4, bf16 = (
        dataclasses.asdict(compose_config(["+experiment=quickstart", *o])) for o in ([], ["precision=bf16"])
    )
    assert (nvfp4["precision"].pop("name"), bf16["precision"].pop("name")) == ("nvfp4", "bf16")
    assert nvfp4 == bf16


@pytest.mark.parametrize("experiment", ["quickstart", "12b_hybrid"])
def test_printed_configuration_loads_back(experiment, capsys):
    overrides = [f"+experiment={experiment}", *OVERRIDES[1:]]
    assert load([*overrides, "--cfg", "job"]) is None
    text = capsys.readouterr().out
    expected = compose_config(overrides)
    assert (
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))) == expected
    )
    assert yaml.safe_load(text) == dataclasses.asdict(expected)


def test_help_names_every_option(capsys):
    assert load(["--help"]) is None
    text = capsys.readouterr().out
    assert all(option in text for options in groups().values() for option in options)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.sequence_len=64", "did you mean training.seq_len?"),
        ("modle.hidden_size=64", "did you mean model.hidden_size?"),
        ("hidden_size=64", "did you mean model.hidden_size?"),
        ("training.seq_len.x=1", "training.seq_len is a single value"),
        ("+training.seq_len=64", "without the plus sign"),
        ("~training.seq_len", "nothing can be deleted"),
        ("training.seq_len=many", "it must be a whole number"),
        ("training.seq_len=64.5", "it must be a whole number"),
        ("training.seq_len=32,64", "several values"),
        ("optimizer.lr=fast", "it must be a number"),
        ("training.validate_bf16=perhaps", "it must be true or false"),
        ("precision=nvfp8", "did you mean nvfp4?"),
        ("precision=int4", "no such precision; choose bf16, fp32"),
        ("precision.rules=[{module:x,format:bf16}]", "module"),
        ("hydra.run.dir=x", "run_dir=DIR"),
        ("quickstart", "write +experiment=quickstart"),
        ("experiment=quickstart", "with a plus sign"),
        ("+experiment=12b_hybird", "did you mean 12b_hybrid?"),
        ("training.sample_prompt=def f(", "in quotes"),
    ],
)
def test_a_mistake_is_one_sentence_with_what_is_accepted(override, told):
    overrides = [override] if "experiment" in override else ["+experiment=quickstart", override]
    with pytest.raises(ConfigError) as error:
        compose_config(overrides)
    message = str(error.value)
    assert told in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("argv", [["--multirun"], ["--no-such-flag"], ["--cfg", "hydra"]])
def test_flags_that_do_not_exist(argv):
    with pytest.raises(ConfigError):
        load(["+experiment=quickstart", *argv])


def test_a_mistake_is_told_before_torch_is_imported():
    code = """
import sys
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.validate import validate
validate(compose_config(["+experiment=56b_hybrid"]))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_composing_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose_config(["+experiment=quickstart"])
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_brings_the_configurations(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    for name in ("nvfp4_train", "kernels", "configs"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {
        f"nvfp4_train/configs/{path.relative_to(CONFIG_DIR)}" for path in CONFIG_DIR.rglob("*.yaml")
    } <= names
    assert "nvfp4_kernels/cpu/quantize.cpp" in names
