"""SIGTERM and SIGINT as a request to save and stop."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

from nvfp4_train.errors import StoppedBySignal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within `with`, the first SIGTERM or SIGINT sets a flag that the trainer looks at once a step.

    A SIGINT after that aborts at once, in the middle of whatever runs: its default action is restored, because a
    Python handler would wait for a long C++ call (a compilation) to end. Checkpoints are published whole or not at
    all, so that loses only the steps since the last one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        self._previous = {s: signal.signal(s, self._handle) for s in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.signal is not None

    def check(self, doing: str) -> None:
        """During start-up, where there is nothing to save: raise StoppedBySignal if a signal came."""
        if self.signal is not None:
            raise StoppedBySignal(
                f"stopped by {self.signal.name} {doing}; nothing had to be saved: run the same command to go on"
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        note = " (Ctrl-C again aborts at once)" if number == signal.SIGINT else ""
        # os.write: sys.stderr's buffer may be in the middle of a write that this handler interrupts
        os.write(2, f"\n{self.signal.name}: stopping as soon as the state is saved{note}\n".encode())
