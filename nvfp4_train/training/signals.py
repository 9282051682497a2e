"""SIGTERM and SIGINT as a request to save and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import NoReturn

import psutil

from nvfp4_train.errors import StoppedBySignal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_START_GRACE = 3.0  # seconds that start-up has to unwind in Python before the process is ended


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Within `with`, SIGTERM or SIGINT ends the process at once with exit code 75.

    For the seconds of imports and checks in which nothing is open yet; C code that is being loaded need not bear an
    exception of a handler. `StopRequest` takes over within it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _end(number)

    previous = {s: signal.signal(s, end) for s in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(number: int) -> NoReturn:
    os.write(2, f"Error: {_NOTHING.format(signal.Signals(number).name)}\n".encode())
    os._exit(StoppedBySignal.exit_code)


class _Unwind(BaseException):
    """Raised by the handler in the middle of anything, so no `except Exception` on the way may take it for its own."""


class StopRequest:
    """Within `with`, what the first SIGTERM or SIGINT does.

    Until `defer` is called there is nothing to save: the main thread unwinds from wherever it is, and `with` raises
    StoppedBySignal. If it doesn't come back from a C++ call (a tokenizer's training, a compilation, a collective) within
    seconds, a watching thread ends the process with the same exit code. Further signals change nothing (launchers send
    several): this process ends already.

    After `defer` it sets a flag that the trainer looks at once a step. A SIGINT after that aborts at once, in the middle
    of whatever runs: its default action is restored, because a Python handler would wait for a long C++ call. Checkpoints
    are published whole or not at all, so that loses only the steps since the last one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.last_words: Callable[[], None] = lambda: (
            None
        )  # called once this process is to end without saving
        self._deferred = False
        self._left = threading.Event()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        self._wakeup = os.pipe()
        os.set_blocking(self._wakeup[1], False)
        self._previous_fd = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        self._previous = {s: signal.signal(s, self._handle) for s in _SIGNALS}
        threading.Thread(target=self._watch, args=(self._wakeup[0],), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._left.set()
        os.close(self._wakeup[1])  # the watching thread reads the end and closes the other side
        if kind is _Unwind:
            raise StoppedBySignal(_NOTHING.format(self.signal.name)) from None

    def __bool__(self) -> bool:
        return self.signal is not None

    def defer(self) -> None:
        """From here on there is something to save: a signal waits for the trainer."""
        self._deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if not self._deferred:
            for further in _SIGNALS:
                signal.signal(further, signal.SIG_IGN)
            raise _Unwind
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        note = " (Ctrl-C again aborts at once)" if number == signal.SIGINT else ""
        # os.write: sys.stderr's buffer may be in the middle of a write that this handler interrupts
        os.write(2, f"\n{self.signal.name}: stopping as soon as the state is saved{note}\n".encode())

    def _watch(self, wakeup: int) -> None:
        while number := os.read(wakeup, 1):
            if number[0] not in _SIGNALS or self._deferred or self._left.wait(_START_GRACE) or self._deferred:
                continue
            self.last_words()
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            _end(number[0])
        os.close(wakeup)


_NOTHING = "stopped by {} before the first step; nothing had to be saved: run the same command to go on"
