"""The words in which a value is refused, and the checks of single sections. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from nvfp4_train.config.schema import ClippingConfig, OptimizerConfig
from nvfp4_train.errors import ConfigError

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
