"""Values that fit their types but not each other, told before anything is built: no torch is imported here."""

from __future__ import annotations

from nvfp4_train.config.blocking import check_blocking
from nvfp4_train.config.checks import (
    BLOCKS,
    at_least,
    check_clipping,
    check_data,
    check_faults,
    check_optimizer,
    check_recovery,
    divides,
    one_of,
    positive,
)
from nvfp4_train.config.layout import layout_of, world_size
from nvfp4_train.config.schema import Config, ModelConfig, PrecisionConfig, TrainingConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.model.flops import linear_layers
from nvfp4_train.precision import backends
from nvfp4_train.precision.recipe import BACKWARDS, FOUR_OVER_SIX, QUANTIZED_FORMATS, check_rules
from nvfp4_train.training import init_from
from nvfp4_train.training.schedule import build_schedule


def validate(cfg: Config) -> None:
    """Raise ConfigError, one sentence with key, value and remedy, for the first thing that cannot work as configured.

    What depends on the machine (memory, devices, data) is `training/requirements.py`'s.
    """
    _check_choices(cfg)
    _check_model(cfg.model)
    _check_training(cfg.training)
    _check_numbers(cfg)
    check_data(cfg.data)
    check_optimizer(cfg.optimizer)
    check_clipping(cfg.clipping)
    check_recovery(cfg.recovery, cfg.training.log_every)
    check_faults(cfg.faults)
    build_schedule(cfg.schedule, cfg.optimizer.lr, cfg.training.max_tokens)
    names = [layer.name for layer in linear_layers(cfg.model)]
    check_rules(cfg.precision, len(cfg.model.pattern), names)
    if cfg.precision.name in QUANTIZED_FORMATS:
        check_blocking(cfg)
    _check_te(cfg)
    init_from.check(cfg)
    layout_of(cfg, None if cfg.dry_run else world_size())


def _check_te(cfg: Config) -> None:
    """What Transformer Engine's layers exclude elsewhere in the configuration."""
    if cfg.precision.backend != "te" or cfg.precision.name != "fp8" or cfg.precision.te_recipe != "delayed":
        return
    if cfg.training.recompute in ("block", "budget"):
        raise ConfigError(
            f"training.recompute={cfg.training.recompute} would count maxima twice in precision.te_recipe=delayed: use "
            "training.recompute=none, or precision.te_recipe=block."
        )


def _check_choices(cfg: Config) -> None:
    one_of("device", cfg.device, ["auto", "cpu", "cuda"])
    one_of("precision.name", cfg.precision.name, [*QUANTIZED_FORMATS, "bf16", "fp32"])
    one_of("precision.backend", cfg.precision.backend, list(backends.NAMES))
    one_of("precision.te_recipe", cfg.precision.te_recipe, ["block", "current", "delayed"])
    one_of("precision.four_over_six", cfg.precision.four_over_six, FOUR_OVER_SIX)
    one_of("precision.backward", cfg.precision.backward, BACKWARDS)
    if cfg.precision.name != "nvfp4":
        for key in ("four_over_six", "backward", "hardware_rounding"):
            value, default = getattr(cfg.precision, key), getattr(PrecisionConfig, key)
            if value != default:
                raise ConfigError(
                    f"precision.{key}={value} is NVFP4's, but precision={cfg.precision.name}: leave it at {default}, or "
                    "use precision=nvfp4."
                )
    if cfg.precision.hardware_rounding and not cfg.precision.stochastic_gradients:
        raise ConfigError(
            "precision.hardware_rounding=true is for stochastic rounding, and precision.stochastic_gradients=false rounds "
            "everything to nearest: leave it at false."
        )
    one_of("logging.wandb", cfg.logging.wandb, ["off", "offline", "online"])
    one_of("logging.console", cfg.logging.console, ["auto", "bar", "lines"])
    one_of("training.compile", cfg.training.compile, ["auto", "on", "off"])
    one_of("training.kernels", cfg.training.kernels, ["auto", "torch", "mamba_ssm"])
    one_of("training.recompute", cfg.training.recompute, ["none", "squared_relu", "block", "budget"])
    for key, value in {"run_dir": cfg.run_dir, "data.source": cfg.data.source}.items():
        if not value.strip():
            raise ConfigError(f"{key} is empty: give a path.")


def _check_model(cfg: ModelConfig) -> None:
    if not cfg.pattern:
        raise ConfigError(f"model.pattern is empty: write one letter a block, {_letters()}.")
    for position, letter in enumerate(cfg.pattern, start=1):
        if letter not in BLOCKS:
            raise ConfigError(
                f"model.pattern={cfg.pattern!r} has {letter!r} at position {position}, which is no block: "
                f"use {_letters()}."
            )
    sizes = [name for name, value in vars(cfg).items() if isinstance(value, int)]
    at_least(cfg, "model", 1, *sizes)
    positive(cfg, "model", "norm_eps", "init_std")
    divides(cfg, "model", "num_key_value_heads", "num_attention_heads")
    divides(cfg, "model", "n_groups", "mamba_num_heads")


def _check_training(cfg: TrainingConfig) -> None:
    names = ("max_steps", "seq_len", "global_batch_size", "micro_batch_size", "log_every")
    at_least(cfg, "training", 1, *names)
    at_least(cfg, "training", 0, "seed", "validate_every", "sample_tokens")
    positive(cfg, "training", "max_tokens", "validate_tokens")
    if cfg.seed >= 2**32:
        raise ConfigError(
            f"training.seed={cfg.seed} must be below 2^32, as the random bits' key holds 32 bits of it."
        )
    divides(cfg, "training", "micro_batch_size", "global_batch_size")
    if not 0.0 <= cfg.recompute_budget <= 1.0:
        raise ConfigError(
            f"training.recompute_budget={cfg.recompute_budget:g} is a share: set it from 0 to 1."
        )
    if cfg.recompute == "budget" and cfg.compile == "off":
        raise ConfigError(
            "training.recompute=budget needs the compiler: set training.compile=auto, or training.recompute=block."
        )


def _check_numbers(cfg: Config) -> None:
    at_least(cfg.precision, "precision", 0, "first_blocks_bf16", "last_blocks_bf16")
    at_least(cfg.checkpoint, "checkpoint", 1, "every_steps", "keep_last", "keep_every")
    at_least(cfg.precision, "precision", 0, "health_every")
    positive(cfg.logging, "logging", "peak_tflops")
    _check_place(cfg.checkpoint.dir)
    if cfg.checkpoint.keep_every is not None:
        divides(cfg.checkpoint, "checkpoint", "every_steps", "keep_every")


def _check_place(folder: str | None) -> None:
    """Raise ConfigError for a URL whose fsspec driver isn't there."""
    if folder is None or "://" not in folder:
        return
    import fsspec

    try:
        fsspec.get_filesystem_class(folder.partition("://")[0])
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"checkpoint.dir={folder} can't be used: {' '.join(str(error).split())}; give a folder, or install that driver."
        ) from None


def _letters() -> str:
    return ", ".join(f"{letter} ({name})" for letter, name in BLOCKS.items())
