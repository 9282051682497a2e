"""The training loop: steps, metrics, validation, recovery, checkpoints, and stopping when asked to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from nvfp4_train.config.schema import Config
from nvfp4_train.data.corpora import Corpora
from nvfp4_train.data.dataset import Dataset
from nvfp4_train.data.loader import Loader
from nvfp4_train.data.sampler import Sampler
from nvfp4_train.distributed.agreement import LaggedMax, from_first
from nvfp4_train.distributed.failures import NoPeers
from nvfp4_train.distributed.processes import Processes
from nvfp4_train.distributed.saving import Saver
from nvfp4_train.errors import RecoveryGaveUp, StoppedBySignal
from nvfp4_train.model.flops import flops_per_token
from nvfp4_train.precision import PrecisionRuntime
from nvfp4_train.training import peaks
from nvfp4_train.training.batches import Batches
from nvfp4_train.training.console import Console
from nvfp4_train.training.evaluation import score
from nvfp4_train.training.faults import Faults
from nvfp4_train.training.metrics import DeviceMetrics, MetricsWriter
from nvfp4_train.training.recovery import REPORT, Trouble
from nvfp4_train.training.recovery_report import ABANDONED, write_report
from nvfp4_train.training.resume import total_steps
from nvfp4_train.training.rewinding import Rewinder
from nvfp4_train.training.run_folder import RunFolder
from nvfp4_train.training.schedule import Schedule
from nvfp4_train.training.signals import StopRequest
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.step import train_step
from nvfp4_train.training.tracker import Tracker
from nvfp4_train.training.watchdog import Watchdog

_SAVE_FAILED = 2  # beside 0 and 1, nobody or somebody asked to stop


class _BrokenOff(Exception):
    """A validation that a stop request has ended."""


class Trainer:
    """Takes the run from `state` to its last step.

    After each step, in this order: validation when due, then metrics to disk, then a rewind when they call for one, else a
    checkpoint when due. So a checkpoint of step N finds everything up to N in metrics.jsonl, a resumed run repeats nothing
    of it, and no state is saved that was seen to be in trouble. A validation that a stop request breaks off is made up for
    by the next launch: until then the checkpoint holds that step's record.
    """

    def __init__(
        self,
        cfg: Config,
        folder: RunFolder,
        state: TrainState,
        precision: PrecisionRuntime,
        schedule: Schedule,
        corpora: Corpora,
        writer: MetricsWriter,
        console: Console,
        tracker: Tracker,
        device: torch.device,
        saver: Saver,
        agree: LaggedMax,
        processes: Processes,
        peers: NoPeers,
    ) -> None:
        self.cfg, self.folder, self.state, self.precision = cfg, folder, state, precision
        self.schedule, self.corpora, self.device = schedule, corpora, device
        self.writer, self.console, self.tracker = writer, console, tracker
        self.saver, self._agree = saver, agree
        self.processes, self._peers = processes, peers
        self.recovery = state.recovery
        self._rewinder = Rewinder(
            cfg.recovery, folder, state, precision, saver, writer, tracker, console, processes.control
        )
        self._faults = Faults(cfg.faults, processes.rank, vocab_size=cfg.model.vocab_size)
        training = cfg.training
        self._sampler = Sampler(
            corpora,
            seq_len=training.seq_len,
            global_batch_size=training.global_batch_size,
            seed=training.seed,
            reset_state_at_documents=cfg.data.reset_state_at_documents,
        )
        hang_seconds = cfg.recovery.hang_seconds if cfg.recovery.name == "auto" else None
        self._watchdog = Watchdog(
            hang_seconds,
            folder.path / ABANDONED / f"stacks_rank{processes.rank}.txt",
            lambda: f"step {state.step + 1}",
            self._report,
        )
        self.total_steps = total_steps(cfg.training)
        planned = total_steps(dataclasses.replace(cfg.training, max_steps=None))
        self._faults.check(processes.size, planned, state.model)
        self.seconds = 0.0  # spent in training steps by this launch
        self.launch_tokens = 0
        self._flops_per_token = flops_per_token(cfg.model, cfg.training.seq_len)
        self._peak_tflops = peaks.peak(device, cfg.logging.peak_tflops)[0]
        self._metrics = DeviceMetrics()

    def train(self, stop: StopRequest) -> None:
        """Run to the last step, which is validated and saved.

        Raises StoppedBySignal after saving when `stop` was requested, RecoveryGaveUp, with a report in the run folder, when
        training can't go on, SaveError when a checkpoint can't be written.
        """
        try:
            with self._watchdog, contextlib.ExitStack() as self._open:
                self._read_ahead()
                if (record := self.state.unfinished) is not None:
                    trouble = self._publish([record | self._validate(stop)])
                    self.state.unfinished = None
                    self._rewind(trouble) if trouble else self._start_clock()
                self._rewinder.snapshot_if_due()
                while self.state.step < self.total_steps:
                    self._step()
                    stop.defer()
                    self._peers.step_done(self.state.step)
                    self._after_step(stop)
        except RecoveryGaveUp as error:
            report = functools.partial(self._report, str(error))
            if error.of_all_ranks:  # the others wait for it: the launcher stops all ranks when one has ended
                from_first(self.processes.control, report)
            else:
                report()
            raise

    def _after_step(self, stop: StopRequest) -> None:
        """What is due: metrics, validation, a rewind, a checkpoint, the end."""
        training, step = self.cfg.training, self.state.step
        last = step == self.total_steps
        stopping = self._asked(stop)  # looked at once: a signal from here on waits for the next step
        validates = last or (bool(training.validate_every) and step % training.validate_every == 0)
        saves = last or stopping or step % self.cfg.checkpoint.every_steps == 0
        if validates or saves or step % training.log_every == 0:
            records = self._read_metrics()
            if validates:
                try:
                    records[-1].update(self._validate(stop))
                except _BrokenOff:
                    stopping, self.state.unfinished = True, records.pop()
                self._start_clock()
            if trouble := self._publish(records):
                self._rewind(trouble)
                last, saves = False, True
        if saves or stopping:
            self._save(wait=last or stopping)
        self._tell_saved()
        if stopping and (not last or self.state.unfinished):
            name = stop.signal.name if stop.signal else "a signal to another rank"
            raise StoppedBySignal(
                f"stopped by {name} after step {self.state.step}, which is saved: run the same command to go on."
            )
        self._rewinder.snapshot_if_due()

    def _read_ahead(self) -> None:
        """A loader from the present step on, in place of the one before."""
        self._open.close()
        retries = self.cfg.recovery.read_retries if self.cfg.recovery.name == "auto" else 0
        batches = Batches(self._sampler, self.recovery.history, self._faults, retries)
        # Ranks take consecutive parts of each global batch, so its micro-batches are the same for any number of ranks.
        count = self.cfg.training.global_batch_size // self.processes.size
        loader = Loader(
            batches,
            self.state.step,
            self.processes.rank * count,
            count,
            workers=self.cfg.data.workers,
            pin_memory=self.device.type == "cuda",
        )
        self._loader = self._open.enter_context(loader)
        self._start_clock()

    def _rewind(self, trouble: Trouble) -> None:
        self._watchdog.pause()
        self._rewinder.rewind(trouble)
        self._read_ahead()

    def _asked(self, stop: StopRequest) -> bool:
        """Whether any rank was asked to stop, the same on all. Raises SaveError where a save behind the steps has failed."""
        flag = self._agree(_SAVE_FAILED if self.saver.failed else bool(stop))
        if flag == _SAVE_FAILED:
            self.saver.wait()
        return bool(flag)

    def _step(self) -> None:
        state, history, faults = self.state, self.recovery.history, self._faults
        step = state.step + 1
        faults.before_step(step, history, state.model)
        if self._text_changes(step):
            state.detector.restart()
        batch = self._loader.next().to(self.device)
        self.precision.set_phase(state.tokens / self.cfg.training.max_tokens, history.bf16(step))
        lr = self.schedule.lr(state.tokens) * history.lr_factor(step) * faults.lr_factor(step, history)
        every = self.cfg.precision.health_every
        scalars = train_step(
            state,
            self.precision,
            batch,
            self.cfg.training.micro_batch_size,
            lr,
            processes=self.processes,
            gradient_scale=faults.gradient_scale(step, history),
            record_health=bool(every) and step % every == 0,
        )
        self._metrics.add({"step": state.step, "tokens": state.tokens, "lr": lr}, scalars)
        self._watchdog.beat()

    def _text_changes(self, step: int) -> bool:
        """Whether a new mixture of the corpora begins with `step`, whose losses those before say nothing about."""
        history, segments = self.recovery.history, self.corpora.segments[1:]
        return any(history.batch(step - 1) < segment.start <= history.batch(step) for segment in segments)

    def _start_clock(self) -> None:
        self._clock, self._waited = time.perf_counter(), self._loader.waited
        self.processes.traffic.take()

    def _read_metrics(self) -> list[dict[str, Any]]:
        """Records of the steps since the last call; this is where the host waits for the device."""
        records = self._metrics.read()
        seconds = time.perf_counter() - self._clock
        waited = self._loader.waited - self._waited
        traffic = self.processes.traffic.take()
        sent = {f"traffic/{name}": value / len(records) for name, value in traffic.items()}
        self._start_clock()
        tokens = len(records) * self.cfg.training.global_batch_size * self.cfg.training.seq_len
        self.seconds += seconds
        self.launch_tokens += tokens
        for record in records:
            record["tokens_per_second"] = tokens / seconds
            record["tflops"] = tokens / seconds * self._flops_per_token / 1e12
            if self._peak_tflops is not None:
                record["mfu"] = record["tflops"] / self._peak_tflops
            record["memory_gib"] = _memory_in_use(self.device) / 2**30
            record["data_wait_fraction"] = waited / seconds
            record.update(sent)
        return records

    def _publish(self, records: list[dict[str, Any]]) -> Trouble | None:
        """To disk, screen and trackers, and to recovery: returns what calls for a rewind. Raises RecoveryGaveUp."""
        if not records:
            return None
        self.writer.write(records)
        for record in records:
            self.tracker.log(record)
        self.console.step(records[-1], self.total_steps, self._total_tokens())
        changes = [record["step"] for record in records if self._text_changes(record["step"])]
        events, trouble = self.recovery.look(records, self.total_steps, changes)
        for event in events:
            self.writer.write([event])
            skipped = ", so the weights were left as they are" if event.get("skipped") else ""
            if skipped or event["event"] != "spike":
                self.console.warning(f"step {event['step']}: {event['reason']}{skipped}")
        if warning := self.state.clipper.warning(records[-1]):
            self.console.warning(warning)
        return trouble

    def _validate(self, stop: StopRequest) -> dict[str, float]:
        """Raises _BrokenOff when a rank is asked to stop meanwhile."""

        def look(_: float) -> None:
            if self._asked(stop):
                raise _BrokenOff

        self._watchdog.pause()
        values = {}
        with self.precision.keeping_state():
            for name, dataset in self.corpora.datasets.items():
                values |= self._validate_on(name, dataset, look)
        return values

    def _validate_on(self, name: str, dataset: Dataset, look: Callable[[float], None]) -> dict[str, float]:
        limit = self.cfg.training.validate_tokens
        result = score(self.state.model, self.cfg, dataset, limit, look, self.processes)
        values = {f"valid/{name}/loss": result.loss, f"valid/{name}/bits_per_byte": result.bits_per_byte}
        of = "" if self.corpora.only else f" of {name}"
        text = f"step {self.state.step}: held-out loss{of} {result.loss:.4f}, {result.bits_per_byte:.3f} bits per byte"
        if self.cfg.training.validate_bf16:
            with self.precision.all_bf16(), torch.compiler.set_stance("force_eager"):
                beside = score(self.state.model, self.cfg, dataset, limit, look, self.processes)
            values[f"valid/{name}/loss_bf16"] = beside.loss
            text += f" ({beside.loss:.4f} with all layers in BF16)"
        self.console.info(text)
        return values

    def _save(self, wait: bool) -> None:
        state = self.state
        self._watchdog.pause()
        self.writer.sync()
        self.saver.save(state.step, state.tokens, state.tensors(), state.values())
        if wait:
            self.saver.wait()

    def _tell_saved(self) -> None:
        """An event for every checkpoint published since the last look."""
        for saved in self.saver.finished():
            self.writer.event(
                "checkpoint",
                step=saved.step,
                waited_seconds=saved.waited_seconds,
                seconds=saved.seconds,
                bytes=saved.bytes,
            )
            if saved.warning:
                self.console.warning(saved.warning)

    def _report(self, cause: str) -> None:
        """recovery_report.md: what a person should know. A report that fails must not hide its cause."""
        try:
            name = REPORT if self.processes.first else f"rank{self.processes.rank}_{REPORT}"
            path = write_report(
                self.folder.path / name,
                cause,
                self.recovery.history,
                self.folder.metrics,
                self._sampler,
                self.total_steps,
            )
            self.console.warning(f"{path} says what happened")
        except Exception as error:
            self.console.warning(f"{REPORT} could not be written ({error})")

    def _total_tokens(self) -> float:
        return self.total_steps * self.cfg.training.global_batch_size * self.cfg.training.seq_len


def _memory_in_use(device: torch.device) -> int:
    """Bytes: of a GPU the most that were allocated, of a CPU the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
