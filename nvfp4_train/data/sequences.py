"""Which tokens of a split's stream a sequence holds: the stream cut into equal parts, or whole documents packed.

The stream is the documents in order, each followed by eos. A sequence is some spans of it [start, stop); it predicts
their tokens, each from the one before it in the stream (so a document's first token from the eos before it).
Both ways a sequence is found from its number alone, whatever the number of documents, and every sequence belongs to
an epoch once. See docs/architecture.md for why documents are packed in groups.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from nvfp4_train.data.dataset import Dataset
from nvfp4_train.errors import DataError

GROUP = 32  # sequences that documents are packed into together
_CACHED_GROUPS = 64


class StreamSequences:
    """Sequence k is the span [k S, (k + 1) S), S = seq_len; the rest at the end, shorter than S, is left out."""

    def __init__(self, dataset: Dataset, split: str, seq_len: int) -> None:
        """Raises DataError when the split is shorter than one sequence."""
        self.count = dataset.n_tokens(split) // seq_len
        self._seq_len = seq_len
        if not self.count:
            raise DataError(
                f"{dataset.path} has {dataset.n_tokens(split)} tokens to train on, less than one sequence of "
                f"training.seq_len={seq_len}: give more text, shorten the sequence, or set data.packing=documents."
            )

    def spans(self, number: int) -> list[tuple[int, int]]:
        return [(number * self._seq_len, (number + 1) * self._seq_len)]


class DocumentSequences:
    """Documents are kept whole where they fit, and every token is in one sequence.

    Group g holds the documents that begin in the stream's tokens [g T, (g + 1) T), T = GROUP x S - (S - 1): at most
    GROUP x S tokens, as the last one reaches at most S - 1 beyond; so they fit into GROUP sequences, the number of a
    sequence says its group, and 1 / GROUP of the places stay empty. A document longer than S counts as several of S
    tokens. The last group takes the rest of the stream too, where by itself no document might begin.
    """

    def __init__(self, dataset: Dataset, split: str, seq_len: int) -> None:
        """Raises DataError for a split without tokens."""
        total = dataset.n_tokens(split)
        if not total:
            raise DataError(f"{dataset.path} has no tokens to train on: give more text.")
        self._dataset, self._split, self._seq_len = dataset, split, seq_len
        self._group_tokens = GROUP * seq_len - (seq_len - 1)
        self._last = max(0, total // self._group_tokens - 1)
        self.count = self._last * GROUP + -(-(total - self._last * self._group_tokens) // seq_len)
        self._pack = lru_cache(_CACHED_GROUPS)(self._pack_group)

    def spans(self, number: int) -> list[tuple[int, int]]:
        group = min(number // GROUP, self._last)
        return self._pack(group)[number - group * GROUP]

    def _pack_group(self, group: int) -> list[list[tuple[int, int]]]:
        start, stop, bins = group * self._group_tokens, (group + 1) * self._group_tokens, GROUP
        if group == self._last:
            stop, bins = self._dataset.n_tokens(self._split), self.count - group * GROUP
        return pack(*self._documents(start, stop), bins, self._seq_len)

    def _documents(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents that begin in [start, stop) begin and end, those longer than S in parts."""
        starts, ends = self._dataset.document_spans(self._split, start, stop)
        parts = -(-(ends - starts) // self._seq_len)
        first = np.repeat(np.cumsum(parts) - parts, parts)
        begins = np.repeat(starts, parts) + (np.arange(parts.sum()) - first) * self._seq_len
        ends = np.minimum(begins + self._seq_len, np.repeat(ends, parts))
        here = (begins >= start) & (begins < stop)
        return begins[here], ends[here]


def pack(starts: np.ndarray, ends: np.ndarray, bins: int, size: int) -> list[list[tuple[int, int]]]:
    """The spans [start, end), none longer than `size`, in `bins` sequences of at most `size` tokens, in stream order.

    The longest first, each into the emptiest sequence (Graham's LPT rule), so that all are filled alike. A span that
    finds no room whole is cut, and so is the longest where there are fewer spans than bins: none stays empty.
    There must be at least `bins` and at most `bins` x `size` tokens.
    """
    order = np.argsort(starts - ends, kind="stable")
    spans = list(zip(starts[order].tolist(), ends[order].tolist(), strict=True))
    while len(spans) < bins:
        start, end = spans.pop(0)
        halves = [(start, (start + end) // 2), ((start + end) // 2, end)]
        spans = sorted([*spans, *halves], key=lambda span: span[0] - span[1])
    heap = [(0, place) for place in range(bins)]
    out: list[list[tuple[int, int]]] = [[] for _ in range(bins)]
    homeless = []
    for start, end in spans:
        used, place = heap[0]
        if used + end - start > size:
            homeless.append((start, end))
            continue
        out[place].append((start, end))
        heapq.heapreplace(heap, (used + end - start, place))
    for start, end in homeless:
        while start < end:
            used, place = heap[0]
            cut = min(end, start + size - used)
            out[place].append((start, cut))
            heapq.heapreplace(heap, (used + cut - start, place))
            start = cut
    return [sorted(spans) for spans in out]
