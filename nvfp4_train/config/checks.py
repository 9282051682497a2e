"""The words in which a value is refused, and the checks of single sections. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from nvfp4_train.config.schema import (
    HELD_OUT,
    ClippingConfig,
    DataConfig,
    FaultConfig,
    OptimizerConfig,
    RecoveryConfig,
)
from nvfp4_train.errors import ConfigError

FAULTS = ("repeated_tokens", "random_tokens", "gradient", "nan", "bit_flip", "lr", "read_error", "stuck")
BLOCKS = {"M": "Mamba-2", "*": "attention", "-": "MLP"}  # what a letter of model.pattern stands for


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        choices = f"choose {', '.join(allowed)}" if len(allowed) > 1 else f"the only choice is {allowed[0]}"
        raise ConfigError(f"{key}={value!r} is unknown: {choices}.")


def at_least(section: Any, prefix: str, least: int, *names: str, unit: str = "") -> None:
    """Raise ConfigError unless these fields of `section` are null or whole numbers of at least `least`."""
    for name in names:
        value = getattr(section, name)
        if value is not None and value < least:
            raise ConfigError(f"{prefix}.{name}={value} must be at least {least}{unit and ' ' + unit}.")


def positive(section: Any, prefix: str, *names: str) -> None:
    """Raise ConfigError unless these fields of `section` are null or finite numbers above 0."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not 0.0 < value < math.inf:
            raise ConfigError(f"{prefix}.{name}={value:g} must be a positive number.")


def divides(section: Any, prefix: str, divisor: str, number: str) -> None:
    """Raise ConfigError, with the nearest values that would do, unless one field of `section` divides another."""
    d, n = getattr(section, divisor), getattr(section, number)
    if n % d:
        raise ConfigError(
            f"{prefix}.{number}={n} is not a multiple of {prefix}.{divisor}={d}: set {prefix}.{number} to "
            f"{nearest(n, lambda m: m % d == 0)}, or {prefix}.{divisor} to {nearest(d, lambda m: n % m == 0)}."
        )


def nearest(value: int, fits: Callable[[int], bool], reach: int = 128) -> str:
    """The nearest numbers above 0 that fit, below and above `value`: "48 or 64"; "" where none is within `reach`."""
    below = next((n for n in range(value - 1, max(0, value - reach), -1) if fits(n)), None)
    above = next((n for n in range(value + 1, value + reach) if fits(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def check_optimizer(cfg: OptimizerConfig) -> None:
    """Raise ConfigError for a value that AdamW cannot work with."""
    one_of("optimizer.name", cfg.name, ["adamw"])
    if len(cfg.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in cfg.betas):
        raise ConfigError(f"optimizer.betas={cfg.betas} must be two numbers from 0 up to, not including, 1.")
    positive(cfg, "optimizer", "eps")  # a gradient of zero divides by it alone
    for name, value in {"lr": cfg.lr, "weight_decay": cfg.weight_decay}.items():
        if not 0.0 <= value < math.inf:
            raise ConfigError(f"optimizer.{name}={value:g} must be a number of at least 0.")


def check_data(cfg: DataConfig) -> None:
    """Raise ConfigError for corpora and mixtures that don't fit each other."""
    one_of("data.packing", cfg.packing, ["stream", "documents"])
    at_least(cfg, "data", 1, "max_train_bytes", unit="byte")
    at_least(cfg, "data", 0, "workers")
    if not 0.0 < cfg.valid_fraction < 1.0:
        raise ConfigError(
            f"data.valid_fraction={cfg.valid_fraction:g} is a share and must lie between 0 and 1."
        )
    for name, source in cfg.corpora.items():
        if "/" in name or not name.strip() or not source.strip():
            raise ConfigError(
                f"data.corpora.{name}={source} must have a name without '/' and a source: both are used as they are."
            )
        if name == HELD_OUT:
            raise ConfigError(
                f"data.corpora.{name}={source} has the name of the one data set of data.source: call it something else."
            )
    if cfg.corpora and not cfg.mixture:
        equal = ",".join(f"{name}:1" for name in cfg.corpora)
        raise ConfigError(
            f"data.corpora is given without weights: set data.mixture, such as data.mixture=[{{weights:{{{equal}}}}}]."
        )
    starts = [phase.start for phase in cfg.mixture]
    if cfg.mixture and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1):
        raise ConfigError(f"data.mixture: starts={starts} must begin with 0, increase, and stay below 1.")
    for phase in cfg.mixture:
        _check_weights(phase.weights, cfg.corpora)


def _check_weights(weights: dict[str, float], corpora: Collection[str]) -> None:
    if unknown := [name for name in weights if name not in corpora]:
        has = f"has {', '.join(corpora)}" if corpora else "is empty"
        raise ConfigError(
            f"data.mixture: weights of {', '.join(unknown)}, but data.corpora {has}: name each corpus there."
        )
    total = math.fsum(weights.values())
    if not 0.0 < total < math.inf or any(w != 0 and not w >= 1e-9 * total for w in weights.values()):
        raise ConfigError(
            f"data.mixture: weights={weights} must be 0 or positive (each at least 1e-9 of all), and not all 0."
        )


def check_clipping(cfg: ClippingConfig) -> None:
    """Raise ConfigError for a value that gradient clipping cannot work with."""
    one_of("clipping.name", cfg.name, ["adaptive", "fixed", "zclip", "adagc"])
    positive(cfg, "clipping", "baseline", "initial_ratio", "target_ratio")
    at_least(cfg, "clipping", 1, "raise_after", "warn_after", "average_steps", unit="step")
    at_least(cfg, "clipping", 2, "zclip_warmup", unit="steps")
    at_least(cfg, "clipping", 1, "adagc_warmup", unit="step")
    positive(cfg, "clipping", "zclip_z")
    for name in ("raise_factor", "adagc_ratio"):
        if not 1.0 <= getattr(cfg, name) < math.inf:
            raise ConfigError(f"clipping.{name}={getattr(cfg, name):g} must be at least 1.")
    for name in ("zclip_alpha", "adagc_beta"):
        if not 0.0 < getattr(cfg, name) < 1.0:
            raise ConfigError(f"clipping.{name}={getattr(cfg, name):g} must lie between 0 and 1.")
    if not cfg.tolerance >= 0.0:
        raise ConfigError(f"clipping.tolerance={cfg.tolerance:g} must be at least 0.")


def check_recovery(cfg: RecoveryConfig, log_every: int) -> None:
    """Raise ConfigError for a value that spike detection or recovery cannot work with."""
    one_of("recovery.name", cfg.name, ["auto", "skip_nonfinite", "off"])
    at_least(cfg, "recovery", 2, "window", unit="steps")
    names = (
        "confirm",
        "confirm_within",
        "slow_window",
        "snapshot_every",
        "snapshots",
        "max_consecutive_skips",
    )
    at_least(cfg, "recovery", 1, *names)
    at_least(
        cfg, "recovery", 0, "skip_margin", "max_rollbacks", "forget_after", "careful_steps", "read_retries"
    )
    floats = ("sigmas", "loss_floor", "norm_floor", "slow_rise", "health_jump", "careful_lr", "hang_seconds")
    positive(cfg, "recovery", *floats)
    if not 1.0 < cfg.skip_norm < math.inf:
        raise ConfigError(
            f"recovery.skip_norm={cfg.skip_norm:g} must be above 1: it multiplies the average norm."
        )
    if not cfg.sigmas <= cfg.skip_sigmas < math.inf:
        raise ConfigError(
            f"recovery.skip_sigmas={cfg.skip_sigmas:g} must be at least recovery.sigmas={cfg.sigmas:g}: a step stands out "
            "before its update is skipped."
        )
    if cfg.confirm > cfg.confirm_within:
        raise ConfigError(
            f"recovery.confirm={cfg.confirm} of recovery.confirm_within={cfg.confirm_within} steps can't be: lower confirm."
        )
    kind, colon, count = cfg.careful_bf16.partition(":")
    if cfg.careful_bf16 not in ("all", "none") and not (kind == "worst" and colon and count.isdecimal()):
        raise ConfigError(
            f"recovery.careful_bf16={cfg.careful_bf16!r} is unknown: choose all, none, or worst:N."
        )
    reach = cfg.confirm_within + log_every + cfg.skip_margin
    if cfg.name == "auto" and (cfg.snapshots - 1) * cfg.snapshot_every < reach:
        raise ConfigError(
            f"recovery.snapshots={cfg.snapshots}, {cfg.snapshot_every} steps apart (recovery.snapshot_every), reach back "
            f"less than the {reach} steps of confirm_within + training.log_every + skip_margin: raise one of the two."
        )


def check_faults(faults: Sequence[FaultConfig]) -> None:
    """Raise ConfigError for a fault that cannot be."""
    for i, fault in enumerate(faults):
        key = f"faults[{i}]"
        one_of(f"{key}.kind", fault.kind, FAULTS)
        at_least(fault, key, 1, "step", "steps")
        at_least(fault, key, 0, "rank", "bit")
        if fault.bit > 31:
            raise ConfigError(f"{key}.bit={fault.bit} must be at most 31: the weights are fp32.")
        if not math.isfinite(fault.factor):
            raise ConfigError(f"{key}.factor={fault.factor:g} must be a finite number (kind=nan makes NaN).")
