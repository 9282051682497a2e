"""Pieces: finished parts of the encoding, kept until the shards are written.

A piece holds the documents of some 16 MiB of text in the order of the source:

    tokens    little-endian, uint16 or uint32 as in the shards; each document's end with eos
    entries   for each document its two hashes (the 128 bits that tell documents apart), tokens and bytes of text
    trailer   format, counts, whether it is its unit's last, SHA-256 of tokens and entries

A piece appears whole, by a rename. Its name is a hash of all that decides its content, so a later launch uses what it
finds, whoever made it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nvfp4_train.data.shards import HashedFile
from nvfp4_train.errors import DataError

FORMAT_VERSION = 1
ENTRY = np.dtype([("first", "<u8"), ("second", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
SLICE = 1 << 18  # documents that are looked at together
_MAGIC = b"nvfp4pce"
_TRAILER = struct.Struct("<8sIIQQQ32s32s")


class PieceWriter:
    """Writes one piece; nothing is seen at `path` until `close` has returned."""

    def __init__(self, path: Path, token_bytes: int) -> None:
        self._path, self._token_bytes = path, token_bytes
        self._temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        self._file = HashedFile(self._temporary)
        self._entries: list[np.ndarray] = []
        self._tokens = 0

    def append(self, tokens: np.ndarray, entries: np.ndarray) -> None:
        self._file.write(tokens.tobytes())
        self._tokens += len(tokens)
        self._entries.append(entries)

    def close(self, last: bool) -> None:
        """`last`: no further piece of this unit follows."""
        tokens_hash = self._file.digest()
        entries = np.concatenate([np.empty(0, ENTRY), *self._entries])
        data = entries.tobytes()
        self._file.write(data)
        self._file.write(
            _TRAILER.pack(
                _MAGIC, FORMAT_VERSION, self._token_bytes, len(entries), self._tokens, last,
                tokens_hash, hashlib.sha256(data).digest(),
            )
        )  # fmt: skip
        self._file.close()
        os.rename(self._temporary, self._path)

    def abort(self) -> None:
        self._file.abort()
        self._temporary.unlink(missing_ok=True)


class Piece:
    """A piece on disk. `is_whole` before anything else is used."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when there is none, DataError when its end isn't a piece's."""
        self.path = path
        size = path.stat().st_size
        with open(path, "rb") as f:
            f.seek(max(0, size - _TRAILER.size))
            end = f.read()
        if len(end) < _TRAILER.size:
            raise self._damaged()
        magic, version, token_bytes, self.documents, self.tokens, last, *hashes = _TRAILER.unpack(end)
        self.last = bool(last)
        self._dtype = np.dtype(f"<u{token_bytes}") if token_bytes in (2, 4) else None
        self._tokens_hash, self._entries_hash = hashes
        entries_at = token_bytes * self.tokens
        expected = entries_at + ENTRY.itemsize * self.documents + _TRAILER.size
        if (magic, version, size) != (_MAGIC, FORMAT_VERSION, expected) or self._dtype is None:
            raise self._damaged()

    def entries(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """ENTRY [stop - start], memory-mapped."""
        at = self._dtype.itemsize * self.tokens
        if not self.documents:
            return np.empty(0, ENTRY)
        return np.memmap(self.path, ENTRY, "r", at, (self.documents,))[start:stop]

    def slices(self) -> Iterator[tuple[int, np.ndarray]]:
        """The entries, SLICE at a time, with the number of the first."""
        for start in range(0, self.documents, SLICE):
            yield start, self.entries(start, min(start + SLICE, self.documents))

    def token_map(self) -> np.ndarray:
        """All tokens, memory-mapped."""
        if not self.tokens:
            return np.empty(0, self._dtype)
        return np.memmap(self.path, self._dtype, "r", 0, (self.tokens,))

    def check(self) -> None:
        """Every byte. Raises DataError when one has changed since it was written."""
        for expected, data in ((self._tokens_hash, self.token_map()), (self._entries_hash, self.entries())):
            if hashlib.sha256(data).digest() != expected:
                raise self._damaged()

    def _damaged(self) -> DataError:
        return DataError(f"{self.path} is damaged: delete it and start again; the rest is kept.")


def unit_pieces(folder: Path, key: str) -> tuple[list[Piece], bool]:
    """The pieces of a unit without a gap from the first on, and whether they are all."""
    pieces: list[Piece] = []
    while not pieces or not pieces[-1].last:
        try:
            pieces.append(Piece(piece_path(folder, key, len(pieces))))
        except FileNotFoundError:
            return pieces, False
    return pieces, True


def piece_path(folder: Path, key: str, number: int) -> Path:
    return folder / f"{key}-{number:05d}"
