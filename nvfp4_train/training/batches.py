"""The batch of each step: the sampler's, past what recovery has stepped over, read again where reading fails."""

from __future__ import annotations

import time
from typing import Protocol

from nvfp4_train.data.batch import Batch
from nvfp4_train.errors import RecoveryGaveUp, UserError
from nvfp4_train.training.faults import Faults
from nvfp4_train.training.history import History


class Source(Protocol):
    """What `Batches` needs of a sampler."""

    def batch(self, step: int, start: int = 0, count: int | None = None) -> Batch: ...


class Batches:
    """A sampler for the loader: its batch of step s is a pure function of s and the history of rewinds.

    Reading that fails with an OSError (a network disk's hiccup) is tried `retries` times again, after 1, 2, 4 ... seconds;
    then it raises RecoveryGaveUp, and UserError where nothing is to be tried again.
    """

    def __init__(self, sampler: Source, history: History, faults: Faults, retries: int) -> None:
        self._sampler, self._history, self._faults, self._retries = sampler, history, faults, retries

    def batch(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """As `Sampler.batch`; `step` counts from 0."""
        number = self._history.batch(step + 1)
        for attempt in range(self._retries + 1):
            try:
                self._faults.check_readable(number)
                batch = self._sampler.batch(number, start, count)
                break
            except OSError as error:
                if not self._retries:
                    raise UserError(
                        f"batch {number} of step {step + 1} could not be read ({error}): repair the disk that holds the "
                        "data, then run the same command to go on."
                    ) from error
                if attempt == self._retries:
                    gave_up = RecoveryGaveUp(
                        f"batch {number} of step {step + 1} could not be read in {attempt + 1} attempts ({error}): repair "
                        "the disk that holds the data, then run the same command to go on."
                    )
                    gave_up.of_all_ranks = False  # it is this rank's disk
                    raise gave_up from error
                time.sleep(2.0**attempt)
        return self._faults.poison(number, start, batch)
