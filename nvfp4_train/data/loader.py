"""Reads batches ahead of the training step, in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from nvfp4_train.data.batch import Batch
from nvfp4_train.data.sampler import Sampler


class Loader:
    """Batches of `sampler` from step `first_step` on, without end, at most `ahead` of them waiting.

    `waited` is the time in seconds that `next` has waited so far. An error while reading is raised by `next`.
    """

    def __init__(
        self, sampler: Sampler, first_step: int, start: int = 0, count: int | None = None, ahead: int = 4
    ) -> None:
        """`start` and `count` choose sequences within each global batch, as in `Sampler.batch`."""
        self.waited = 0.0
        self._sampler, self._start, self._count = sampler, start, count
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._read, args=(first_step,), name="data loader", daemon=True
        )
        self._thread.start()

    def next(self) -> Batch:
        """The next step's batch."""
        if self._closing.is_set():
            raise ValueError("the loader is closed")
        begin = time.perf_counter()
        item = self._ready.get()
        self.waited += time.perf_counter() - begin
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()

    def close(self) -> None:
        """Stop reading and wait for the thread."""
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # makes room for a thread that waits to put a batch down
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int) -> None:
        try:
            while not self._closing.is_set():
                self._ready.put(self._sampler.batch(step, self._start, self._count))
                step += 1
        except BaseException as error:
            self._ready.put(error)
