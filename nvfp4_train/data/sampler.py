"""Which sequences a training step sees, and the loader that reads them ahead of time.

The stream of a split (documents in order, each followed by eos) is cut into N = tokens // seq_len sequences;
sequence k predicts the tokens [k * seq_len, (k + 1) * seq_len), and the rest at the end, shorter than a sequence, is
left out. Steps take sequences one after the other from a random order of all N, which is another in every epoch.
"""

from __future__ import annotations

import numpy as np

from nvfp4_train.data.batch import Batch, make_batch, window
from nvfp4_train.data.dataset import Dataset
from nvfp4_train.data.permutation import permute
from nvfp4_train.errors import DataError


class Sampler:
    """The global batch of each step: a pure function of the data set, the arguments here, and the step."""

    def __init__(
        self,
        dataset: Dataset,
        split: str = "train",
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        reset_state_at_documents: bool = False,
    ) -> None:
        """Raises DataError when the split is shorter than one sequence."""
        self.dataset, self.split = dataset, split
        self.seq_len, self.global_batch_size, self.seed = seq_len, global_batch_size, seed
        self.reset_state_at_documents = reset_state_at_documents
        self.n_sequences = dataset.n_tokens(split) // seq_len
        if not self.n_sequences:
            raise DataError(
                f"{dataset.path} has {dataset.n_tokens(split)} tokens to train on, less than one sequence of "
                f"training.seq_len={seq_len}: give more text, or shorten the sequence."
            )

    def sequences(self, step: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """Numbers of the sequences [start, start + count) of the global batch of `step` (from 0), uint64 [count].

        count None: all from `start` on.
        """
        count = self.global_batch_size - start if count is None else count
        if step < 0 or start < 0 or count < 0 or start + count > self.global_batch_size:
            raise ValueError(
                f"sequences [{start}, {start + count}) of step {step} are not in the global batch"
            )
        places = np.uint64(step * self.global_batch_size + start) + np.arange(count, dtype=np.uint64)
        epoch, index = np.divmod(places, np.uint64(self.n_sequences))
        return permute(index, self.n_sequences, self.seed, epoch)

    def batch(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """Sequences [start, start + count) of the global batch of `step`: tokens and targets int64 [count, seq_len]."""
        windows = np.stack(
            [
                window(self.dataset, self.split, k * self.seq_len, (k + 1) * self.seq_len)
                for k in self.sequences(step, start, count).tolist()
            ]
        )
        return make_batch(windows, self.dataset.tokenizer.eos_id, self.reset_state_at_documents)
