"""What to do about a step that went wrong: the ladder (docs/recipes.md).

The first rung, skipping an update, is the detector's, on the device. The others are decided here, on the host, from the
metrics that it reads every `training.log_every` steps: reduced values, so every rank decides the same.

    rewind     to the newest state before the onset, and step over the batches that led there
    careful    the same from the second time on, with a lower learning rate and layers in BF16 for a while
    give up    after `max_rollbacks` rewinds in one stretch of trouble: exit code 76 and a report
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvfp4_train.config.schema import RecoveryConfig
from nvfp4_train.errors import RecoveryGaveUp
from nvfp4_train.training.divergence import QuantizationAlarm, SlowDivergence
from nvfp4_train.training.history import History, Rewind

REPORT = "recovery_report.md"


@dataclass(frozen=True)
class Trouble:
    """What calls for a rewind: why, the first step that stood out, the last one taken, whether it came on slowly."""

    reason: str
    onset: int
    found: int
    slow: bool = False


class Recovery:
    """Watches the records of steps, and plans rewinds. `history` and the alarms are part of every checkpoint."""

    def __init__(self, cfg: RecoveryConfig, history: History) -> None:
        self.cfg = cfg
        self.history = history
        self.divergence = SlowDivergence(cfg)
        self.alarm = QuantizationAlarm(cfg)

    def look(
        self, records: Sequence[Mapping[str, Any]], last_step: int | None = None, changes: Sequence[int] = ()
    ) -> tuple[list[dict[str, Any]], Trouble | None]:
        """Take in the records of the newest steps, in order: events worth a line in the metrics, and trouble, if any.
        `last_step`: the run's; `changes`: steps from which on other text is trained on.

        Raises RecoveryGaveUp where skipping is all that is configured and too many steps in a row were skipped.
        """
        events: list[dict[str, Any]] = []
        slow = trouble = None
        for record in records:
            step = record["step"]
            if step in changes:
                self.divergence.restart()
            if rise := self.divergence.update(record, last=step == last_step):
                slow = rise if rise.rewinds else slow
                if not rise.rewinds:
                    events.append({"event": "held_out_rise", "step": step, "reason": rise.what})
            jumps = self.alarm.update(record)
            events += [{"event": "quantization_alarm", "step": step, "reason": jump} for jump in jumps]
            if why := _stands_out(record, self.cfg):
                events.append(
                    {"event": "spike", "step": step, "reason": why, "skipped": bool(record["skipped"])}
                )
            if trouble is None and record["exceedances"] >= self.cfg.confirm:
                trouble = (
                    f"{record['exceedances']} of {self.cfg.confirm_within} steps stood out, the last with {why}"
                    if why
                    else f"{record['exceedances']} of {self.cfg.confirm_within} steps stood out",
                    step - record["exceedance_age"] + 1,
                )
        last = records[-1]
        if self.cfg.name == "skip_nonfinite":
            self._check_skips(last)
        if self.cfg.name != "auto":
            return events, None
        if trouble:
            return events, Trouble(*trouble, found=last["step"])
        return events, Trouble(slow.what, slow.onset, last["step"], slow.slow) if slow else None

    def plan(
        self, trouble: Trouble, snapshots: Sequence[int], checkpoints: Sequence[int], quantized: Sequence[str]
    ) -> Rewind:
        """The rewind that `trouble` calls for, to one of these steps, whose state is at hand. `quantized`: names of the
        layers that the recipe quantizes.

        Raises RecoveryGaveUp where rewinds have not helped, or there is nothing to rewind to.
        """
        cfg, history = self.cfg, self.history
        attempts = history.attempts(trouble.found, cfg.forget_after)
        if attempts >= cfg.max_rollbacks:
            raise RecoveryGaveUp(
                f"step {trouble.onset}: {trouble.reason}; {attempts} rewinds have not helped (recovery.max_rollbacks="
                f"{cfg.max_rollbacks}): read {REPORT} in the run folder, put the cause right, then run the same command."
            )
        states = sorted({*snapshots, *checkpoints})
        first = max(1, trouble.onset - cfg.skip_margin)  # the first step whose batch is stepped over
        limits = [trouble.onset - 1, first - 1]
        if attempts:  # the state that was gone back to may be ill itself
            limits.append(min(first, history.rewinds[-1].back_to) - 1)
        usable = [[step for step in states if step <= limit] for limit in limits]
        back_to = next((steps[-1] for steps in reversed(usable) if steps), states[0] if states else None)
        if back_to is None or back_to >= trouble.found:
            raise RecoveryGaveUp(
                f"step {trouble.onset}: {trouble.reason}; no state of an earlier step is left to go back to: start from an "
                "earlier checkpoint."
            )
        careful = attempts > 0 or trouble.slow
        skip = None
        if not trouble.slow:
            skip = (history.batch(max(first, back_to + 1)), history.batch(trouble.found + cfg.skip_margin))
        return Rewind(
            reason=trouble.reason,
            onset=trouble.onset,
            found=trouble.found,
            back_to=back_to,
            skip=skip,
            careful_until=trouble.found + cfg.careful_steps if careful else back_to,
            lr_factor=cfg.careful_lr if careful else 1.0,
            bf16=self._careful_layers(quantized) if careful else (),
        )

    def state(self) -> dict[str, Any]:
        return {
            "rewinds": self.history.state(),
            "divergence": self.divergence.state(),
            "alarm": self.alarm.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, but for a history that knows less than the one here."""
        history = History.from_state(state["rewinds"])
        if len(history.rewinds) > len(self.history.rewinds):
            self.history = history
        self.divergence.load_state(state["divergence"])
        self.alarm.load_state(state["alarm"])

    def _careful_layers(self, quantized: Sequence[str]) -> tuple[str, ...]:
        kind, _, count = self.cfg.careful_bf16.partition(":")
        if kind != "worst":
            return tuple(quantized) if kind == "all" else ()
        known = [layer for layer in self.alarm.worst if layer in quantized]
        return tuple((known or quantized)[: int(count)])

    def _check_skips(self, record: Mapping[str, Any]) -> None:
        if record["skipped_in_a_row"] >= self.cfg.max_consecutive_skips:
            raise RecoveryGaveUp(
                f"{record['skipped_in_a_row']} steps in a row were not finite (recovery.max_consecutive_skips="
                f"{self.cfg.max_consecutive_skips}): lower optimizer.lr, or see where it began in {REPORT}."
            )


def _stands_out(record: Mapping[str, Any], cfg: RecoveryConfig) -> str | None:
    """What is unusual about a step, as a phrase; None for a usual one."""
    if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
        return f"loss {record['loss']:.4g} and gradient norm {record['grad_norm']:.4g}"
    parts = []
    if record["loss_sigmas"] > cfg.sigmas:
        parts.append(f"loss {record['loss']:.4g}, {record['loss_sigmas']:.1f} sigmas above its average")
    if record["norm_sigmas"] > cfg.sigmas:
        parts.append(
            f"gradient norm {record['grad_norm']:.4g}, {record['norm_sigmas']:.1f} sigmas above its average"
        )
    return " and ".join(parts) or None
