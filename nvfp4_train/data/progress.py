"""How far a long pass over text is: share, MB, MB/s and time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from nvfp4_train.units import duration

Report = Callable[[str], None]
_SECONDS = 2.0
_WIDTH = 20


class ProgressLine(str):
    """A line that the next one of its kind replaces, where lines can be replaced."""


class Progress:
    """Reports at most every two seconds."""

    def __init__(self, what: str, total: int, report: Report) -> None:
        """`total`: bytes on disk, 0 where unknown."""
        self._what, self._total, self._report = what, total, report
        self._start = self._last = time.monotonic()

    def __call__(self, done: int, text_bytes: int) -> None:
        """`done` of `total` are behind, and with them `text_bytes` of text (more, where they are compressed)."""
        now = time.monotonic()
        if now - self._last < _SECONDS:
            return
        self._last = now
        seconds = now - self._start
        share = min(1.0, done / self._total) if self._total else 0.0
        rate = f"{text_bytes / 1e6:,.0f} MB of text, {text_bytes / 1e6 / seconds:.1f} MB/s"
        if not share:
            self._report(ProgressLine(f"{self._what}: {rate}"))
            return
        bar = "#" * round(_WIDTH * share)
        left = duration(seconds / share - seconds)
        self._report(ProgressLine(f"{self._what} [{bar:.<{_WIDTH}}] {share:4.0%}: {rate}, {left} left"))

    def finish(self, text_bytes: int) -> None:
        seconds = time.monotonic() - self._start
        if seconds >= _SECONDS:
            rate = text_bytes / 1e6 / seconds
            self._report(
                f"{self._what}: {text_bytes / 1e6:,.0f} MB of text in {duration(seconds)}, {rate:.1f} MB/s"
            )
