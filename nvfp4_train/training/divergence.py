"""Alarms of the host, from the metrics that it reads anyway: a loss that rises slowly, and layers that lose their numbers.

They see reduced values alone, so every rank sees the same; their state is plain JSON and part of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nvfp4_train.config.schema import RecoveryConfig

_KINDS = ("underflow", "saturation")


class SlowDivergence:
    """A long average of the loss that has risen above the lowest it ever had, though no step stood out.

    The average is exponential with its centre of mass at `slow_window` steps, over steps whose update was taken. It is an
    alarm when it lies above its minimum by the share `slow_rise`; two validations in a row that far above the best one are
    another.
    """

    def __init__(self, cfg: RecoveryConfig) -> None:
        self.cfg = cfg
        self.average = math.nan
        self.steps = 0
        self.best, self.best_step = math.inf, 0
        self.best_valid, self.best_valid_step, self.valid_rises = math.inf, 0, 0

    def update(self, record: Mapping[str, Any]) -> tuple[str, int] | None:
        """Take in a step's record; (what is wrong, the step at which it was still well), or None."""
        found = None
        if not record["skipped"]:
            self.steps += 1
            weight = max(1.0 / self.steps, 1.0 / (self.cfg.slow_window + 1))
            before = 0.0 if self.steps == 1 else self.average
            self.average = before + (record["loss"] - before) * weight
            if self.steps > self.cfg.slow_window:
                if self.average < self.best:
                    self.best, self.best_step = self.average, record["step"]
                elif self.average > self.best * (1.0 + self.cfg.slow_rise):
                    found = (
                        f"the loss, averaged over {self.cfg.slow_window} steps, has risen from {self.best:.4f} to "
                        f"{self.average:.4f}",
                        self.best_step,
                    )
        valid = next((v for k, v in record.items() if k.startswith("valid/") and k.endswith("/loss")), None)
        return found if valid is None else self._validation(valid, record["step"]) or found

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cfg"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def _validation(self, loss: float, step: int) -> tuple[str, int] | None:
        if loss < self.best_valid:
            self.best_valid, self.best_valid_step, self.valid_rises = loss, step, 0
            return None
        rises = not loss <= self.best_valid * (1.0 + self.cfg.slow_rise)
        self.valid_rises = self.valid_rises + 1 if rises else 0
        if self.valid_rises < 2:
            return None
        return f"the held-out loss has risen from {self.best_valid:.4f} to {loss:.4f}", self.best_valid_step


class QuantizationAlarm:
    """Layers whose share of underflowing or saturating elements jumps, from the metrics `health/LAYER/GEMM/...`.

    A share is compared with its own average over the measurements so far (exponential, over about ten); a rise by
    `health_jump` is an alarm, once until it has been back.
    """

    def __init__(self, cfg: RecoveryConfig) -> None:
        self.cfg = cfg
        self.averages: dict[str, float] = {}
        self.raised: list[str] = []
        self.worst: list[str] = []  # layers by their lowest sqnr_db in the last measurement, lowest first

    def update(self, record: Mapping[str, Any]) -> list[str]:
        """Take in a step's record; a phrase for every share that has jumped."""
        health = {key: value for key, value in record.items() if key.startswith("health/")}
        if not health:
            return []
        self.worst = _by_sqnr(health)
        found = []
        for key, value in health.items():
            if key.rsplit("/", 1)[1] not in _KINDS or not math.isfinite(value):
                continue
            average = self.averages.setdefault(key, value)
            if value <= average + self.cfg.health_jump:
                self.averages[key] = average + 0.1 * (value - average)
                self.raised = [name for name in self.raised if name != key]
            elif key not in self.raised:
                self.raised.append(key)
                _, layer, gemm, kind = key.split("/")
                found.append(f"{kind} of {layer} ({gemm}) has jumped from {average:.3f} to {value:.3f}")
        return found

    def state(self) -> dict[str, Any]:
        return {"averages": self.averages, "raised": self.raised, "worst": self.worst}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, type(value)(value))  # a copy


def _by_sqnr(health: Mapping[str, float]) -> list[str]:
    lowest: dict[str, float] = {}
    for key, value in health.items():
        _, layer, _, kind = key.split("/")
        if kind == "sqnr_db":
            lowest[layer] = min(lowest.get(layer, math.inf), value if math.isfinite(value) else -math.inf)
    return sorted(lowest, key=lambda layer: (lowest[layer], layer))
