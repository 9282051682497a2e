"""Saving checkpoints while training goes on.

A step waits for the copy to host memory alone. A thread then writes: every rank its own shards (PyTorch's DCP, over a
gloo group of its own), the first rank, once all are done, `checkpoint.json` and the name. All ranks learn how it ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from nvfp4_train.distributed.agreement import Group, from_first, gather, rank_in
from nvfp4_train.distributed.checkpoint import INFO_NAME, describe, flatten, name_of, published, step_of
from nvfp4_train.distributed.storage import Storage, TensorFiles
from nvfp4_train.errors import SaveError

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is meant
Copied = tuple[torch.cuda.Event, torch.cuda.Event] | None


@dataclass(frozen=True)
class Saved:
    """How a save went. `waited_seconds`: what it cost the training loop, for the save before to end and for the copy to host
    memory; `seconds`: from its start to its publication. `bytes` of all ranks' files."""

    step: int
    waited_seconds: float
    seconds: float
    bytes: int
    warning: str | None = None


class Saver:
    """Publishes checkpoints in `folder` one after the other, each behind the training loop's back.

    Of the checkpoints up to the one just saved the newest `keep_last` stay (None: all), and every one whose step is a
    multiple of `keep_every`. `group` is a gloo group that nothing else uses, None in one process.
    """

    def __init__(
        self,
        folder: str | Path,
        keep_last: int | None = None,
        keep_every: int | None = None,
        group: Group = None,
    ) -> None:
        self._storage, self._group = Storage(folder), group
        self._keep_last, self._keep_every = keep_last, keep_every
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._done: list[Saved] = []
        self._error: SaveError | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in progress has failed; `wait` then raises why."""
        return self._error is not None

    def allocate(self, tensors: dict[str, Any]) -> None:
        """Get the host memory for saves of such `tensors`: pinned memory is slow to get (about a second a GB), and the first
        save would wait for it. Where there isn't enough, that save tries again and raises.

        Not in a thread beside the first step, whose kernels then failed at times on an H200: docs/results/restarts.md.
        """
        with contextlib.suppress(RuntimeError):
            for name, tensor in flatten(tensors).items():
                self._room(name, _local(tensor))

    def save(self, step: int, tokens: int, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Start to publish `step_XXXXXXXX`: returns when the tensors may change again.

        `tensors` is a nested dict with string keys and tensors (DTensors too) as leaves, the same on every rank; `values`
        must be JSON. Waits for the save before this one; raises its SaveError.
        """
        start = time.perf_counter()
        self.wait()
        copying = time.perf_counter()
        shards, copied = self._copy(tensors)
        job = _Job(
            step, tokens, values, shards, copied, start, copying - start, time.perf_counter() - copying
        )
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last save is published. Raises SaveError if it can't be written (full disk): what was saved before
        is then as it was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finished(self) -> list[Saved]:
        """Saves published since the last call."""
        done, self._done = self._done, []
        return done

    def _room(self, name: str, shard: Tensor) -> Tensor:
        if name not in self._host:
            self._host[name] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
        return self._host[name]

    def _copy(self, tensors: dict[str, Any]) -> tuple[dict[str, Any], Copied]:
        """The local shards in host memory, which is kept for the next save, and two events around their copy on a GPU.

        There the copies are queued before the kernels of the next step: these wait for them, the host doesn't.
        """
        on_gpu = any(tensor.is_cuda for tensor in flatten(tensors).values())
        copied = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else None
        if copied:
            copied[0].record()
        shards = self._copy_level(tensors, "")
        if copied:
            copied[1].record()
        return shards, copied

    def _copy_level(self, tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in tensors.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                out[key] = self._copy_level(value, f"{name}.")
                continue
            local = _local(value)
            out[key] = HostShard.of(value, self._room(name, local).copy_(local, non_blocking=True))
        return out

    def _run(self, job: _Job) -> None:
        """In the thread; whatever goes wrong on one rank goes wrong on all."""
        name, written, copying = name_of(job.step), None, job.copying
        try:
            if job.copied:
                job.copied[1].synchronize()
                # The host queues the copies while the first ones run.
                copying = max(copying, job.copied[0].elapsed_time(job.copied[1]) / 1e3)
            written = from_first(self._group, lambda: self._storage.begin(name))
            files = self._write(written, job.shards)
            info = describe(job.step, job.tokens, job.values, files)
            warning = from_first(self._group, lambda: self._publish(written, name, info, files))
            size = sum(file["size"] for file in files.values())
            self._done.append(
                Saved(job.step, job.waited + copying, time.perf_counter() - job.start, size, warning)
            )
        except (OSError, RuntimeError, CheckpointException) as error:
            if written is not None and rank_in(self._group) == 0:
                with contextlib.suppress(OSError):
                    self._storage.discard(written)
            self._error = SaveError(
                f"checkpoint of step {job.step} could not be written to {self._storage.url} ({_reason(error)}); "
                "earlier checkpoints are untouched: free some space there, or set run_dir on another disk"
            )
            self._error.__cause__ = error

    def _write(self, written: str, shards: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The tensors' files of all ranks, and what they hold: {name: {"size", "sha256"}}."""
        files = TensorFiles(self._storage)
        writer = dcp.FileSystemWriter(written, sync_files=self._storage.local)
        writer.fs, writer.path = files, self._storage.path(written)
        dcp.save(
            shards,
            storage_writer=writer,
            planner=_Planner(),
            process_group=self._group,
            no_dist=self._group is None,
        )
        parts = gather(self._group, files.written)
        return dict(sorted(item for part in parts for item in part.items()))

    def _publish(self, written: str, name: str, info: str, files: dict[str, dict[str, Any]]) -> str | None:
        """On the first rank. Returns a warning for an old checkpoint that couldn't be deleted."""
        for file, expected in files.items():
            if self._storage.size(f"{written}/{file}") != expected["size"]:
                raise OSError(f"{file} isn't as another rank wrote it: all nodes must see one folder")
        self._storage.publish(written, name, INFO_NAME, info)
        try:
            self._retain(step_of(name))
        except OSError as error:
            return f"an old checkpoint in {self._storage.url} could not be deleted ({_reason(error)})"
        return None

    def _retain(self, step: int) -> None:
        if not self._keep_last:
            return
        # Steps past `step` belong to damaged checkpoints this run resumed before: they don't count as kept ones.
        older = [name for name in published(self._storage) if step_of(name) <= step]
        for name in older[self._keep_last :]:
            if not (self._keep_every and step_of(name) % self._keep_every == 0):
                self._storage.remove(name)


@dataclass(frozen=True)
class _Job:
    step: int
    tokens: int
    values: dict[str, Any]
    shards: dict[str, Any]
    copied: Copied
    start: float  # time.perf_counter()
    waited: float  # seconds until the copies began
    copying: float  # seconds the host was at them


@dataclass(frozen=True)
class HostShard:
    """This rank's part of a tensor, in host memory: what PyTorch's planner asks of a leaf."""

    data: Tensor
    offsets: torch.Size
    size: torch.Size  # of the whole tensor

    @classmethod
    def of(cls, tensor: Tensor, data: Tensor) -> HostShard:
        """`data` holds the local values of `tensor`, a DTensor or one that is the same on every rank."""
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            return cls(data, chunk.offsets, tensor.shape)
        return cls(data, torch.Size([0] * data.dim()), data.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if self.data.numel() == 0 < self.size.numel():
            return []  # an uneven split has left nothing for this rank
        return [
            WriteItem(
                index=MetadataIndex(name, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=self.offsets, sizes=self.data.shape),
                    properties=TensorProperties.create_from_tensor(self.data),
                    size=self.size,
                ),
            )
        ]


class _Planner(dcp.DefaultSavePlanner):
    """Plans as PyTorch does; parts that several ranks hold are written once, spread over them."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].data


def save(
    folder: str | Path,
    step: int,
    tokens: int,
    tensors: dict[str, Any],
    values: dict[str, Any],
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Publish one checkpoint from one process, and wait for it; as `Saver.save`. Returns its folder."""
    saver = Saver(folder, keep_last, keep_every)
    saver.save(step, tokens, tensors, values)
    saver.wait()
    return Path(folder) / name_of(step)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _reason(error: BaseException) -> str:
    """The system's own words where there are any ("No space left on device"), on one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:200]
