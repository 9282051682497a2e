"""The baselines of a data set's held-out text, measured beside the encoding or afterwards: the numbers are the same.

xz needs half a second a megabyte and cannot be shared between processes. So what the rules hold out is compressed in a
thread while the rest is encoded. Where that turns out not to be the final held-out text (a launch that found finished
pieces, duplicates that were dropped, a document held out for want of others), it is read again from the shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nvfp4_train.data.baselines import MAX_BYTES, Baselines
from nvfp4_train.data.encode import Rules
from nvfp4_train.data.merge import Selection
from nvfp4_train.data.pieces import Piece
from nvfp4_train.data.shards import Shard, ShardReader
from nvfp4_train.data.tokenizer import Tokenizer


class HeldOutText:
    """Fed what is encoded, in order; holds at most the baselines' 64 MiB."""

    def __init__(self, tokenizer: Tokenizer, rules: Rules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self._baselines, self._thread = Baselines(), ThreadPoolExecutor(1)
        self._seen, self._bytes = hashlib.sha256(), 0

    def add(self, tokens: np.ndarray, entries: np.ndarray) -> None:
        """Documents as they lie in a piece."""
        ends = np.cumsum(entries["tokens"], dtype=np.int64)
        for i in np.flatnonzero(self._rules.masks(entries["first"], entries["second"])["valid"]):
            if self._bytes >= MAX_BYTES:
                return
            self._seen.update(entries[i].tobytes())
            self._bytes += int(entries[i]["bytes"])
            document = tokens[ends[i] - entries[i]["tokens"] : ends[i]].tolist()
            self._thread.submit(self._baselines.add, self._tokenizer.decode_bytes(document))

    def close(self) -> None:
        """Leave out what still waits: a process that ends with an error must not first compress it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def baselines(
        self, pieces: Sequence[Piece], selection: Selection, folder: Path, shards: Sequence[dict]
    ) -> dict[str, float | int]:
        """Of the held-out text that `selection` takes from `pieces`, which is that of `shards` in `folder`."""
        self._thread.shutdown()
        if self._seen.digest() == _digest(pieces, selection):
            return self._baselines.finish()
        baselines = Baselines()
        for data in _texts(folder, shards, self._tokenizer):
            baselines.add(data)
            if baselines.full:
                break
        return baselines.finish()


def _digest(pieces: Sequence[Piece], selection: Selection) -> bytes:
    seen, n_bytes, number = hashlib.sha256(), 0, 0
    for piece in pieces:
        for start, entries in piece.slices():
            chosen = entries[selection.masks(entries, number + start)["valid"]]
            for entry in chosen:
                if n_bytes >= MAX_BYTES:
                    return seen.digest()
                seen.update(entry.tobytes())
                n_bytes += int(entry["bytes"])
        number += piece.documents
    return seen.digest()


def _texts(folder: Path, shards: Sequence[dict], tokenizer: Tokenizer) -> Iterator[bytes]:
    """The documents, which their tokens give back exactly."""
    for shard in shards:
        reader, start = ShardReader(folder, Shard(**shard), tokenizer.vocab_size), 0
        for end, _ in reader.index():
            yield tokenizer.decode_bytes(reader.read(start, end).tolist())
            start = end
