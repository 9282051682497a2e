"""A trained model out of a run folder, computing as it was trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nvfp4_train import units
from nvfp4_train.atomic import atomic_open
from nvfp4_train.config.checks import one_of
from nvfp4_train.config.schema import Config
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.checkpoint import Checkpoint
from nvfp4_train.errors import CheckpointError
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.precision import PrecisionRuntime, apply_recipe
from nvfp4_train.training.machine import resolve_device
from nvfp4_train.training.memory import compute_dtype

TOKENIZER = "tokenizer.model"  # in the run folder, so that a run can be used where its data is not


@dataclass(frozen=True)
class TrainedRun:
    """A run's newest checkpoint, ready for inference."""

    path: Path
    cfg: Config
    checkpoint: Checkpoint
    model: HybridModel
    precision: PrecisionRuntime
    tokenizer: Tokenizer
    device: torch.device

    @property
    def title(self) -> str:
        """runs/quickstart, step 293 (1.20M tokens)."""
        return f"{self.path}, step {self.checkpoint.step} ({units.count(self.checkpoint.tokens)} tokens)"


def load_run(run: str | Path, device: str, warn: Callable[[str], None]) -> TrainedRun:
    """The run in the folder `run` at its newest whole checkpoint (or at the one that `run` itself is).

    `device` is auto, cpu or cuda. The precision is that of the training phase that the checkpoint is in, so the
    forward pass is the one that was trained. Nothing is written, and a trainer may be at work in the folder.
    Raises CheckpointError with one sentence for what is missing, damaged or foreign.
    """
    path = Path(run).expanduser()
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    cfg = load_config(folder)
    found = (
        checkpoint.newest(folder / "checkpoints", warn)
        if folder == path
        else checkpoint.open_checkpoint(path)
    )
    if found is None:
        raise CheckpointError(
            f"run={run} holds no checkpoint yet: let it train until its first one is saved."
        )
    tokenizer = _load_tokenizer(folder)
    one_of("device", device, ["auto", "cpu", "cuda"])
    target = resolve_device(device)
    model = HybridModel(cfg.model, target, compute_dtype(cfg)).requires_grad_(False)
    checkpoint.load(found, {"model": dict(model.named_parameters())})
    precision = apply_recipe(model, cfg.precision, len(cfg.model.pattern), cfg.training.seed)
    precision.set_phase(found.tokens / cfg.training.max_tokens)
    return TrainedRun(folder, cfg, found, model.eval(), precision, tokenizer, target)


def load_config(folder: Path) -> Config:
    """The configuration of the latest launch in a run folder. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"run={folder} doesn't exist: give the folder of a run, such as runs/quickstart."
        )
    path = folder / "config.yaml"
    try:
        saved: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), saved))
    except FileNotFoundError:
        raise CheckpointError(
            f"run={folder} is no run folder (it has no config.yaml): give one, such as runs/quickstart."
        ) from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} can't be used ({reason}): restore it, or use the version that wrote it."
        ) from error


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Put the tokenizer into a run folder, atomically."""
    with atomic_open(folder / TOKENIZER, "wb") as f:
        f.write(tokenizer.model)


def _load_tokenizer(folder: Path) -> Tokenizer:
    if not (folder / TOKENIZER).exists():
        raise CheckpointError(
            f"run={folder} has no {TOKENIZER}: restore it from the data set that the run was trained on."
        )
    return Tokenizer.load(folder / TOKENIZER)
