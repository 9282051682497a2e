"""What a model is fed: tokens, the tokens to predict, and where documents begin."""

from __future__ import annotations

from collections.abc import Sequence
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

    def pin_memory(self) -> Batch:
        """In page-locked memory, from which `to` copies to a GPU while it computes."""
        return Batch(*(None if t is None else t.pin_memory() for t in self._tensors()))

    def cu_seqlens(self) -> Tensor:
        """Where the documents begin in the flattened [B x S] tokens, then B x S: int32 [documents + 1].

        As attention kernels for packed documents take it; a sequence's end ends a document too. Waits for the device.
        """
        count, length = self.tokens.shape
        starts = torch.ones(count, length, dtype=torch.bool, device=self.tokens.device)
        starts[:, 1:] = False if self.seq_idx is None else self.seq_idx.diff(dim=1) != 0
        total = torch.tensor([count * length], device=starts.device)
        return torch.cat([starts.flatten().nonzero()[:, 0], total]).to(torch.int32)

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.tokens, self.targets, self.mask, self.seq_idx


def read_batch(
    rows: Sequence[tuple[Dataset, Sequence[tuple[int, int]]]],
    split: str,
    seq_len: int,
    eos_id: int,
    reset_state_at_documents: bool,
) -> Batch:
    """A batch with, in each row, the spans [start, stop) of a data set's stream one after the other.

    What they leave free at the end is filled with eos, which the mask leaves out. A document begins at the eos before
    it, which is its first input, and where a span begins.
    """
    tokens = np.full((len(rows), seq_len), eos_id, dtype=np.int64)
    targets = tokens.copy()
    starts = np.zeros(tokens.shape, dtype=bool)
    lengths = np.empty(len(rows), dtype=np.int64)
    for row, (dataset, spans) in enumerate(rows):
        at = 0
        for start, stop in spans:
            text = dataset.raw_tokens(split, start - 1, stop)
            end = at + stop - start
            tokens[row, at:end], targets[row, at:end] = text[:-1], text[1:]
            starts[row, at] = True
            at = end
        starts[row, at : at + 1] = True
        lengths[row] = at
    mask = np.arange(seq_len) < lengths[:, None] if (lengths < seq_len).any() else None
    if reset_state_at_documents:
        starts |= (tokens == eos_id) if mask is None else (tokens == eos_id) & mask
    return _batch(tokens, targets, mask, starts if reset_state_at_documents else None)


def window_batch(
    windows: np.ndarray, eos_id: int, reset_state_at_documents: bool, mask: np.ndarray | None = None
) -> Batch:
    """A batch of `windows` int64 [B, S + 1] of a split's stream, documents beginning as in `read_batch`."""
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    return _batch(tokens, targets, mask, tokens == eos_id if reset_state_at_documents else None)


def _batch(
    tokens: np.ndarray, targets: np.ndarray, mask: np.ndarray | None, starts: np.ndarray | None
) -> Batch:
    seq_idx = None
    if starts is not None:
        starts[:, 0] = False
        seq_idx = torch.from_numpy(np.cumsum(starts, axis=1, dtype=np.int32))
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        mask=None if mask is None else torch.from_numpy(mask),
        seq_idx=seq_idx,
    )
