"""What a model is fed: tokens, the tokens to predict, and where documents begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvfp4_train.data.dataset import Dataset


@dataclass(frozen=True)
class Batch:
    """B sequences of S tokens. targets[:, i] is the token that follows tokens[:, i]."""

    tokens: Tensor  # int64 [B, S]
    targets: Tensor  # int64 [B, S]
    mask: Tensor | None = None  # bool [B, S]: which targets count; None: all
    seq_idx: Tensor | None = None  # int32 [B, S]: the document's number in the sequence; None: no resets

    def rows(self, start: int, stop: int) -> Batch:
        """Sequences [start, stop), such as a micro-batch."""
        return Batch(*(None if t is None else t[start:stop] for t in self._tensors()))

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(None if t is None else t.to(device, non_blocking=True) for t in self._tensors()))

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.tokens, self.targets, self.mask, self.seq_idx


def make_batch(
    windows: np.ndarray, eos_id: int, reset_state_at_documents: bool, mask: np.ndarray | None = None
) -> Batch:
    """A batch of `windows` int64 [B, S + 1] of a split's stream.

    The eos before a document is its first input: it belongs to the document that follows, which begins there.
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    seq_idx = None
    if reset_state_at_documents:
        starts = tokens == eos_id
        starts[:, 0] = False
        seq_idx = torch.from_numpy(np.cumsum(starts, axis=1, dtype=np.int32))
    return Batch(
        tokens=torch.from_numpy(tokens.copy()),
        targets=torch.from_numpy(targets.copy()),
        mask=None if mask is None else torch.from_numpy(mask),
        seq_idx=seq_idx,
    )


def window(dataset: Dataset, split: str, start: int, stop: int) -> np.ndarray:
    """Tokens [start - 1, stop) of the stream, int64; an eos stands before its first token."""
    if start:
        return dataset.tokens(split, start - 1, stop)
    return np.concatenate([[dataset.tokenizer.eos_id], dataset.tokens(split, 0, stop)])
