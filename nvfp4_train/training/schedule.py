"""The learning rate as a function of the tokens consumed so far.

A schedule has no state: resuming needs the token count alone, and a different batch size samples the same
curve at other points. `docs/recipes.md` gives the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from nvfp4_train.config.schema import ScheduleConfig
from nvfp4_train.errors import ConfigError

# The share of the peak at which warm-up starts: the first step must move the weights, if only a little.
WARMUP_START = 0.01

# From 1 at x = 0 to 0 at x = 1, never rising.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}


class Milestone(NamedTuple):
    """A point of the curve worth telling. `tokens` is None for one that is never reached."""

    name: str
    tokens: float | None
    lr: float


@dataclass(frozen=True)
class Schedule:
    """Warm-up to `peak`, then stages of `decay_factor` (1: constant), then annealing to `final`.

    Rates are learning rates, lengths are tokens. Made by `build_schedule`, which checks the values.
    """

    peak: float
    final: float
    floor: float
    decay_factor: float
    decay_every: float
    warmup_end: float
    anneal_begin: float
    end: float
    shape: str

    def lr(self, tokens: float) -> float:
        """The rate of the step that starts after `tokens` tokens; from `end` on, the final rate."""
        if tokens < self.warmup_end:
            return self.peak * (WARMUP_START + (1.0 - WARMUP_START) * (tokens / self.warmup_end))
        if tokens >= self.end:
            return self.final
        if tokens < self.anneal_begin:
            return self._staged(tokens)
        progress = (tokens - self.anneal_begin) / (self.end - self.anneal_begin)
        return self.final + (self._staged(self.anneal_begin) - self.final) * SHAPES[self.shape](progress)

    def milestones(self) -> list[Milestone]:
        """The curve's corners in order, for a dry run: start, peak, floor (staged), annealing, end."""
        points = [Milestone("start", 0.0, self.lr(0.0)), Milestone("peak", self.warmup_end, self.peak)]
        if self.decay_factor < 1.0:
            points.append(Milestone("floor", self._floor_tokens(), self.floor))
        if self.anneal_begin < self.end:
            points.append(Milestone("anneal", self.anneal_begin, self.lr(self.anneal_begin)))
        return [*points, Milestone("end", self.end, self.final)]

    def _staged(self, tokens: float) -> float:
        stages = math.floor((tokens - self.warmup_end) / self.decay_every)
        return max(self.peak * self.decay_factor**stages, self.floor)

    def _floor_tokens(self) -> float | None:
        """Where the stages reach the floor, None where annealing starts before they do."""
        if self.floor <= 0.0:
            return None
        stages = math.ceil(math.log(self.floor / self.peak) / math.log(self.decay_factor))
        tokens = self.warmup_end + stages * self.decay_every
        return tokens if tokens <= self.anneal_begin else None


def build_schedule(cfg: ScheduleConfig, base_lr: float, max_tokens: float) -> Schedule:
    """The schedule of a run of `max_tokens` tokens around the base learning rate `base_lr`.

    Raises ConfigError where the values cannot make a curve that rises only during warm-up.
    """
    _check(cfg, base_lr, max_tokens)
    staged = cfg.name == "staged"
    peak = base_lr * cfg.boost if staged else base_lr
    anneal_share = 0.0 if cfg.name == "cosine" else cfg.anneal_start
    schedule = Schedule(
        peak=peak,
        final=cfg.final_lr * peak,
        floor=cfg.floor * peak if staged else 0.0,
        decay_factor=cfg.decay_factor if staged else 1.0,
        decay_every=cfg.decay_every if staged else math.inf,
        warmup_end=float(cfg.warmup_tokens),
        anneal_begin=max(anneal_share * max_tokens, float(cfg.warmup_tokens)),
        end=float(max_tokens),
        shape=cfg.decay_shape if cfg.name == "wsd" else "cosine",
    )
    reached = schedule._staged(schedule.anneal_begin)
    if schedule.final > reached:
        raise ConfigError(
            f"schedule.final_lr={cfg.final_lr:g} of the peak lies above {reached / peak:.3g}, which the "
            "stages reach before annealing: lower schedule.final_lr to at most that, or raise schedule.floor."
        )
    return schedule


def _check(cfg: ScheduleConfig, base_lr: float, max_tokens: float) -> None:
    if cfg.name not in ("staged", "wsd", "cosine"):
        raise ConfigError(f"schedule.name={cfg.name!r} is unknown: choose staged, wsd or cosine.")
    if cfg.name == "wsd" and cfg.decay_shape not in SHAPES:
        raise ConfigError(f"schedule.decay_shape={cfg.decay_shape!r} is unknown: choose {', '.join(SHAPES)}.")
    if not 0.0 < max_tokens < math.inf:
        raise ConfigError(f"training.max_tokens={max_tokens:g} must be a positive number of tokens.")
    if not 0.0 < base_lr < math.inf:
        raise ConfigError(f"optimizer.lr={base_lr:g} must be a positive learning rate.")
    if not 0.0 <= cfg.warmup_tokens < max_tokens:
        raise ConfigError(
            f"schedule.warmup_tokens={cfg.warmup_tokens:g} must lie between 0 and "
            f"training.max_tokens={max_tokens:g}: shorten the warm-up or train on more tokens."
        )
    shares = {"final_lr": cfg.final_lr, "anneal_start": cfg.anneal_start}
    if cfg.name == "staged":
        shares |= {"floor": cfg.floor, "decay_factor": cfg.decay_factor}
        for name, value in {"boost": cfg.boost, "decay_every": cfg.decay_every}.items():
            if not 0.0 < value < math.inf:
                raise ConfigError(f"schedule.{name}={value:g} must be positive.")
        if cfg.decay_factor == 0.0:
            raise ConfigError(
                "schedule.decay_factor=0 must be above 0: it multiplies the rate at each stage."
            )
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"schedule.{name}={value:g} is a share and must lie between 0 and 1.")
