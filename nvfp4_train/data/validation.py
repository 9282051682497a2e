"""The held-out text, every token of it exactly once, with the bytes it stands for.

Bits a byte = (sum of negative log-likelihoods / ln 2) / (sum of bytes). The likelihood counts every token of the
stream, so also each document's eos: a model that doesn't know where a document ends pays for it. The bytes count text
alone, so eos stands for none, and over the whole split they are exactly the UTF-8 bytes of the held-out documents.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nvfp4_train.data.batch import Batch, window_batch
from nvfp4_train.data.dataset import Dataset


def iterate_valid(
    dataset: Dataset,
    seq_len: int,
    batch_size: int,
    max_tokens: int | None = None,
    reset_state_at_documents: bool = False,
) -> Iterator[tuple[Batch, int]]:
    """Batches [batch_size, seq_len] over the first `max_tokens` (None: all) held-out tokens, each a target once.

    The first token is predicted from an eos before it. The last batch is filled up with eos, which its mask leaves
    out; the mask of a full batch is None. The int is the UTF-8 bytes that the batch's targets stand for.
    """
    total = dataset.n_tokens("valid")
    total = total if max_tokens is None else min(total, int(max_tokens))
    eos = dataset.tokenizer.eos_id
    per_batch = batch_size * seq_len
    for start in range(0, total, per_batch):
        stream = _window(dataset, start, min(start + per_batch, total))
        n = len(stream) - 1
        n_bytes = int(dataset.tokenizer.byte_lengths[stream[1:]].sum())
        stream = np.concatenate([stream, np.full(per_batch - n, eos)])
        windows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
        mask = None if n == per_batch else np.arange(per_batch).reshape(batch_size, seq_len) < n
        yield window_batch(windows, eos, reset_state_at_documents, mask), n_bytes


def _window(dataset: Dataset, start: int, stop: int) -> np.ndarray:
    """Tokens [start - 1, stop) of the held-out stream, int64; an eos stands before its first token."""
    if start:
        return dataset.tokens("valid", start - 1, stop)
    return np.concatenate([[dataset.tokenizer.eos_id], dataset.tokens("valid", 0, stop)])
