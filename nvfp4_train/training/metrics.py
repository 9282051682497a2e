"""metrics.jsonl: one JSON object a line, appended in the order things happened.

A step's record has the keys `step tokens loss grad_norm ...`; anything else that happens is a record with an
`event` key. A record without a `step` belongs to the step of the record before it.

Numbers survive exactly: Python writes the shortest decimal that reads back as the same float64, and every
float32 is a float64. JSON has no NaN or infinity, so these three are written as the strings "NaN",
"Infinity" and "-Infinity" (valid JSON for any reader), and `read_metrics` turns them back into floats.

A line counts once its newline is on disk. What a kill or a full disk leaves after the last newline is
ignored by the reader and cut off by the next writer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.atomic import atomic_open
from nvfp4_train.errors import CheckpointError, UserError

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _encode(value: Any) -> Any:
    """`value` with each non-finite float replaced by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {k: _decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_decode(v) for v in value]
    return value


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(raw line, record) for each line that ends in a newline. Raises CheckpointError for a line that isn't
    a JSON object: an append-only file breaks at its end alone, so such a file was edited or damaged."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise CheckpointError(
                    f"Line {number} of {path} is not a JSON object: the file is damaged; "
                    "delete that line, or move the file away to start a new one."
                )
            yield line, record


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All records of a metrics file, oldest first; an unfinished last line is ignored, a missing file is empty.

    Raises CheckpointError if any other line is damaged.
    """
    path = Path(path)
    return [_decode(record) for _, record in _whole_lines(path)] if path.exists() else []


def truncate_after(path: str | Path, step: int, moved_to: Path | None = None) -> int:
    """Drop every record of a step beyond `step`, atomically; returns how many were dropped.

    With `moved_to` they are written to that file first. Called before a writer opens the file (a writer that is open
    would go on in the replaced file).
    """
    path = Path(path)
    if not path.exists():
        return 0
    keep, dropped, current = [], [], 0
    for line, record in _whole_lines(path):
        current = record.get("step", current)
        (keep if current <= step else dropped).append(line)
    for lines, target in ((dropped, moved_to), (keep, path)):
        if target is not None:
            target.parent.mkdir(exist_ok=True)
            with atomic_open(target, "wb") as f:
                f.writelines(lines)
    return len(dropped)


class MetricsWriter:
    """Appends records to `path`; each batch is one write that other processes can read at once.

    Raises UserError when the disk refuses (full, gone): a run whose metrics are lost cannot be resumed exactly.
    """

    def __init__(self, path: str | Path | None):
        """`path` None writes nowhere: of several ranks the first alone keeps the file."""
        self.path = Path(path or os.devnull)
        if path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self.path)
        self._open()

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append `records` as one batch."""
        lines = "".join(json.dumps(_encode(r), allow_nan=False) + "\n" for r in records)
        data = memoryview(lines.encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as e:
            raise UserError(
                f"Cannot write {self.path} ({e.strerror}): free space or repair the disk, "
                "then start the same command again to resume."
            ) from e

    def event(self, name: str, **fields: Any) -> None:
        """Append {"event": name, **fields}; give `step` so that a resume knows where it belongs."""
        self.write([{"event": name, **fields}])

    def rewind(self, step: int, moved_to: Path) -> None:
        """Take the records of steps beyond `step` out, into the file `moved_to`, and go on after what is left."""
        self.close()
        truncate_after(self.path, step, moved_to)
        self._open()

    def sync(self) -> None:
        """Make all that was written durable; called before a checkpoint is published."""
        if str(self.path) != os.devnull:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_torn_line(path: Path, block: int = 1 << 16) -> None:
    """Cut what stands after the last newline."""
    if not path.exists():
        return
    with open(path, "r+b") as f:
        size = end = f.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - block)
            f.seek(start)
            newline = f.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            f.truncate(end)


class DeviceMetrics:
    """Keeps each step's scalars on the device until `read` brings all steps over in one transfer.

    `add` launches a small copy and never waits for the device, so a step costs no synchronisation.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[dict[str, Any], dict[str, torch.dtype], Tensor]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, host: Mapping[str, Any], device: Mapping[str, Tensor]) -> None:
        """One step: `host` values known already (step, tokens, lr) and `device` scalar tensors, all on one device.

        The tensors are copied, so the caller may overwrite them in place. fp64 carries fp32 and integers
        up to 2^53 exactly.
        """
        scalars = [t.detach().reshape(()).to(torch.float64) for t in device.values()]
        packed = torch.stack(scalars) if scalars else torch.empty(0, dtype=torch.float64)
        self._pending.append((dict(host), {k: t.dtype for k, t in device.items()}, packed))

    def read(self) -> list[dict[str, Any]]:
        """Records of all steps since the last call, oldest first. Waits for the device once."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        values = iter(torch.cat([packed for _, _, packed in pending]).tolist())
        records = []
        for host, dtypes, _ in pending:
            record = dict(host)
            for name, dtype in dtypes.items():
                value = next(values)
                if dtype == torch.bool:
                    value = bool(value)
                elif not dtype.is_floating_point:
                    value = int(value)
                record[name] = value
            records.append(record)
        return records
