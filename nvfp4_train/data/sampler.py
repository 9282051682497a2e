"""Which sequences a training step sees.

A step takes the next `global_batch_size` places of the run. `mixture.Draw` says from which corpus each is drawn, and
how many sequences of that corpus came before; these walk through the corpus's sequences (`sequences`) in a random
order, which is another in every epoch. All of it is computed from the numbers of the step and the place, so any step
can be asked for, in any order, by any number of processes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from nvfp4_train.config.schema import HELD_OUT
from nvfp4_train.data.batch import Batch, read_batch
from nvfp4_train.data.corpora import Corpora
from nvfp4_train.data.dataset import Dataset
from nvfp4_train.data.mixture import Draw
from nvfp4_train.data.permutation import permute
from nvfp4_train.data.sequences import DocumentSequences, StreamSequences
from nvfp4_train.errors import DataError

PACKINGS = {"stream": StreamSequences, "documents": DocumentSequences}
SPLIT = "train"
_BLOCK = 1024  # places located in one go: as cheap as a few


class Sampler:
    """The global batch of each step: a pure function of the data sets, the arguments here, and the step."""

    def __init__(
        self,
        data: Corpora | Dataset,
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        reset_state_at_documents: bool = False,
    ) -> None:
        """Raises DataError for a corpus that is trained on and too small for a sequence."""
        corpora = data if isinstance(data, Corpora) else Corpora({HELD_OUT: data})
        self.seq_len, self.global_batch_size, self.seed = seq_len, global_batch_size, seed
        self.reset_state_at_documents = reset_state_at_documents
        self._draw = Draw(corpora.segments, global_batch_size, seed)
        packing = PACKINGS[corpora.packing]
        # A corpus of steps long past may be gone: it counts in the mixture, but can't be read.
        self._datasets = [corpora.datasets.get(name) for name in self._draw.names]
        self._sequences = [
            packing(dataset, SPLIT, seq_len) if dataset else None for dataset in self._datasets
        ]
        self._counts = np.array([s.count if s else 1 for s in self._sequences], dtype=np.uint64)
        self._gone = {i for i, dataset in enumerate(self._datasets) if dataset is None}
        self._eos_id = corpora.tokenizer.eos_id
        self._block = lru_cache(8)(self._locate_block)

    @property
    def n_sequences(self) -> dict[str, int]:
        """Sequences of an epoch, by corpus."""
        return dict(zip(self._draw.names, self._counts.tolist(), strict=True))

    def sequences(
        self, step: int, start: int = 0, count: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the sequences [start, start + count) of the global batch of `step` (from 0): the numbers of their corpora in
        `n_sequences` (int64), their epochs and their numbers in the corpus (uint64), each [count].

        count None: all from `start` on.
        """
        count = self.global_batch_size - start if count is None else count
        if step < 0 or start < 0 or count < 0 or start + count > self.global_batch_size:
            raise ValueError(
                f"sequences [{start}, {start + count}) of step {step} are not in the global batch"
            )
        first = step * self.global_batch_size + start
        blocks = range(first // _BLOCK, -(-(first + count) // _BLOCK))
        located = [self._block(block) for block in blocks]
        here = slice(first % _BLOCK, first % _BLOCK + count)
        corpora, epochs, numbers = (np.concatenate(parts)[here] for parts in zip(*located, strict=True))
        return corpora, epochs, numbers

    def spans(
        self, step: int, start: int = 0, count: int | None = None
    ) -> list[tuple[Dataset, list[tuple[int, int]]]]:
        """Where these sequences lie: the data set of each and its spans of that one's stream.

        Raises DataError for a step that was drawn from a corpus that data.corpora no longer has.
        """
        corpora, _, numbers = self.sequences(step, start, count)
        for corpus in self._gone.intersection(corpora.tolist()):
            name = self._draw.names[corpus]
            raise DataError(
                f"step {step} was drawn from {name}: give data.corpora.{name} back to read it again."
            )
        return [
            (self._datasets[corpus], self._sequences[corpus].spans(number))
            for corpus, number in zip(corpora.tolist(), numbers.tolist(), strict=True)
        ]

    def batch(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """Sequences [start, start + count) of the global batch of `step`: tokens and targets int64 [count, seq_len].

        Raises DataError for damaged files, and as `spans`.
        """
        rows = self.spans(step, start, count)
        return read_batch(rows, SPLIT, self.seq_len, self._eos_id, self.reset_state_at_documents)

    def _locate_block(self, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        corpora, index = self._draw.places(block * _BLOCK, _BLOCK)
        sizes = self._counts[corpora]
        epochs, index = np.divmod(index, sizes)
        return corpora, epochs, permute(index, sizes, self.seed, epochs)
