"""Reads batches ahead of the training step, in threads of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from nvfp4_train.data.batch import Batch
from nvfp4_train.data.sampler import Sampler


class Loader:
    """Batches of `sampler` from step `first_step` on, in order and without end.

    Each of the `workers` threads reads every workers-th step, at most `ahead` / workers (rounded up) of them waiting;
    reading and converting tokens release Python's lock. Without workers, `next` reads. `waited` is the time in seconds
    that `next` has waited so far. An error while reading is raised by the `next` whose batch it was.
    """

    def __init__(
        self,
        sampler: Sampler,
        first_step: int,
        start: int = 0,
        count: int | None = None,
        *,
        ahead: int = 4,
        workers: int = 1,
        pin_memory: bool = False,
    ) -> None:
        """`start` and `count` choose sequences within each global batch, as in `Sampler.batch`; `pin_memory` is for
        batches that go to a GPU."""
        self.waited = 0.0
        self._sampler, self._start, self._count, self._pin = sampler, start, count, pin_memory
        self._first = self._next = first_step
        self._closing = threading.Event()
        self._ready: list[queue.Queue[Batch | BaseException]] = [
            queue.Queue(-(-ahead // workers)) for _ in range(workers)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(first_step + i,), name="data loader", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Batch:
        """The next step's batch."""
        if self._closing.is_set():
            raise ValueError("the loader is closed")
        begin = time.perf_counter()
        try:
            item = self._queue(self._next).get() if self._threads else self._read(self._next)
            if isinstance(item, BaseException):
                raise item
        except BaseException:
            self.close()
            raise
        self.waited += time.perf_counter() - begin
        self._next += 1
        return item

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()

    def close(self) -> None:
        """Stop reading and wait for the threads."""
        self._closing.set()
        for ready, thread in zip(self._ready, self._threads, strict=True):
            while thread.is_alive():
                try:
                    ready.get_nowait()  # makes room for a thread that waits to put a batch down
                except queue.Empty:
                    thread.join(0.01)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _queue(self, step: int) -> queue.Queue[Batch | BaseException]:
        return self._ready[(step - self._first) % len(self._ready)]

    def _read(self, step: int) -> Batch:
        batch = self._sampler.batch(step, self._start, self._count)
        return batch.pin_memory() if self._pin else batch

    def _work(self, step: int) -> None:
        ready = self._queue(step)
        try:
            while not self._closing.is_set():
                ready.put(self._read(step))
                step += len(self._ready)
        except BaseException as error:
            ready.put(error)
