"""Notices a step that never ends: a collective whose other side is gone, a disk that doesn't answer, a stuck kernel."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from nvfp4_train.errors import RecoveryGaveUp


class Watchdog:
    """Within `with`, ends the process with exit code 76 when `seconds` pass between two calls of `beat`, once `report` has
    been called with the sentence that says why and the file that holds every thread's stack.

    It watches from the first `beat` on (a first step compiles), and not between `pause` and the next `beat` (a validation
    takes what it takes). `seconds` None: it never does anything.
    """

    def __init__(
        self, seconds: float | None, stacks: Path, where: Callable[[], str], report: Callable[[str], None]
    ) -> None:
        self._seconds, self._stacks, self._where, self._report = seconds, stacks, where, report
        self._beat = threading.Event()
        self._watching = self._closing = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """A step has begun or ended."""
        self._watching = True
        self._beat.set()

    def pause(self) -> None:
        self._watching = False
        self._beat.set()

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._beat.set()

    def _watch(self) -> None:
        while not self._closing:
            if self._beat.wait(self._seconds):
                self._beat.clear()
            elif self._watching:
                self._end()

    def _end(self) -> None:
        text = f"{self._where()} has taken more than {self._seconds:g} s (recovery.hang_seconds)"
        try:
            self._stacks.parent.mkdir(exist_ok=True)
            with open(self._stacks, "w", encoding="utf-8") as f:
                faulthandler.dump_traceback(f, all_threads=True)
            text += f": {self._stacks} says where every thread stands; the same command goes on from the last checkpoint."
            self._report(text)
        finally:  # whatever goes wrong with the report
            os.write(2, f"Error: {text}\n".encode())
            os._exit(RecoveryGaveUp.exit_code)
