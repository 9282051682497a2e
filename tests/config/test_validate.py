from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from nvfp4_train.config.load import compose_config, option_names
from nvfp4_train.config.schema import Config, FaultConfig, PhaseConfig, RuleConfig
from nvfp4_train.config.validate import validate
from nvfp4_train.errors import ConfigError

SIZES = {
    "pattern": "M-M*-M-",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "ssm_state_size": 60,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Config:
    """A run that is to start, whatever was trained in the working folder."""
    batches = ["training.global_batch_size=8", "training.micro_batch_size=8"]
    run = tmp_path_factory.mktemp("runs") / "new"
    cfg = compose_config(["+experiment=quickstart", f"run_dir={run}", *batches])
    cfg = replace(cfg, model=replace(cfg.model, **SIZES))
    validate(cfg)
    return cfg


def changed(cfg: Config, values: dict[str, Any]) -> Config:
    cfg = copy.deepcopy(cfg)
    for key, value in values.items():
        *path, leaf = key.split(".")
        section = cfg
        for name in path:
            section = getattr(section, name)
        assert hasattr(section, leaf)
        setattr(section, leaf, value)
    return cfg


@pytest.mark.parametrize("experiment", option_names("experiment"))
def test_every_experiment_is_valid_in_every_precision(experiment):
    cfg = compose_config([f"+experiment={experiment}"])
    for precision in option_names("precision"):
        validate(changed(cfg, {"precision.name": precision}))


@pytest.mark.parametrize("group", ["schedule", "clipping", "data"])
def test_every_option_is_valid(group):
    for option in option_names(group):
        validate(compose_config(["+experiment=quickstart", f"{group}={option}"]))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"model.pattern": "M-X"},
            r"model\.pattern='M-X' has 'X' at position 3.*M \(Mamba-2\), \* \(attention\), - \(MLP\)",
        ),
        ({"model.pattern": ""}, r"model\.pattern is empty.*M \(Mamba-2\)"),
        (
            {"model.hidden_size": 250},
            r"in_proj has 250 inputs.*model\.hidden_size=250 to 240 or 256.*precision=bf16",
        ),
        (
            {"model.intermediate_size": 1000},
            r"layers\.1\.mixer\.up_proj has 1000 .*intermediate_size=1000 to 992 or 1008",
        ),
        (
            {"model.ssm_state_size": 64},
            r"layers\.0\.mixer\.in_proj has 1160 outputs.*ssm_state_size=64 to 60 or 68",
        ),
        ({"model.head_dim": 62}, r"layers\.3\.mixer\.o_proj has 248 inputs.*model\.head_dim=62 to 60 or 64"),
        (
            {"training.seq_len": 500, "training.micro_batch_size": 1},
            r"makes 500 tokens.*training\.seq_len to 496 or 512",
        ),
        ({"precision.last_blocks_bf16": 7}, r"none of the 7 blocks in NVFP4.*last_blocks_bf16"),
        ({"precision.last_blocks_bf16": -1}, r"precision\.last_blocks_bf16=-1 must be at least 0"),
        (
            {"precision.rules": [RuleConfig(format="int4")]},
            r"format='int4' is not one of nvfp4, mxfp4, fp8, bf16",
        ),
        (
            {"precision.rules": [RuleConfig(format="bf16", modules="*.q_proj")]},
            r"'\*\.q_proj' matches no linear layer.*in_proj",
        ),
        (
            {"precision.rules": [RuleConfig(format="bf16", phase="tail")]},
            r"phase='tail' matches none of main",
        ),
        ({"precision.phases": [PhaseConfig(name="tail", start=0.9)]}, r"starts=\[0\.9\] must begin with 0"),
        (
            {"precision.backend": "fp4"},
            r"precision\.backend='fp4' is unknown: choose auto, emulated, triton, cublas, te",
        ),
        (
            {"precision.name": "int4"},
            r"precision\.name='int4' is unknown: choose nvfp4, mxfp4, fp8, bf16, fp32",
        ),
        ({"precision.backward": "sr"}, r"precision\.backward='sr' is unknown: choose standard, ms_eden"),
        (
            {"precision.name": "mxfp4", "precision.hardware_rounding": True},
            r"hardware_rounding=True is NVFP4's, but precision=mxfp4: leave it at False",
        ),
        (
            {"precision.hardware_rounding": True, "precision.stochastic_gradients": False},
            r"hardware_rounding=true is for stochastic rounding, .*: leave it at false",
        ),
        (
            {"precision.name": "fp8", "precision.four_over_six": "all"},
            r"four_over_six=all is NVFP4's, but precision=fp8: leave it at none",
        ),
        ({"model.vocab_size": 0}, r"model\.vocab_size=0 must be at least 1"),
        ({"model.conv_kernel": 0}, r"model\.conv_kernel=0 must be at least 1"),
        ({"model.norm_eps": 0.0}, r"model\.norm_eps=0 must be a positive number"),
        (
            {"model.num_key_value_heads": 3},
            r"num_attention_heads=4 is not a multiple of .*key_value_heads to 2 or 4",
        ),
        (
            {"model.n_groups": 3},
            r"mamba_num_heads=8 is not a multiple of model\.n_groups=3.*n_groups to 2 or 4",
        ),
        (
            {"training.micro_batch_size": 3},
            r"global_batch_size=8 is not a multiple of .*micro_batch_size to 2 or 4",
        ),
        ({"training.seq_len": -16}, r"training\.seq_len=-16 must be at least 1"),
        ({"training.max_steps": 0}, r"training\.max_steps=0 must be at least 1"),
        ({"training.max_tokens": math.nan}, r"training\.max_tokens=nan must be a positive number"),
        ({"training.seed": 4294967296}, r"training\.seed=4294967296 must be below 2\^32"),
        ({"training.compile": "yes"}, r"training\.compile='yes' is unknown: choose auto, on, off"),
        ({"optimizer.name": "adam"}, r"optimizer\.name='adam' is unknown"),
        ({"optimizer.eps": 0.0}, r"optimizer\.eps=0 must be a positive number"),
        ({"optimizer.betas": [0.9]}, r"optimizer\.betas=\[0\.9\] must be two numbers"),
        ({"optimizer.lr": 0}, r"optimizer\.lr=0 must be a positive"),
        (
            {"schedule.name": "constant"},
            r"schedule\.name='constant' is unknown: choose staged, wsd or cosine",
        ),
        ({"schedule.warmup_tokens": 1e9}, r"schedule\.warmup_tokens=1e\+09 must lie between 0 and"),
        ({"schedule.anneal_start": 1.5}, r"schedule\.anneal_start=1\.5 is a share"),
        ({"clipping.name": "none"}, r"clipping\.name='none' is unknown: choose adaptive, fixed"),
        ({"clipping.baseline": -1}, r"clipping\.baseline=-1 must be a positive number"),
        (
            {"recovery.name": "always"},
            r"recovery\.name='always' is unknown: choose auto, skip_nonfinite, off",
        ),
        ({"data.valid_fraction": 1.5}, r"data\.valid_fraction=1\.5 is a share"),
        ({"data.source": ""}, r"data\.source is empty"),
        ({"checkpoint.keep_last": 0}, r"checkpoint\.keep_last=0 must be at least 1"),
        (
            {"checkpoint.every_steps": 50, "checkpoint.keep_every": 70},
            r"keep_every=70 is not a multiple of .*to 50 or 100",
        ),
        ({"logging.wandb": "yes"}, r"logging\.wandb='yes' is unknown: choose off, offline, online"),
        ({"device": "tpu"}, r"device='tpu' is unknown: choose auto, cpu, cuda"),
        ({"run_dir": " "}, r"run_dir is empty"),
        ({"parallel.tensor": 2}, r"parallel\.tensor=2 is not supported yet: leave it at 1"),
        ({"parallel.replicate": 0}, r"parallel\.replicate=0 must be at least 1"),
        ({"parallel.weight_gather": "fp8"}, r"weight_gather='fp8' is unknown: choose bf16, nvfp4"),
        ({"parallel.grad_reduce": "int8"}, r"grad_reduce='int8' is unknown: choose fp32, bf16, fp8, nvfp4"),
        (
            {"precision.name": "bf16", "parallel.grad_reduce": "nvfp4"},
            r"parallel\.grad_reduce=nvfp4 is for .*precision=bf16 has none: leave it at fp32",
        ),
        ({"parallel.fsdp": 2}, r"parallel\.fsdp=2 doesn't make the 1 processes.*start 2 processes"),
        (
            {"faults": [FaultConfig("crash", 3)]},
            r"faults\[0\]\.kind='crash' is unknown: choose repeated_tokens",
        ),
        ({"faults": [FaultConfig("nan", 0)]}, r"faults\[0\]\.step=0 must be at least 1"),
        ({"recovery.skip_sigmas": 2.0}, r"recovery\.skip_sigmas=2 must be at least recovery\.sigmas=3"),
        ({"recovery.confirm": 20}, r"recovery\.confirm=20 of recovery\.confirm_within=10"),
        (
            {"recovery.careful_bf16": "worst"},
            r"careful_bf16='worst' is unknown: choose all, none, or worst:N",
        ),
        (
            {"recovery.name": "auto", "recovery.snapshot_every": 5},
            r"recovery\.snapshots=2, 5 steps apart .*less than the 30 steps",
        ),
        (
            {"init_from": "runs/other"},
            r"init_from=runs/other is neither a run folder .* nor a Hugging Face model",
        ),
    ],
)
def test_an_impossible_value_is_one_sentence_with_what_is_accepted(base, values, told):
    with pytest.raises(ConfigError) as error:
        validate(changed(base, values))
    message = str(error.value)
    assert re.search(told, message)
    assert message.endswith(".")
    assert "\n" not in message
    assert not re.search(r"\. [A-Z]", message)
