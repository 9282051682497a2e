"""The training loop: steps, metrics, validation, checkpoints, and stopping when asked to."""

from __future__ import annotations

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
from nvfp4_train.distributed.agreement import LaggedMax
from nvfp4_train.distributed.processes import Processes
from nvfp4_train.distributed.saving import Saver
from nvfp4_train.distributed.traffic import Traffic
from nvfp4_train.errors import RecoveryGaveUp, StoppedBySignal
from nvfp4_train.model.flops import flops_per_token
from nvfp4_train.precision import PrecisionRuntime
from nvfp4_train.training import peaks
from nvfp4_train.training.console import Console
from nvfp4_train.training.evaluation import score
from nvfp4_train.training.metrics import DeviceMetrics, MetricsWriter
from nvfp4_train.training.resume import total_steps
from nvfp4_train.training.run_folder import RunFolder
from nvfp4_train.training.schedule import Schedule
from nvfp4_train.training.signals import StopRequest
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.step import train_step
from nvfp4_train.training.tracker import Tracker

_SAVE_FAILED = 2  # beside 0 and 1, nobody or somebody asked to stop


class _BrokenOff(Exception):
    """A validation that a stop request has ended."""


class Trainer:
    """Takes the run from `state` to its last step.

    After each step, in this order: validation when due, then metrics to disk, then a checkpoint when due. So a
    checkpoint of step N finds everything up to N in metrics.jsonl, and a resumed run repeats nothing of it. A validation
    that a stop request breaks off is made up for by the next launch: until then the checkpoint holds that step's record.
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
        traffic: Traffic,
    ) -> None:
        self.cfg, self.folder, self.state, self.precision = cfg, folder, state, precision
        self.schedule, self.corpora, self.device = schedule, corpora, device
        self.writer, self.console, self.tracker = writer, console, tracker
        self.saver, self._agree = saver, agree
        self.processes, self._traffic = processes, traffic
        self.total_steps = total_steps(cfg.training)
        self.seconds = 0.0  # spent in training steps by this launch
        self.launch_tokens = 0
        self._flops_per_token = flops_per_token(cfg.model, cfg.training.seq_len)
        self._peak_tflops = peaks.peak(device, cfg.logging.peak_tflops)[0]
        self._metrics = DeviceMetrics()

    def train(self, stop: StopRequest) -> None:
        """Run to the last step, which is validated and saved.

        Raises StoppedBySignal after saving when `stop` was requested, RecoveryGaveUp when too many steps in a row were
        not finite, SaveError when a checkpoint can't be written.
        """
        training = self.cfg.training
        sampler = Sampler(
            self.corpora,
            seq_len=training.seq_len,
            global_batch_size=training.global_batch_size,
            seed=training.seed,
            reset_state_at_documents=self.cfg.data.reset_state_at_documents,
        )
        # Ranks take consecutive parts of each global batch, so its micro-batches are the same for any number of ranks.
        count = training.global_batch_size // self.processes.size
        loader = Loader(
            sampler,
            self.state.step,
            self.processes.rank * count,
            count,
            workers=self.cfg.data.workers,
            pin_memory=self.device.type == "cuda",
        )
        with loader:
            if (record := self.state.unfinished) is not None:
                self._publish([record | self._validate(stop)])
                self.state.unfinished = None
            self._start_clock(loader)
            while self.state.step < self.total_steps:
                self._step(loader)
                stop.defer()
                step = self.state.step
                last = step == self.total_steps
                stopping = self._asked(stop)  # looked at once: a signal from here on waits for the next step
                validates = last or (bool(training.validate_every) and step % training.validate_every == 0)
                saves = last or stopping or step % self.cfg.checkpoint.every_steps == 0
                if validates or saves or step % training.log_every == 0:
                    records = self._read_metrics(loader)
                    if validates:
                        try:
                            records[-1].update(self._validate(stop))
                        except _BrokenOff:
                            stopping, self.state.unfinished = True, records.pop()
                        self._start_clock(loader)
                    self._publish(records)
                if saves or stopping:
                    self._save(wait=last or stopping)
                self._tell_saved()
                if stopping and (not last or self.state.unfinished):
                    name = stop.signal.name if stop.signal else "a signal to another rank"
                    raise StoppedBySignal(
                        f"stopped by {name} after step {step}, which is saved: run the same command to go on."
                    )

    def _asked(self, stop: StopRequest) -> bool:
        """Whether any rank was asked to stop, the same on all. Raises SaveError where a save behind the steps has failed."""
        flag = self._agree(_SAVE_FAILED if self.saver.failed else bool(stop))
        if flag == _SAVE_FAILED:
            self.saver.wait()
        return bool(flag)

    def _step(self, loader: Loader) -> None:
        state = self.state
        batch = loader.next().to(self.device)
        self.precision.set_phase(state.tokens / self.cfg.training.max_tokens)
        lr = self.schedule.lr(state.tokens)
        scalars = train_step(
            state, self.precision, batch, self.cfg.training.micro_batch_size, lr, processes=self.processes
        )
        self._metrics.add({"step": state.step, "tokens": state.tokens, "lr": lr}, scalars)

    def _start_clock(self, loader: Loader) -> None:
        self._clock, self._waited = time.perf_counter(), loader.waited
        self._traffic.take()

    def _read_metrics(self, loader: Loader) -> list[dict[str, Any]]:
        """Records of the steps since the last call; this is where the host waits for the device."""
        records = self._metrics.read()
        seconds = time.perf_counter() - self._clock
        waited = loader.waited - self._waited
        sent = {f"traffic/{name}": value / len(records) for name, value in self._traffic.take().items()}
        self._start_clock(loader)
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

    def _publish(self, records: list[dict[str, Any]]) -> None:
        """To disk, screen and trackers. Raises RecoveryGaveUp after too many skipped steps."""
        if not records:
            return
        self.writer.write(records)
        for record in records:
            self.tracker.log(record)
            if record["skipped"]:
                self.console.warning(
                    f"step {record['step']}: loss {record['loss']} and gradient norm {record['grad_norm']}, so the "
                    "weights were left as they are"
                )
        self.console.step(records[-1], self.total_steps, self._total_tokens())
        if warning := self.state.clipper.warning(records[-1]):
            self.console.warning(warning)
        limit = self.cfg.recovery.max_consecutive_skips
        if records[-1]["skipped_in_a_row"] >= limit:
            raise RecoveryGaveUp(
                f"{records[-1]['skipped_in_a_row']} steps in a row were not finite (recovery.max_consecutive_skips="
                f"{limit}): lower optimizer.lr, or look at {self.writer.path} for where it began."
            )

    def _validate(self, stop: StopRequest) -> dict[str, float]:
        """Raises _BrokenOff when a rank is asked to stop meanwhile."""

        def look(_: float) -> None:
            if self._asked(stop):
                raise _BrokenOff

        values = {}
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

    def _total_tokens(self) -> float:
        return self.total_steps * self.cfg.training.global_batch_size * self.cfg.training.seq_len


def _memory_in_use(device: torch.device) -> int:
    """Bytes: of a GPU the most that were allocated, of a CPU the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
