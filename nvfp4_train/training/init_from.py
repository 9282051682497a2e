"""`init_from`: the run starts from the weights of another run, or of a Hugging Face model, instead of drawn ones.

Weights alone are taken: optimizer, schedule, data order and step count begin anew. torch is imported when weights are read,
so that `check` serves the first second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from nvfp4_train.config.schema import Config, ModelConfig
from nvfp4_train.errors import CheckpointError, ConfigError
from nvfp4_train.interop import nemotron_h

if TYPE_CHECKING:
    from nvfp4_train.data.tokenizer import Tokenizer
    from nvfp4_train.interop.weights import WeightSource


def check(cfg: Config) -> None:
    """Raise ConfigError unless `cfg.init_from` holds a model like `cfg.model`. A run that can resume needs it no more."""
    if cfg.init_from is None or any(Path(cfg.run_dir).expanduser().glob("checkpoints/step_*")):
        return
    theirs = _model_of(_folder(cfg), cfg.init_from)
    differing = nemotron_h.differences(cfg.model, theirs)
    if differing:
        settings = " ".join(f"model.{key}={there}" for key, (_, there) in differing.items())
        here = ", ".join(f"{key} {ours}" for key, (ours, _) in differing.items())
        raise ConfigError(
            f"init_from={cfg.init_from} holds another model than this configuration (which has {here}): set {settings}."
        )


def weight_source(cfg: Config, tokenizer: Tokenizer, warn: Callable[[str], None]) -> WeightSource:
    """The weights in `cfg.init_from`, one parameter at a time.

    Raises CheckpointError for a folder that can't be used, or one whose tokenizer is not `tokenizer` (the data's): every
    token would mean something else.
    """
    from nvfp4_train.distributed import checkpoint
    from nvfp4_train.interop.tokenizer_files import same_tokens
    from nvfp4_train.interop.weights import checkpoint_weights, hugging_face_weights
    from nvfp4_train.training.inference import tokenizer_path

    folder, path = _folder(cfg), Path(cfg.init_from).expanduser()
    tokenizer_file = tokenizer_path(folder)
    if tokenizer_file is None:
        warn(f"init_from={cfg.init_from} has no tokenizer: that its tokens are the data's can't be checked")
    elif not same_tokens(tokenizer_file.read_bytes(), tokenizer.model):
        raise CheckpointError(
            f"init_from={cfg.init_from} was trained with another tokenizer than the data's: set "
            f"data.tokenizer={tokenizer_file}."
        )
    if nemotron_h.is_hugging_face(folder):
        return hugging_face_weights(folder, cfg.model)
    return checkpoint_weights(checkpoint.open_checkpoint(path), cfg.model)


def _folder(cfg: Config) -> Path:
    """The run or model folder; `init_from` may also name one of a run's checkpoints."""
    path = Path(cfg.init_from).expanduser()
    return path.parent.parent if path.parent.name == "checkpoints" else path


def _model_of(folder: Path, given: str) -> ModelConfig:
    if nemotron_h.is_hugging_face(folder):
        return nemotron_h.model_config(nemotron_h.read_config(folder), given)
    try:
        saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return ModelConfig(**saved["model"])
    except OSError:
        raise ConfigError(
            f"init_from={given} is neither a run folder (config.yaml) nor a Hugging Face model (config.json): give one."
        ) from None
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / 'config.yaml'} can't be used ({error}): restore it.") from error
