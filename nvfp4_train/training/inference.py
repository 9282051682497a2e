"""A trained model out of a run folder, computing as it was trained; or out of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
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
from nvfp4_train.config.schema import Config, PrecisionConfig, TrainingConfig
from nvfp4_train.data.tokenizer import JSON_FILE, MODEL_FILE, Tokenizer
from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.checkpoint import Checkpoint
from nvfp4_train.errors import CheckpointError, ConfigError
from nvfp4_train.interop import nemotron_h
from nvfp4_train.interop.weights import (
    WeightSource,
    checkpoint_weights,
    hugging_face_weights,
)
from nvfp4_train.model.flops import linear_layers
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import fill_
from nvfp4_train.model.kernels import choose_kernels
from nvfp4_train.precision import LinearPlan, PrecisionRuntime, apply_recipe, backends, plan_for
from nvfp4_train.precision.recipe import BF16_PLAN, phase_at
from nvfp4_train.training.machine import resolve_device
from nvfp4_train.training.memory import compute_dtype
from nvfp4_train.training.run_folder import checkpoints_of

MAX_WINDOW = 8192  # tokens of a Hugging Face model's text that are measured in one go


@dataclass(frozen=True)
class OpenedModel:
    """A run's checkpoint, or a model in Hugging Face's layout, before its weights are in memory."""

    path: Path
    cfg: Config
    checkpoint: Checkpoint | None  # None: not a run of ours
    tokenizer: Tokenizer
    weights: WeightSource

    @property
    def title(self) -> str:
        """runs/quickstart, step 293 (1.20M tokens)."""
        if self.checkpoint is None:
            return str(self.path)
        return f"{self.path}, step {self.checkpoint.step} ({units.count(self.checkpoint.tokens)} tokens)"

    @property
    def progress(self) -> float:
        """Share of the run's tokens that the checkpoint has seen."""
        return self.checkpoint.tokens / self.cfg.training.max_tokens if self.checkpoint else 0.0


@dataclass(frozen=True)
class TrainedRun(OpenedModel):
    """The same with its weights, ready for inference."""

    model: HybridModel
    precision: PrecisionRuntime
    kernels: str  # which run, in a line
    device: torch.device


def open_model(run: str | Path, warn: Callable[[str], None]) -> OpenedModel:
    """The run in the folder `run` at its newest whole checkpoint (or at the one that `run` itself is), or the Hugging
    Face model in it.

    Nothing is written, and a trainer may be at work in the folder. Raises CheckpointError with one sentence for what is
    missing, damaged or foreign.
    """
    path = Path(run).expanduser()
    if nemotron_h.is_hugging_face(path):
        cfg = hugging_face_run_config(path)
        return OpenedModel(path, cfg, None, _load_tokenizer(path), hugging_face_weights(path, cfg.model))
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    cfg = load_config(folder)
    found = (
        checkpoint.newest(checkpoints_of(folder, cfg.checkpoint.dir), warn)
        if folder == path
        else checkpoint.open_checkpoint(path)
    )
    if found is None:
        raise CheckpointError(
            f"run={run} holds no checkpoint yet: let it train until its first one is saved."
        )
    return OpenedModel(folder, cfg, found, _load_tokenizer(folder), checkpoint_weights(found, cfg.model))


def load_run(run: str | Path, device: str, warn: Callable[[str], None]) -> TrainedRun:
    """What `open_model` finds, with its weights on `device` (auto, cpu or cuda).

    The precision is that of the training phase that the checkpoint is in, so the forward pass is the one that was
    trained; of a Hugging Face folder that of its configuration's dtype. Raises as `open_model` does.
    """
    opened = open_model(run, warn)
    cfg, found = opened.cfg, opened.checkpoint
    one_of("device", device, ["auto", "cpu", "cuda"])
    target = resolve_device(device)
    model = HybridModel(cfg.model, target, compute_dtype(cfg)).requires_grad_(False)
    if found is not None:
        checkpoint.load(found, {"model": dict(model.named_parameters())})
    else:
        fill_(model, opened.weights)
    recipe = _computable(cfg.precision, target.type, warn)
    precision = apply_recipe(model, recipe, len(cfg.model.pattern), cfg.training.seed)
    precision.set_phase(opened.progress)
    wanted = "torch" if cfg.training.kernels == "torch" else "auto"
    kernels = choose_kernels(model, wanted, target, deterministic=False)
    return TrainedRun(**vars(opened), model=model.eval(), precision=precision, kernels=kernels, device=target)


def _computable(cfg: PrecisionConfig, device: str, warn: Callable[[str], None]) -> PrecisionConfig:
    """The recipe with a backend of this machine where the training's can't run: the formats stay, `warn` is told."""
    try:
        backends.check(cfg, device)
    except ConfigError as error:
        warn(f"{error} Until then precision.backend=auto computes the same formats.")
        return dataclasses.replace(cfg, backend="auto", hardware_rounding=False)
    return cfg


def inference_plans(opened: OpenedModel) -> dict[str, LinearPlan]:
    """{linear layer: plan} in the phase that the checkpoint is in. Raises ConfigError when no weight is in NVFP4."""
    cfg, n_blocks = opened.cfg, len(opened.cfg.model.pattern)
    phase = phase_at(cfg.precision, opened.progress)
    plans = {
        layer.name: plan_for(cfg.precision, layer.name, layer.block, n_blocks, phase)
        for layer in linear_layers(cfg.model)
    }
    plans = {name: plan if plan.format == "nvfp4" else BF16_PLAN for name, plan in plans.items()}
    if not any("fprop.weight" in plan.quantized for plan in plans.values()):
        raise ConfigError(
            f"run={opened.path} has no weight in NVFP4 (precision {cfg.precision.name}, phase {phase!r}), so there are "
            "no codes to write: use format=hf, or a checkpoint from a phase in NVFP4."
        )
    return plans


def hugging_face_run_config(folder: Path) -> Config:
    """A configuration with which a Hugging Face folder can be used as a run. Raises CheckpointError."""
    theirs = nemotron_h.read_config(folder)
    fp32 = (theirs.get("dtype") or theirs.get("torch_dtype")) == "float32"
    window = min(int(theirs.get("max_position_embeddings") or MAX_WINDOW), MAX_WINDOW)
    return Config(
        run_dir=str(folder),
        experiment=folder.name,
        model=nemotron_h.model_config(theirs, folder.name),
        precision=PrecisionConfig(name="fp32" if fp32 else "bf16"),
        training=TrainingConfig(seq_len=window, micro_batch_size=1, global_batch_size=1),
    )


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
            f"run={folder} is no run folder (it has no config.yaml), and no Hugging Face model (no config.json): give "
            "one of these, such as runs/quickstart."
        ) from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} can't be used ({reason}): restore it, or use the version that wrote it."
        ) from error


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Put the tokenizer into a run folder, atomically, so that the run can be used where its data is not."""
    with atomic_open(folder / tokenizer.file_name, "wb") as f:
        f.write(tokenizer.model)


def tokenizer_path(folder: Path) -> Path | None:
    """The tokenizer in a run or model folder: of one that has both files, SentencePiece's, which the other is made from."""
    paths = (folder / name for name in (MODEL_FILE, JSON_FILE))
    return next((path for path in paths if path.exists()), None)


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = tokenizer_path(folder)
    if path is None:
        raise CheckpointError(
            f"run={folder} has no {MODEL_FILE} or {JSON_FILE}: restore it from the data set that the run was trained on."
        )
    return Tokenizer.load(path)
