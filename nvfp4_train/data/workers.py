"""Functions called in other processes, results in order.

Each worker is a Python process of its own that reads pickled calls from a pipe. So it ends by itself when the process that
started it is gone, however that ended; nothing of the caller's main module is imported in it, and no thread or lock
is inherited. With one worker the calls are made here.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nvfp4_train.errors import UserError

AHEAD = 3  # calls waiting, a worker


class Workers:
    """`n` processes, started when they are first needed. Close it (or use `with`) to end them."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._pool = ThreadPoolExecutor(n) if n > 1 else None
        self._idle: queue.SimpleQueue[subprocess.Popen | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen] = []
        for _ in range(n):
            self._idle.put(None)  # not started

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def map(self, function: Callable[..., Any], calls: Iterable[tuple]) -> Iterator[Any]:
        """`function(*call)` for each of `calls`, in order, read a few ahead. `function` is a module's, by name.

        Raises what `function` raised, and UserError when a worker was killed.
        """
        if self._pool is None:
            yield from (function(*call) for call in calls)
            return
        waiting: deque = deque()
        try:
            for call in calls:
                waiting.append(self._pool.submit(self._call, function, call))
                if len(waiting) > AHEAD * self._n:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        if self._pool is not None:
            self._pool.shutdown()  # its threads' reads have ended with the processes
        for process in self._processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def _call(self, function: Callable[..., Any], call: tuple) -> Any:
        process = self._idle.get() or self._start()
        try:
            pickle.dump((function, call), process.stdin, protocol=5)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as broken:
            raise UserError(
                f"A worker process ended (exit code {process.wait()}; -9: killed, perhaps for want of memory): start "
                "again, with workers=... set to fewer; what is finished is kept."
            ) from broken
        finally:
            self._idle.put(process)
        if error is not None:
            raise error
        return result

    def _start(self) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._processes.append(process)
        return process


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    gc.disable()  # the calls leave no cycles behind
    calls = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the results
    while True:
        try:
            function, call = pickle.load(calls)
        except EOFError:
            return
        try:
            answer = function(*call), None
        except Exception as error:
            answer = None, error
        try:
            pickle.dump(answer, results, protocol=5)
            results.flush()
        except BrokenPipeError:
            os._exit(0)


if __name__ == "__main__":
    _serve()
