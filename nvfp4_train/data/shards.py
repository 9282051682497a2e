"""Token shards on disk: two files each, little-endian, with counts and checksums kept in the manifest.

train-00000.bin   16 bytes b"nvfp4tok", uint32 format version, uint32 bytes a token (2 or 4); then the tokens
train-00000.idx   16 bytes b"nvfp4idx", uint32 format version, uint32 bytes an entry (16); then for each document
                  int64 where it ends in the shard (tokens, its eos included) and int64 bytes of its text in UTF-8

A document's tokens end with eos, and documents never span two shards. Shards of a split follow each other.
"""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from nvfp4_train.errors import DataError

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 28  # a shard is closed by the document that takes it past this
TOKENS_MAGIC, INDEX_MAGIC = b"nvfp4tok", b"nvfp4idx"
HEADER_BYTES = 16
ENTRY_BYTES = 16
INDEX_BLOCK = 512  # entries that are read at once
_CHECKED = 1 << 20  # tokens or entries that are looked at together
_INDEX_DTYPE = np.dtype("<i8")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id: uint16 up to a vocabulary of 65,536, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def again(folder: Path) -> str:
    """The remedy for a damaged file of a prepared data set."""
    return f"restore it, or delete {folder} and prepare the data again"


def header(magic: bytes, item_bytes: int) -> bytes:
    return magic + struct.pack("<II", FORMAT_VERSION, item_bytes)


@dataclass(frozen=True)
class Shard:
    """A shard's entry in the manifest."""

    tokens_file: str
    index_file: str
    documents: int
    tokens: int  # eos included
    bytes: int  # of text
    tokens_sha256: str
    index_sha256: str


class SplitWriter:
    """Writes the shards of one split into `folder`, document by document. Nothing counts until `close` has returned."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self._folder, self._split = folder, split
        self._dtype = token_dtype(vocab_size)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._open: ShardWriter | None = None

    def append(self, tokens: np.ndarray, n_bytes: int) -> None:
        """Add a document: its token ids, eos last, and the bytes of its text."""
        if self._open is None:
            self._open = ShardWriter(self._folder, shard_name(self._split, len(self._shards)), self._dtype)
        self._open.write(tokens, np.array([len(tokens)]), np.array([n_bytes]))
        if self._open.tokens >= self._shard_tokens:
            self._finish()

    def close(self) -> dict[str, Any]:
        """Make everything durable; returns the split's entry in the manifest."""
        self._finish()
        return split_entry(self._shards)

    def abort(self) -> None:
        """Close the files as they are."""
        if self._open is not None:
            self._open.abort()

    def _finish(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.close())
            self._open = None


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}"


def split_entry(shards: Sequence[Shard]) -> dict[str, Any]:
    """A split's entry in the manifest."""
    total = {key: sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "bytes")}
    return {**total, "shards": [asdict(shard) for shard in shards]}


class ShardWriter:
    """Writes one shard, several documents at a time."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.documents = self.tokens = self.bytes = 0
        self._dtype = dtype
        self._tokens = HashedFile(folder / f"{name}.bin", header(TOKENS_MAGIC, dtype.itemsize))
        self._index = HashedFile(folder / f"{name}.idx", header(INDEX_MAGIC, ENTRY_BYTES))

    def write(self, tokens: np.ndarray, lengths: np.ndarray, n_bytes: np.ndarray) -> None:
        """Add documents: their tokens, one after the other, each one's number of tokens, and its bytes of text."""
        self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
        entries = np.stack([self.tokens + np.cumsum(lengths, dtype=np.int64), n_bytes], axis=1)
        self._index.write(entries.astype(_INDEX_DTYPE).tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.bytes += int(n_bytes.sum())

    def close(self) -> Shard:
        return Shard(
            tokens_file=self._tokens.path.name,
            index_file=self._index.path.name,
            documents=self.documents,
            tokens=self.tokens,
            bytes=self.bytes,
            tokens_sha256=self._tokens.close(),
            index_sha256=self._index.close(),
        )

    def abort(self) -> None:
        self._tokens.abort()
        self._index.abort()


class HashedFile:
    """A file that is hashed while it is written, in blocks of 1 MiB."""

    def __init__(self, path: Path, start: bytes = b"") -> None:
        self.path = path
        self._file: IO[bytes] = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close() or abort()
        self._hash = hashlib.sha256()
        self._waiting = bytearray(start)

    def write(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) >= 1 << 20:
            self._flush()

    def digest(self) -> bytes:
        """SHA-256 of what has been written so far."""
        self._flush()
        return self._hash.digest()

    def close(self) -> str:
        """Make it durable; returns the SHA-256 of all."""
        self._flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def abort(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        self._hash.update(self._waiting)
        done = 0
        while done < len(self._waiting):
            done += self._file.write(memoryview(self._waiting)[done:])
        self._waiting = bytearray()


class OpenFiles:
    """Files opened for reading, the last used ones kept open; threads may share it.

    Positioned reads, not memory maps: as fast from the page cache, and a disk that fails or a file that was cut
    raises an error with the file's name, where a map kills the process. Nor can a corpus have too many shards.
    """

    def __init__(self, limit: int = 256) -> None:
        # Whoever reads holds the file object: one that is dropped here is closed after the last read from it.
        self._open = lru_cache(limit)(lambda path: open(path, "rb", buffering=0))  # noqa: SIM115

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size). Raises DataError naming the file when they can't be read."""
        try:
            file = self._open(path)
            data = os.pread(file.fileno(), size, offset)
            while 0 < len(data) < size and (
                more := os.pread(file.fileno(), size - len(data), offset + len(data))
            ):
                data += more  # one read returns at most 2 GiB
        except OSError as error:
            raise DataError(
                f"{path} can't be read ({error.strerror}): {again(Path(path).parent)}."
            ) from error
        if len(data) < size:
            raise DataError(f"{path} was truncated while it was in use: {again(Path(path).parent)}.")
        return data


class ShardReader:
    """One shard of a prepared data set; only what is asked for is read."""

    def __init__(self, folder: Path, shard: Shard, vocab_size: int, files: OpenFiles | None = None) -> None:
        self.shard = shard
        # As text: a corpus may have 100,000 files, and joining paths takes longer than looking at them.
        self._tokens_path, self._index_path = f"{folder}/{shard.tokens_file}", f"{folder}/{shard.index_file}"
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._files = files or OpenFiles()

    @property
    def tokens_path(self) -> Path:
        return Path(self._tokens_path)

    @property
    def index_path(self) -> Path:
        return Path(self._index_path)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the shard as they are stored. Raises DataError for an id beyond the vocabulary."""
        size = self._dtype.itemsize
        data = self._files.read(self._tokens_path, HEADER_BYTES + size * start, size * (stop - start))
        tokens = np.frombuffer(data, self._dtype)
        if tokens.size and tokens.max() >= self._vocab_size:
            raise DataError(
                f"{self.tokens_path} is damaged (a token id of {tokens.max()}, the vocabulary has {self._vocab_size}): "
                f"{again(self.tokens_path.parent)}."
            )
        return tokens

    def document_spans(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents that have tokens in [start, stop) begin and end in the shard, int64.

        Raises DataError for an index that is out of order there.
        """
        # The block of the index that holds the first of them, found by the ends of the blocks before it.
        before = range((self.shard.documents - 1) // INDEX_BLOCK)
        block = bisect_right(before, start, key=lambda i: self._ends((i + 1) * INDEX_BLOCK - 1, 1)[0])
        at = block * INDEX_BLOCK
        parts = [self._ends(at - 1, 1) if at else np.zeros(1, np.int64)]
        while at < self.shard.documents and parts[-1][-1] < stop:
            parts.append(self._ends(at, min(INDEX_BLOCK, self.shard.documents - at)))
            at += len(parts[-1])
        borders = np.concatenate(parts)
        first = max(1, int(np.searchsorted(borders, start, side="right")))
        last = int(np.searchsorted(borders, stop, side="left"))
        borders = borders[first - 1 : last + 1]
        in_order = (borders[1:] > borders[:-1]).all()
        if not in_order or not borders[0] <= start < stop <= borders[-1] <= self.shard.tokens:
            raise self._wrong_index()
        return borders[:-1], borders[1:]

    def _ends(self, first: int, count: int) -> np.ndarray:
        """Where the documents [first, first + count) end in the shard, int64."""
        data = self._files.read(self._index_path, HEADER_BYTES + ENTRY_BYTES * first, ENTRY_BYTES * count)
        return np.frombuffer(data, _INDEX_DTYPE)[::2]

    def index(self) -> np.ndarray:
        """int64 [documents, 2], memory-mapped: where each document ends in the shard, and the bytes of its text."""
        return np.memmap(self.index_path, _INDEX_DTYPE, "r", HEADER_BYTES, (self.shard.documents, 2))

    @property
    def size(self) -> int:
        """Bytes of tokens and index."""
        return self.shard.tokens * self._dtype.itemsize + self.shard.documents * ENTRY_BYTES

    def check(self) -> None:
        """Sizes and headers. Raises DataError naming the file."""
        token_bytes = self._dtype.itemsize
        _check_file(self._tokens_path, TOKENS_MAGIC, token_bytes, self.shard.tokens)
        _check_file(self._index_path, INDEX_MAGIC, ENTRY_BYTES, self.shard.documents)

    def check_contents(self) -> None:
        """Every byte against the checksums, every id, every entry of the index. Raises DataError naming the file."""
        for path, expected in (
            (self.tokens_path, self.shard.tokens_sha256),
            (self.index_path, self.shard.index_sha256),
        ):
            with open(path, "rb") as f:
                if hashlib.file_digest(f, "sha256").hexdigest() != expected:
                    raise DataError(
                        f"{path} has changed since it was written (checksum): {again(path.parent)}."
                    )
        for start in range(0, self.shard.tokens, _CHECKED):
            self.read(start, min(start + _CHECKED, self.shard.tokens))
        index, before = self.index(), 0
        for start in range(0, self.shard.documents, _CHECKED):
            ends = index[start : start + _CHECKED, 0]
            if (np.diff(ends, prepend=before) <= 0).any():
                raise self._wrong_index()
            before = int(ends[-1])
        if before != self.shard.tokens:
            raise self._wrong_index()

    def _wrong_index(self) -> DataError:
        return DataError(
            f"{self.index_path} is wrong (its documents don't fill {self.shard.tokens} tokens): "
            f"{again(self.index_path.parent)}."
        )


def check_contents(folder: Path, shard: Shard, vocab_size: int) -> None:
    """`ShardReader.check_contents`, to be called in another process."""
    ShardReader(folder, shard, vocab_size).check_contents()


def _check_file(path: str, magic: bytes, item_bytes: int, items: int) -> None:
    expected = HEADER_BYTES + item_bytes * items
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            size, start = os.fstat(file).st_size, os.read(file, HEADER_BYTES)
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): {again(Path(path).parent)}.") from error
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise DataError(f"{path} is {state} ({size} bytes, not {expected}): {again(Path(path).parent)}.")
    if start != header(magic, item_bytes):
        raise DataError(f"{path} doesn't start like a shard of this format: {again(Path(path).parent)}.")
