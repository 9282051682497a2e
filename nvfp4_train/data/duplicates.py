"""Exact duplicates, found by hash, whatever their number, in bounded memory.

Every document's 128 bits of SHA-256 lie in its piece. They are dealt out to bucket files by the leading bits of one
half, so that equal documents meet in one bucket, and each bucket is sorted by itself: the first of equal documents in
the order of the source stays. So the result is the same for any number of parts, processes and restarts. Before they are
dealt out, repeats within a million documents are dropped, so that no bucket grows with one document's copies. In
memory are about 2^20 documents at a time; on disk, meanwhile, 24 bytes a document and a flag.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nvfp4_train.data.pieces import Piece

CHUNK = 1 << 20  # documents in memory
_HASHED = np.dtype([("first", "<u8"), ("second", "<u8"), ("number", "<u8")])


def mark_duplicates(pieces: Sequence[Piece], flags: Path, chunk: int = CHUNK) -> int:
    """Write a byte a document to `flags`, in order: 1 where an equal one comes before. Returns how many there are."""
    documents = sum(piece.documents for piece in pieces)
    if not documents:
        flags.touch()
        return 0
    marks = np.memmap(flags, np.uint8, "w+", shape=(documents,))
    buckets = -(-documents // chunk)
    found = 0
    folder = flags.with_name(f"{flags.name}.buckets")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for hashed in _chunks(pieces, chunk):
        hashed, repeats = _first_of_each(hashed)
        marks[repeats] = 1
        found += len(repeats)
        if buckets == 1:
            break
        bucket = hashed["second"] // np.uint64((1 << 64) // buckets + 1)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(buckets + 1))
        for i in np.flatnonzero(np.diff(bounds)):
            with open(folder / str(i), "ab") as f:
                hashed[order[bounds[i] : bounds[i + 1]]].tofile(f)
    for path in folder.iterdir():
        _, repeats = _first_of_each(np.fromfile(path, _HASHED))
        marks[repeats] = 1
        found += len(repeats)
    shutil.rmtree(folder)
    marks.flush()
    return found


def _first_of_each(hashed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One of each document, that with the smallest number, and the numbers of the others."""
    ordered = hashed[np.lexsort((hashed["number"], hashed["second"], hashed["first"]))]
    repeats = np.zeros(len(ordered), bool)
    repeats[1:] = (ordered["first"][1:] == ordered["first"][:-1]) & (
        ordered["second"][1:] == ordered["second"][:-1]
    )
    return ordered[~repeats], ordered["number"][repeats]


def _chunks(pieces: Sequence[Piece], chunk: int) -> Iterator[np.ndarray]:
    waiting: list[np.ndarray] = []
    count = number = 0
    for piece in pieces:
        for _, entries in piece.slices():
            for at in range(0, len(entries), chunk):
                some = entries[at : at + chunk]
                if count + len(some) > chunk:
                    yield np.concatenate(waiting)
                    waiting, count = [], 0
                hashed = np.empty(len(some), _HASHED)
                hashed["first"], hashed["second"] = some["first"], some["second"]
                hashed["number"] = np.arange(number, number + len(some))
                waiting.append(hashed)
                count, number = count + len(some), number + len(some)
    yield np.concatenate(waiting)
