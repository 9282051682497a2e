from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

import hypothesis
import pytest
import torch

from nvfp4_train.atomic import write_text
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.schema import Config
from nvfp4_train.data.build import prepare
from nvfp4_train.data.dataset import Dataset, open_dataset
from nvfp4_train.distributed.saving import save
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.precision import PrecisionRuntime, apply_recipe
from nvfp4_train.training.inference import save_tokenizer
from nvfp4_train.training.run_folder import config_yaml
from tests.text import data_words
from tests.tiny import TINY_MODEL

# The same cases on every run, so that a change is judged by what it changed; HYPOTHESIS_PROFILE=explore draws new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_RUN = [
    "training.max_tokens=1e5",
    "training.global_batch_size=4",
    "training.micro_batch_size=4",
    "optimizer.lr=1e-3",
    "schedule.warmup_tokens=1e3",
    "checkpoint.every_steps=10",
]


@dataclass(frozen=True)
class TinyRun:
    """A run folder as the trainer leaves it, and what is in it."""

    path: pathlib.Path
    cfg: Config
    dataset: Dataset
    model: HybridModel
    precision: PrecisionRuntime


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> TinyRun:
    """A hybrid of 5 blocks in NVFP4 on a little text, with a checkpoint at step 20. Not to be written to."""
    root = tmp_path_factory.mktemp("tiny")
    cfg = compose_config([*TINY_MODEL, *_RUN, *data_words(root), f"run_dir={root / 'run'}"])
    dataset = open_dataset(prepare(cfg.data, cfg.model.vocab_size, lambda line: None))

    model = HybridModel(cfg.model).requires_grad_(False)
    initialize_(model, 1)
    # Larger than the initial ones, for outputs that differ visibly between precisions and texts.
    for name, parameter in model.named_parameters():
        if name in ("lm_head.weight", "embeddings.weight"):
            parameter.mul_(3)
    precision = apply_recipe(model, cfg.precision, len(cfg.model.pattern), 1)

    run = root / "run"
    run.mkdir()
    write_text(run / "config.yaml", config_yaml(cfg))
    save_tokenizer(run, dataset.tokenizer)
    save(run / "checkpoints", 10, 1280, {"model": {k: torch.zeros_like(v) for k, v in _weights(model)}}, {})
    save(run / "checkpoints", 20, 2560, {"model": dict(_weights(model))}, {})
    return TinyRun(run, cfg, dataset, model, precision)


def _weights(model: HybridModel):
    return model.state_dict().items()
