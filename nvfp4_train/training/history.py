"""What recovery has decided so far: the rewinds of a run, and what follows from them for every step.

Which data a step sees, by how much its learning rate is reduced and which layers run in BF16 are pure functions of the step
and this list. So nothing else has to be kept in step, and a run that was killed in the middle of a recovery and goes on
from any older checkpoint takes the same way.

The list is in every checkpoint, and in `recovery.json` of the run folder before a rewind begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvfp4_train.atomic import write_text
from nvfp4_train.errors import CheckpointError

FORMAT = "nvfp4_train.recovery"
FORMAT_VERSION = 1
JOURNAL = "recovery.json"


@dataclass(frozen=True)
class Rewind:
    """One rewind. Steps are counted from 1, batches from 0: step s sees batch s - 1 where nothing is stepped over."""

    reason: str
    onset: int  # the first step that stood out
    found: int  # the step after which that was decided; steps back_to + 1 to found are abandoned
    back_to: int  # the step whose state the run goes on from
    skip: tuple[int, int] | None  # the first and the last batch that is stepped over
    careful_until: int  # the last step with ...
    lr_factor: float = 1.0  # ... the learning rate times this and ...
    bf16: tuple[str, ...] = ()  # ... these linear layers in BF16


@dataclass(frozen=True)
class History:
    """The rewinds so far, oldest first."""

    rewinds: tuple[Rewind, ...] = ()

    def with_(self, rewind: Rewind) -> History:
        return History((*self.rewinds, rewind))

    def batch(self, step: int) -> int:
        """The number of the batch that step `step` (from 1) sees: the step-th that no rewind has stepped over."""
        batch = step - 1
        for first, last in _merged([r.skip for r in self.rewinds if r.skip]):
            if batch < first:
                break
            batch += last + 1 - first
        return batch

    def lr_factor(self, step: int) -> float:
        rewind = self._careful(step)
        return rewind.lr_factor if rewind else 1.0

    def bf16(self, step: int) -> tuple[str, ...]:
        """Names of the linear layers that run in BF16 in `step`, beyond those of the recipe."""
        rewind = self._careful(step)
        return rewind.bf16 if rewind else ()

    def came_by(self, step: int) -> bool:
        """Whether the run has been at `step` before and was rewound."""
        return any(r.back_to < step <= r.found for r in self.rewinds)

    def attempts(self, step: int, forget_after: int) -> int:
        """Rewinds of the stretch of trouble that a spike found after `step` belongs to."""
        count = 0
        for rewind in reversed(self.rewinds):
            if step - rewind.found > forget_after:
                break
            count, step = count + 1, rewind.found
        return count

    def abandoned(self, step: int, known: int) -> bool:
        """Whether a state of `step` that knows of the first `known` rewinds lies on a way that a later one has left."""
        return any(step > rewind.back_to for rewind in self.rewinds[known:])

    def state(self) -> list[dict[str, Any]]:
        """As JSON; `from_state` is the inverse."""
        return [asdict(rewind) for rewind in self.rewinds]

    @staticmethod
    def from_state(state: Sequence[dict[str, Any]]) -> History:
        rewinds = []
        for fields in state:
            skip = fields["skip"] and tuple(fields["skip"])
            rewinds.append(Rewind(**(fields | {"skip": skip, "bf16": tuple(fields["bf16"])})))
        return History(tuple(rewinds))

    def write(self, folder: Path) -> None:
        """Replace the journal in the run folder, whole or not at all."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, "rewinds": self.state()}
        write_text(folder / JOURNAL, json.dumps(content, indent=1) + "\n")

    def _careful(self, step: int) -> Rewind | None:
        newest = None
        for rewind in self.rewinds:
            if rewind.back_to < step:
                newest = rewind
        return newest if newest and step <= newest.careful_until else None


def read_journal(folder: Path) -> History:
    """The run folder's journal; without one, no rewinds. Raises CheckpointError when it is damaged or of a newer program."""
    path = folder / JOURNAL
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        if content["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {content['format_version']}, this program reads up to {FORMAT_VERSION}: update the "
                "program."
            )
        return History.from_state(content["rewinds"])
    except FileNotFoundError:
        return History()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({' '.join(str(error).split())}): restore it, or delete it to go on with the rewinds that "
            "the newest checkpoint knows."
        ) from None


def forget_journal(folder: Path) -> History:
    """Delete the journal of a run that is started over; returns the history that is left, an empty one."""
    (folder / JOURNAL).unlink(missing_ok=True)
    return History()


def _merged(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint windows in order, from any."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
