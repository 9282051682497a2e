"""When another rank is gone or hangs: who, in which collective, and an end within two minutes.

Collectives have a short time-out once steps run (`short_timeouts`). Beside that each rank shows a sign of life in the
group's store every few seconds and watches its neighbour's, since a rank that waits for the device learns of no time-out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nvfp4_train.atomic import atomic_open
from nvfp4_train.errors import RankLost, StoppedBySignal

START_TIMEOUT = timedelta(hours=2)  # until the first step is done: data is prepared, blocks are compiled
STEP_TIMEOUT = timedelta(seconds=100)
_TICK = 5.0  # seconds between signs of life
_PATIENCE = 12  # of our own ticks without one of the neighbour's
_STOPPED = "{} was stopped by a signal before it had anything to save, so this rank stops too: run the same command to go on"
_ANSWER = 3.0  # seconds that the other ranks have to say that they stopped too


def record_collectives(folder: Path) -> None:
    """Let PyTorch's flight recorder keep the latest collectives, and NCCL's watchdog dump them to `folder` when one
    times out; before the group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "nccl_rank_"))


def short_timeouts(*but: dist.ProcessGroup | None) -> None:
    """Give all groups `but` these (in which ranks wait for one another's disks) the time-out of steps."""
    for group in c10d._world.pg_map:
        if group not in but:
            c10d._set_pg_timeout(STEP_TIMEOUT, group)


class NoPeers:
    """What a process that trains alone watches."""

    wait_for_disks: tuple[dist.ProcessGroup | None, ...] = ()  # groups that keep their long time-out

    def at(self, doing: str) -> None:
        pass

    def step_done(self, step: int) -> None:
        pass

    def explain(self, error: Exception) -> Exception:
        return error

    def stop_all(self) -> None:
        pass

    def close(self) -> None:
        pass


class PeerWatch(NoPeers):
    """One rank's view of the others, from the first step to `close`.

    A neighbour without a sign of life ends this process with exit code 1, after a report to `say` and dumps in `folder`.
    A rank that a signal stops before there is anything to save takes the others with it (`stop_all`): they get a SIGTERM.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        tick: float = _TICK,
        patience: int = _PATIENCE,
        answer: float = _ANSWER,
    ) -> None:
        """A collective call. `folder` is made when there is something to put there."""
        self._folder, self._say, self._tick, self._patience, self._answer = (
            folder,
            say,
            tick,
            patience,
            answer,
        )
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        store = c10d._get_default_store()
        self._store = dist.PrefixStore("peers", store.clone() if hasattr(store, "clone") else store)
        self._doing, self._closed = "before the first step", threading.Event()
        self._store.set(f"who/{self._rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._beat(0)
        dist.barrier()
        self._thread = threading.Thread(target=self._watch, name="peer watch", daemon=True)
        self._thread.start()

    def at(self, doing: str) -> None:
        """Where this rank is ("step 17"), for the others' reports."""
        self._doing = doing

    def step_done(self, step: int) -> None:
        """After each step; from the first one on, time-outs are short."""
        if self._doing == "before the first step":
            short_timeouts(*self.wait_for_disks)
        self._doing = f"step {step + 1}"

    def explain(self, error: Exception) -> Exception:
        """What to raise for `error`: RankLost with the rank that is gone and the collective that found it, or `error` itself
        where it isn't of the communication. Tells the other ranks that this one ends; waits for them a few seconds."""
        self._closed.set()
        if _of_communication(error) and (who := self._stopped()):
            return StoppedBySignal(_STOPPED.format(who))
        ours = not _of_communication(error)
        left = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" if ours else ""
        try:
            self._store.set(f"left/{self._rank}", f"{self._doing}|{left}")
            if ours:
                return error
            report = self._report(self._missing())
        except RuntimeError:  # the store went with the process that held it
            if ours:
                return error
            report = "the group's store is gone, and with it the launcher or rank 0"
        return RankLost(f"{report}; noticed at {self._doing} in {_collective()}, recorded in {self._dump()}")

    def stop_all(self) -> None:
        """This rank was stopped before it had anything to save: the others shall not wait for it."""
        self._closed.set()
        if self._stopped():
            return
        with contextlib.suppress(RuntimeError):
            self._store.set("stopped", f"rank {self._rank} ({self._read(f'who/{self._rank}')})")

    def close(self) -> None:
        """This rank ends, as it should or having said why not."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(RuntimeError):
                self._store.set(f"left/{self._rank}", f"{self._doing}|")
        # Python stops the threads that are left when it ends, and one that is asking the store then takes the process with
        # it (SIGABRT instead of the exit code).
        self._thread.join(_TICK)

    def _missing(self) -> list[int]:
        """The ranks that don't say within seconds that they stopped; empty when one of them says why it did."""
        deadline = time.monotonic() + self._answer
        others = [rank for rank in range(self._size) if rank != self._rank]
        while True:
            left = {rank: self._read(f"left/{rank}") for rank in others}
            if any(text and text.partition("|")[2] for text in left.values()):
                return []
            missing = [rank for rank, text in left.items() if text is None]
            if len(missing) <= 1 or time.monotonic() > deadline:
                return missing
            time.sleep(0.05)

    def _report(self, missing: list[int]) -> str:
        if missing:
            return "; ".join(
                f"rank {rank} ({self._read(f'who/{rank}')}) is gone or hangs, last seen at {self._last(rank)}"
                for rank in missing
            )
        for rank in range(self._size):
            doing, _, left = (self._read(f"left/{rank}") or "").partition("|")
            if left:
                return f"rank {rank} ({self._read(f'who/{rank}')}) ended at {doing} with {left}"
        return "the connection between the ranks broke, all of them are there"

    def _last(self, rank: int) -> str:
        return (self._read(f"beat/{rank}") or "|the start").partition("|")[2]

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _stopped(self) -> str | None:
        """The rank that was stopped before it had anything to save."""
        try:
            return self._read("stopped")
        except RuntimeError:
            return None

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._rank}", f"{count}|{self._doing}")

    def _watch(self) -> None:
        neighbour, seen, silent, count = (self._rank + 1) % self._size, None, 0, 0
        stopping = ended = False
        while not self._closed.wait(self._tick):
            count += 1
            if who := self._stopped():
                if stopping:  # a tick later still here: in a step that waits for the device
                    os._exit(StoppedBySignal.exit_code)
                self._say(_STOPPED.format(who))
                os.kill(os.getpid(), signal.SIGTERM)
                stopping = True
            try:
                self._beat(count)
                sign = (self._read(f"beat/{neighbour}") or "").partition("|")[0]
                left = self._read(f"left/{neighbour}")
            except RuntimeError:
                sign = left = None
            # Our own ticks count, not the clock: a machine that stood still finds its neighbours where they were.
            silent = silent + 1 if sign in (seen, None) and left is None else 0
            seen = sign
            if left is not None and left.partition("|")[2]:
                if ended:  # a tick later: what ended it isn't about to end this rank by itself
                    self._end(self._report([]))
                ended = True
            elif silent >= self._patience:
                self._end(self._silent(neighbour))

    def _silent(self, rank: int) -> str:
        try:
            who, last = self._read(f"who/{rank}"), self._last(rank)
        except RuntimeError:
            who, last = "no store to ask", "an unknown step"
        return f"rank {rank} ({who}), last seen at {last}, has shown no sign of life for {self._tick * self._patience:.0f} s"

    def _end(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", f"{self._doing}|{reason}")
        self._say(
            f"Error: {reason}; this rank is at {self._doing} in {_collective()}, recorded in {self._dump()}: ending, so "
            "that the launcher starts again from the last checkpoint"
        )
        os._exit(RankLost.exit_code)

    def _dump(self) -> Path:
        """The flight recorder's collectives and all threads' stacks."""
        path = self._folder / f"rank_{self._rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stacks = {str(thread): traceback.format_stack(frame) for thread, frame in _frames().items()}
            with atomic_open(path) as f:
                json.dump(
                    {"rank": self._rank, "at": self._doing, "collectives": _recorded(), "stacks": stacks}, f
                )
        except OSError as error:
            self._say(f"{path} could not be written ({error.strerror})")
        return path


def _frames() -> dict:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {names.get(ident, ident): frame for ident, frame in sys._current_frames().items()}


def _recorded() -> list[dict]:
    """The latest collectives of this process, oldest first; empty where torch has no such dump."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return json.loads(dump()).get("entries", []) if dump else []


def _collective() -> str:
    """The latest collective that wasn't done when its group went silent."""
    entries = _recorded()
    if not entries:
        return "a collective"
    last = next((entry for entry in reversed(entries) if not entry.get("retired")), entries[-1])
    group = last.get("process_group", ["", ""])[1]
    return f"{last['profiling_name']} {last['input_sizes']} of group {group}"


def _of_communication(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        word in text for word in ("gloo/", "NCCL", "Connection closed by peer")
    )
