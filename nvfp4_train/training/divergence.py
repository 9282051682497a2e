"""Alarms of the host, from the metrics that it reads anyway: a loss that rises slowly, and layers that lose their numbers.

They see reduced values alone, so every rank sees the same; their state is plain JSON and part of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_train.config.schema import RecoveryConfig

_KINDS = ("underflow", "saturation")


@dataclass(frozen=True)
class Rise:
    """What has risen, as a phrase; the first step that may be to blame; whether it calls for a rewind, and came slowly."""

    what: str
    onset: int
    rewinds: bool
    slow: bool = True


class SlowDivergence:
    """A loss that has risen, though no step stood out.

    The average is exponential with its centre of mass at `slow_window` steps, over steps whose update was taken. It calls
    for a rewind when it lies above its minimum by the share `slow_rise`. So do two validations in a row that far above
    the best one, where the average has risen by half of that too: a held-out loss that rises alone is overfitting, or a
    data set that is trained on no more, which no rewind helps against, and is only told.
    """

    def __init__(self, cfg: RecoveryConfig) -> None:
        self.cfg = cfg
        self.restart()

    def restart(self) -> None:
        """Forget everything: from here on other text is trained on."""
        self.average = math.nan
        self.steps = 0
        self.best, self.best_step = math.inf, 0
        self.best_valid, self.best_valid_step, self.valid_rises = math.inf, 0, 0

    def update(self, record: Mapping[str, Any], last: bool = False) -> Rise | None:
        """Take in a step's record, `last` that of the run's last step: what has risen, if anything."""
        found = None
        if not record["skipped"]:
            self.steps += 1
            weight = max(1.0 / self.steps, 1.0 / (self.cfg.slow_window + 1))
            before = 0.0 if self.steps == 1 else self.average
            self.average = before + (record["loss"] - before) * weight
            if self.steps > self.cfg.slow_window:
                if self.average < self.best:
                    self.best, self.best_step = self.average, record["step"]
                elif self._above(self.average, self.best, self.cfg.slow_rise):
                    found = Rise(
                        f"the loss, averaged over {self.cfg.slow_window} steps, has risen from {self.best:.4f} to "
                        f"{self.average:.4f}",
                        self.best_step,
                        rewinds=True,
                    )
        held_out = [v for k, v in record.items() if k.startswith("valid/") and k.endswith("/loss")]
        return found or (self._validation(sum(held_out) / len(held_out), record, last) if held_out else None)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cfg"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def _validation(self, loss: float, record: Mapping[str, Any], last: bool) -> Rise | None:
        """At the last step there is no second look: one rise counts, where steps have stood out just before."""
        if loss < self.best_valid:
            self.best_valid, self.best_valid_step, self.valid_rises = loss, record["step"], 0
            return None
        self.valid_rises = (
            self.valid_rises + 1 if self._above(loss, self.best_valid, self.cfg.slow_rise) else 0
        )
        if not self.valid_rises or (self.valid_rises == 1 and not last):
            return None
        training_rose = self.best < math.inf and self._above(self.average, self.best, self.cfg.slow_rise / 2)
        stood_out = last and record["exceedances"] > 0
        rewinds = training_rose or stood_out or not math.isfinite(loss)
        if not rewinds and self.valid_rises > 2:
            return None  # told before
        return Rise(
            f"the held-out loss has risen from {self.best_valid:.4f} to {loss:.4f}"
            + (
                ""
                if rewinds
                else ", but the training loss has not (overfitting, or other text than is trained on)"
            ),
            record["step"] - record["exceedance_age"] + 1 if stood_out else self.best_valid_step,
            rewinds,
            slow=not stood_out,
        )

    @staticmethod
    def _above(value: float, lowest: float, share: float) -> bool:
        """Whether `value` lies above `lowest` by `share`, or is not finite."""
        return not (math.isfinite(value) and value <= lowest * (1.0 + share))


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
