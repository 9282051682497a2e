"""Experiment trackers: the rows of metrics.jsonl, under the same names, in wandb and TensorBoard.

metrics.jsonl is the record; a tracker is a copy of it for the eye. Each tracker runs in a thread of its own, so a
slow or failing one costs the training step nothing: it warns once and is given up. A resumed run first sends the
rows that its tracker lacks, so every step stands there once.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from nvfp4_train.config.schema import LoggingConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.training.metrics import read_metrics

WANDB_MODES = ("off", "offline", "online")
_INIT_SECONDS = 20.0
_FINISH_SECONDS = 30.0
_MAX_WAITING_ROWS = 10_000

Warn = Callable[[str], None]
Opener = Callable[
    [int | None, bool], "Sink"
]  # the step it goes on from, if any, and whether that is a rewind
Row = tuple[int, dict[str, float] | None]  # None: a rewind to that step


class Sink(Protocol):
    """One open tracker. Any of its methods may raise or take long."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """All trackers of a run (there may be none). No method raises or waits, but `finish`, which waits a little."""

    def __init__(self, threads: list[_SinkThread]) -> None:
        self._threads = threads
        self._step = 0

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a record of metrics.jsonl; one without a step belongs to the step before. Events are left out."""
        self._step = record.get("step", self._step)
        if "event" not in record:
            for thread in self._threads:
                thread.put(self._step, _numbers(record))

    def rewind(self, step: int) -> None:
        """Take back the rows of steps beyond `step`, which have just left metrics.jsonl: the run goes on from there."""
        self._step = step
        for thread in self._threads:
            thread.rewind(step)

    def finish(self) -> None:
        """Let every tracker send what it has, for at most half a minute."""
        for thread in self._threads:
            thread.finish()


def build_tracker(
    cfg: LoggingConfig,
    run_id: str,
    run_dir: str | Path,
    config: Mapping[str, Any],
    resumed_at: int | None,
    warn: Warn,
) -> Tracker:
    """The trackers that `cfg` asks for, which begin to open in the background.

    `run_id` is the same in all launches of a run; `resumed_at` is the step of the checkpoint that this launch goes
    on from (rows of later steps are no longer in metrics.jsonl), None in a fresh run. `warn` may be called from
    another thread. Raises ConfigError for an unknown mode.
    """
    if cfg.wandb not in WANDB_MODES:
        raise ConfigError(f"logging.wandb={cfg.wandb!r} is unknown: choose {', '.join(WANDB_MODES)}.")
    run_dir = Path(run_dir)
    openers: dict[str, Opener] = {}
    if cfg.wandb != "off":
        openers["wandb"] = lambda *at: _Wandb(cfg, run_id, run_dir, config, *at)
    if cfg.tensorboard:
        openers["tensorboard"] = lambda *at: _TensorBoard(run_dir / "tensorboard", *at)
    return Tracker([_SinkThread(name, opener, resumed_at, warn) for name, opener in openers.items()])


class _SinkThread:
    """Opens a sink, feeds it from a queue and closes it, in a daemon thread; gives it up when it fails."""

    def __init__(self, name: str, opener: Opener, resumed_at: int | None, warn: Warn) -> None:
        self._name, self._opener, self._resumed_at, self._warn = name, opener, resumed_at, warn
        self._rows: queue.Queue[Row | None] = queue.Queue(_MAX_WAITING_ROWS)
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def rewind(self, step: int) -> None:
        self.put(step, None)

    def put(self, step: int, values: dict[str, float] | None) -> None:
        if self._given_up.is_set():
            return
        try:
            self._rows.put_nowait((step, values))
        except queue.Full:
            self._give_up(f"it is {_MAX_WAITING_ROWS} rows behind")

    def finish(self) -> None:
        if self._given_up.is_set():
            return
        try:
            self._rows.put_nowait(None)
            self._thread.join(_FINISH_SECONDS)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._give_up(f"it has not sent everything within {_FINISH_SECONDS:.0f} s")

    def _run(self) -> None:
        try:
            sink = self._opener(self._resumed_at, False)
            while (row := self._rows.get()) is not None and not self._given_up.is_set():
                step, values = row
                if values is not None:
                    sink.log(step, values)
                else:
                    sink.close()
                    sink = self._opener(step, True)
            sink.close()
        except Exception as error:
            self._give_up(" ".join(str(error).split()) or type(error).__name__)

    def _give_up(self, reason: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            self._warn(
                f"{self._name} gets no more rows ({reason}); training goes on, metrics.jsonl has them all."
            )


class _Wandb:
    """A wandb run under the run folder's id; history steps are training steps."""

    def __init__(
        self,
        cfg: LoggingConfig,
        run_id: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resumed_at: int | None,
        rewound: bool,
    ) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # also: never ask for a login
        import wandb

        # Only a server can cut a history back, which it does for resume_from.
        online_rewind = rewound and cfg.wandb == "online"
        where = {"resume_from": f"{run_id}?_step={resumed_at}"} if online_rewind else {"resume": "allow"}
        self._run = wandb.init(
            mode=cfg.wandb,
            project=cfg.wandb_project,
            id=None if online_rewind else run_id,
            **where,
            name=run_dir.name,
            dir=run_dir,
            config=dict(config),
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS
            ),
        )
        self._run.define_metric("*", step_metric="step")
        # Online wandb tells the first step it lacks; steps it has were logged before a kill and are bit-equal now.
        # Offline it knows of no earlier launch and gets all rows again: `wandb sync` lets a run's newest folder
        # replace the older ones.
        self._first_step = self._run.step
        for step, values in _rows_up_to(run_dir / "metrics.jsonl", resumed_at):
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._first_step:
            self._run.log({"step": step, **values}, step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Event files in `folder`; a resumed run declares the steps void that came after its checkpoint."""

    def __init__(self, folder: Path, resumed_at: int | None, rewound: bool) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RuntimeError("it is not installed: pip install tensorboard") from None
        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_at is None else resumed_at + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _rows_up_to(metrics: Path, step: int | None) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows of metrics.jsonl through `step`, as `Tracker.log` sends them."""
    current = 0
    for record in read_metrics(metrics) if step is not None else ():
        current = record.get("step", current)
        if current > step:
            return
        if "event" not in record:
            yield current, _numbers(record)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"
    }
