"""What a person sees of a run, and console.log.

In a terminal the newest step is one line that updates in place, with everything else above it; elsewhere steps
are plain lines, ever fewer as the run goes on. console.log gets the plain lines, each with its time (UTC).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from nvfp4_train import units
from nvfp4_train.errors import ConfigError

MODES = ("auto", "bar", "lines")
_LEAST_CELLS, _MOST_CELLS = 10, 30
_REDRAW_SECONDS = 0.2
_WINDOW = 20  # records over which the pace for the ETA is measured
_YELLOW_BOLD, _BOLD, _RESET = "\x1b[33;1m", "\x1b[1m", "\x1b[0m"


class Console:
    """Prints to `stream` (standard output) and appends the same, without control characters, to `log_path`.

    Any thread may print. Output that is gone (a closed pipe) or a log that cannot be written (full disk) never
    raises: the other of the two goes on.
    """

    def __init__(
        self, log_path: str | Path | None, mode: str = "auto", stream: IO[str] | None = None
    ) -> None:
        """`mode`: "bar", "lines", or "auto": a bar where `stream` is a terminal. Raises ConfigError for another."""
        if mode not in MODES:
            raise ConfigError(f"logging.console={mode!r} is unknown: choose {', '.join(MODES)}.")
        self._stream: IO[str] | None = sys.stdout if stream is None else stream
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = terminal if mode == "auto" else mode == "bar"
        self._color = terminal and not os.environ.get("NO_COLOR")
        self._cells = _bar_characters(self._stream)
        self._log = _open_log(log_path)
        self._lock = threading.Lock()
        self._status = ""  # the line that updates, as it stands in the terminal
        self._drawn = -_REDRAW_SECONDS
        self._progress = _Progress()
        if self._log is not None and self._log.tell():
            self._write_log(f"--- new launch, process {os.getpid()} ---")

    def info(self, text: str) -> None:
        """Print `text`, one line or several."""
        self._print(text)

    def warning(self, text: str) -> None:
        """Print `text` so that it stands out."""
        self._print(f"WARNING  {text}", _YELLOW_BOLD)

    def header(self, title: str, rows: list[tuple[str, str]]) -> None:
        """A title over aligned names and values."""
        self._print(title, _BOLD)
        if rows:
            self._print(units.table(rows))

    def step(self, record: Mapping[str, Any], total_steps: int, total_tokens: float) -> None:
        """Show the newest step: a record of metrics.jsonl (step, tokens, loss, lr, grad_norm, clip_threshold,
        tokens_per_second) of a run of `total_steps` steps and `total_tokens` tokens."""
        now = time.monotonic()
        eta = self._progress.update(record, total_steps, total_tokens, now)
        parts = _step_parts(record, total_steps, eta)
        last = record["step"] >= total_steps
        with self._lock:
            if self._progress.line_is_due(now) or last:
                line = "  ".join(parts.values())
                self._write_log(line)
                if not self._bar:
                    self._write(line + "\n")
            if self._bar and (now - self._drawn >= _REDRAW_SECONDS or last):
                self._drawn = now
                self._clear()
                self._draw(self._gauge(record["step"] / total_steps, parts))
            if last:
                self._leave_status()

    def close(self) -> None:
        """Leave the last progress line standing and close the log."""
        with self._lock:
            self._leave_status()
            if self._log is not None:
                self._log.close()
                self._log = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, text: str, color: str = "") -> None:
        text = units.printable(text)
        with self._lock:
            self._write_log(text)
            status = self._status
            self._clear()
            self._write(f"{color}{text}{_RESET}\n" if color and self._color else f"{text}\n")
            self._draw(status)

    def _draw(self, status: str) -> None:
        if status:
            self._status = status[: shutil.get_terminal_size().columns - 1]
            self._write(self._status)

    def _clear(self) -> None:
        if self._status:
            self._write("\r" + " " * len(self._status) + "\r")
            self._status = ""

    def _leave_status(self) -> None:
        if self._status:
            self._write("\n")
            self._status = ""

    def _gauge(self, share: float, parts: dict[str, str]) -> str:
        """A bar in the room that the parts leave; in a narrow terminal without those that matter least."""
        parts = dict(parts)
        room = shutil.get_terminal_size().columns - 1
        for name in ("lr", "grad_norm"):
            if len("  ".join(parts.values())) + 2 + _LEAST_CELLS > room:
                parts.pop(name, None)
        line = "  ".join(parts.values())
        cells = max(0, min(_MOST_CELLS, room - len(line) - 2))
        full, empty = self._cells
        done = round(cells * min(share, 1.0))
        return f"{full * done + empty * (cells - done)}  {line}"

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError):  # a closed pipe or terminal
            self._stream = None
            # Python flushes standard output when it exits, and would end with an error there.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        try:
            self._log.write("".join(f"{stamp}  {line}".rstrip() + "\n" for line in text.split("\n")))
        except OSError as error:
            self._log = None
            self._write(f"WARNING  console.log is no longer written ({error.strerror})\n")


class _Progress:
    """The pace of this launch, and when a plain line is due."""

    def __init__(self) -> None:
        self._records: deque[tuple[float, int]] = deque(maxlen=_WINDOW)  # time, step
        self._started: float | None = None
        self._last_line = 0.0

    def update(
        self, record: Mapping[str, Any], total_steps: int, total_tokens: float, now: float
    ) -> float | None:
        """Seconds to go, validation and checkpoints included; None where nothing tells."""
        if self._started is None:
            self._started, self._last_line = now, now - 3600.0
        self._records.append((now, record["step"]))
        (first_time, first_step), (last_time, last_step) = self._records[0], self._records[-1]
        if last_step > first_step and last_time > first_time:
            return (total_steps - last_step) * (last_time - first_time) / (last_step - first_step)
        rate = record.get("tokens_per_second")
        return (total_tokens - record["tokens"]) / rate if rate else None

    def line_is_due(self, now: float) -> bool:
        """Every 15 s at first, every minute after 20 minutes."""
        interval = min(60.0, max(15.0, (now - self._started) / 20.0))
        if now - self._last_line < interval:
            return False
        self._last_line = now
        return True


def _step_parts(record: Mapping[str, Any], total_steps: int, eta: float | None) -> dict[str, str]:
    """The pieces of a step's line, by key."""
    step = record["step"]
    parts = {
        "share": f"{100 * step / total_steps:3.0f}%",
        "step": f"{step:>{len(str(total_steps))}}/{total_steps}",
        "loss": f"loss {record['loss']:.4f}",
    }
    if "lr" in record:
        parts["lr"] = f"lr {record['lr']:.2e}"
    if "grad_norm" in record:
        clip = f" (clip {record['clip_threshold']:.3g})" if "clip_threshold" in record else ""
        parts["grad_norm"] = f"grad {record['grad_norm']:.3f}{clip}"
    if record.get("tokens_per_second"):
        parts["rate"] = units.rate(record["tokens_per_second"])
    if eta is not None and step < total_steps:
        parts["eta"] = f"eta {units.duration(math.ceil(eta))}"
    return parts


def _bar_characters(stream: IO[str]) -> tuple[str, str]:
    try:
        "━─".encode(getattr(stream, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return "#", "-"
    return "━", "─"


def _open_log(path: str | Path | None) -> IO[str] | None:
    """Open `path` for appending; what a kill left of a last line ends there."""
    if path is None:
        return None
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115 - until close()
    if log.tell():
        with open(path, "rb") as f:
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":
                log.write("\n")
    return log
