"""Takes a run back to an earlier step: state, checkpoints, metrics and trackers, in an order that a kill can't break.

The journal is written first. From then on a relaunch resumes the recovery, whatever of the rest was done: it passes over the
checkpoints of the way that is left (`resume.begin`) and reaches the same step with the same data.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from nvfp4_train.config.schema import RecoveryConfig
from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.agreement import Group, from_first, gather
from nvfp4_train.distributed.checkpoint import DamagedError
from nvfp4_train.distributed.saving import Saver
from nvfp4_train.distributed.storage import Storage
from nvfp4_train.precision import PrecisionRuntime
from nvfp4_train.training.console import Console
from nvfp4_train.training.history import History, Rewind
from nvfp4_train.training.metrics import MetricsWriter, read_metrics
from nvfp4_train.training.recovery import Recovery, Trouble
from nvfp4_train.training.recovery_report import abandoned_path
from nvfp4_train.training.run_folder import RunFolder
from nvfp4_train.training.snapshots import Snapshots, restore
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.tracker import Tracker


class Rewinder:
    """Keeps snapshots, and rewinds to them or to checkpoints. Its methods are called by all ranks of `group` alike."""

    def __init__(
        self,
        cfg: RecoveryConfig,
        folder: RunFolder,
        state: TrainState,
        precision: PrecisionRuntime,
        saver: Saver,
        writer: MetricsWriter,
        tracker: Tracker,
        console: Console,
        group: Group = None,
    ) -> None:
        self._cfg, self._folder, self._state, self._precision = cfg, folder, state, precision
        self._saver, self._writer, self._tracker, self._console = saver, writer, tracker, console
        self._group = group
        self._recovery: Recovery = state.recovery
        self._snapshots = Snapshots(cfg.snapshots)
        self._last_snapshot: int | None = None

    def snapshot_if_due(self) -> None:
        """Copy the state at the start of a launch and every `snapshot_every` steps. Nothing waits for the device."""
        step, due = self._state.step, self._state.step % self._cfg.snapshot_every == 0
        if self._cfg.name == "auto" and step != self._last_snapshot and (due or self._last_snapshot is None):
            self._snapshots.take(self._state)
            self._last_snapshot = step

    def rewind(self, trouble: Trouble) -> Rewind:
        """Do what the ladder says about `trouble`. Raises RecoveryGaveUp on every rank where it says to give up."""
        self._saver.wait()  # nothing may be published of the way that is left
        plan = from_first(self._group, lambda: self._plan(trouble))
        history = self._recovery.history.with_(plan)
        from_first(self._group, lambda: self._leave(history))
        self._recovery.history = history
        snapshot = self._snapshots.newest(plan.back_to)
        if snapshot is not None and snapshot.step == plan.back_to:
            restore(self._state, snapshot)
        else:
            name = checkpoint.name_of(plan.back_to)
            self._state.restore(checkpoint.read(Storage(self._folder.checkpoints), name, self._group))
            # Here ranks wait for slow disks of others; in the next step they would for a short time only.
            gather(self._group, None)
        self._state.unfinished = None  # that step's record has been published since
        self._precision.prepare_weights()
        self._snapshots.forget_after(plan.back_to)
        self._last_snapshot = plan.back_to
        self._tracker.rewind(plan.back_to)
        self._console.warning(tell(plan, len(history.rewinds)))
        return plan

    def _plan(self, trouble: Trouble) -> Rewind:
        """On the first rank: checkpoints matter where no snapshot is old enough, and only whole ones do."""
        quantized = self._precision.quantized_layers()
        snapshots, storage = self._snapshots.steps(), Storage(self._folder.checkpoints)
        checkpoints = [checkpoint.step_of(name) for name in checkpoint.published(storage)]
        while True:
            plan = self._recovery.plan(trouble, snapshots, checkpoints, quantized)
            if plan.back_to in snapshots:
                return plan
            try:
                checkpoint.read(storage, checkpoint.name_of(plan.back_to))
                return plan
            except DamagedError as error:
                self._console.warning(f"checkpoint of step {plan.back_to} is passed over: {error}")
                checkpoints.remove(plan.back_to)

    def _leave(self, history: History) -> None:
        """On the first rank: everything on disk, the journal first."""
        back_to, number = history.rewinds[-1].back_to, len(history.rewinds)
        history.write(self._folder.path)
        discard_abandoned(self._folder.checkpoints, history)
        self._writer.rewind(back_to, abandoned_path(self._folder.path, number))
        write_missing_events(self._writer, history)


def discard_abandoned(checkpoints: str | Path, history: History) -> None:
    """Remove the checkpoints of ways that `history` has left; each says how many rewinds it knew of."""
    checkpoint.discard(
        checkpoints,
        lambda step, values: history.abandoned(step, len(values.get("recovery", {}).get("rewinds", ()))),
    )


def write_missing_events(writer: MetricsWriter, history: History) -> None:
    """A line in metrics.jsonl for every rewind that has none (cutting the file back takes them out)."""
    told = {r["number"] for r in read_metrics(writer.path) if r.get("event") == "rollback"}
    for number, rewind in enumerate(history.rewinds, start=1):
        if number not in told:
            writer.event("rollback", step=rewind.back_to, number=number, **asdict(rewind))


def tell(plan: Rewind, number: int) -> str:
    """A rewind as a sentence."""
    text = f"rewind {number}: step {plan.onset}: {plan.reason}; back from step {plan.found} to step {plan.back_to}"
    if plan.skip:
        text += f", over batches {plan.skip[0]} to {plan.skip[1]}"
    if plan.careful_until > plan.back_to:
        text += f"; through step {plan.careful_until} learning rate x {plan.lr_factor:g}, {len(plan.bf16)} layers in BF16"
    return text
