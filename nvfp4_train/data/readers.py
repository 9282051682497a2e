"""From one opened file to blocks of documents, in order and in bounded memory.

A block is about 1 MiB of consecutive documents as they lie in the file, parsed no further than needed to cut it off:
cheap to make in one process, and what the workers parse and encode in others.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from nvfp4_train.errors import DataError

BLOCK_BYTES = 1 << 20
ROW_BYTES = 64  # what a row costs beside its text, so that a block of tiny rows is bounded too
MAX_LINE = 1 << 26  # bytes of a JSONL line, which can only be parsed whole
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    name: str  # file, line or row it came from, for messages
    text: str
    data: bytes  # text in UTF-8


@dataclass(frozen=True)
class Block:
    """Consecutive documents of one file, or a part of one (kind "text": `data` is the whole document's)."""

    kind: str  # text | jsonl | rows
    name: str  # relative to the source
    path: str  # for messages
    first: int  # number of the first line (from 1) or row (from 0)
    offset: int  # of its first byte in the (decompressed) file; 0 for rows
    text_key: str
    data: bytes | list[bytes]

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return sum(map(len, self.data)) + ROW_BYTES * len(self.data)

    def documents(self) -> Iterator[Document]:
        """The documents that hold text. Raises DataError for bytes that aren't UTF-8, broken JSON, a missing field."""
        if self.kind == "jsonl":
            yield from self._lines()
        elif self.kind == "rows":
            for row, data in enumerate(self.data, start=self.first):
                if data:
                    place = f" row {row}"
                    yield Document(self.name + place, _decode(data, self.path, 0, place), data)
        elif self.data:
            yield Document(self.name, _decode(self.data, self.path, self.offset), self.data)

    def _lines(self) -> Iterator[Document]:
        offset = self.offset
        for number, line in enumerate(io.BytesIO(self.data), start=self.first):
            if line.strip():
                text = _text_of(line, offset, self.text_key, self.path, number)
                if text:
                    where = f"{self.path} line {number}"
                    yield Document(f"{self.name} line {number}", text, encode_text(text, where))
            offset += len(line)


def _text_of(line: bytes, offset: int, key: str, path: str, number: int) -> str:
    where = f"{path} line {number}"
    try:
        record = json.loads(_decode(line, path, offset))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({first_line(error)}): repair or remove it.") from error
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        fields = ", ".join(sorted(record)[:8]) if isinstance(record, dict) else "none"
        raise DataError(
            f'{where} has no field "{key}" that holds text (fields: {fields}): name the text\'s field with '
            "data.text_key."
        )
    return record[key]


def read_blocks(
    name: str, path: str, raw: IO[bytes], part_bytes: int, text_key: str
) -> Iterator[tuple[Block, int]]:
    """The blocks of the opened file `raw`, each with the bytes of `raw` that are behind it.

    `name` decides the kind and the compression; text files are cut into parts of at most `part_bytes`. Raises
    DataError for broken compression or parquet and lines above 64 MiB, OSError for what can't be read.
    """
    if name.endswith(".parquet"):
        yield from _parquet(name, path, raw, text_key)
        return
    try:
        stream = _decompressed(name, raw)
        if name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
            blocks = _jsonl(name, path, stream, text_key)
        else:
            blocks = _text(name, path, stream, part_bytes)
        for block in blocks:
            yield block, raw.tell()
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is truncated or damaged ({first_line(error)}): restore or remove it."
        ) from error


def _decompressed(name: str, raw: IO[bytes]) -> IO[bytes]:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if name.endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw), 1 << 17)
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a .zst file of one or more frames; a frame cut short raises EOFError.

    zstandard's own stream reader takes the end of a truncated file for the end of the text.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._file = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")
        self._unused = b""  # of what was read, the start of the next frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._unused or self._file.read(1 << 16)
            if self._frame.eof:
                if not compressed:
                    return 0
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            elif not compressed:
                raise EOFError("the file ends inside a frame")
            self._ready = memoryview(self._frame.decompress(compressed))
            self._unused = self._frame.unused_data
        n = min(len(buffer), len(self._ready))
        buffer[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n


def _read(stream: IO[bytes], n: int) -> bytes:
    """The next `n` bytes, fewer at the end.

    In small steps, since a buffer of `n` bytes that a small file fills a little of stays a memory mapping of its own, and
    a process may only have some 65,000 of those.
    """
    parts = []
    while n and (part := stream.read(min(n, 1 << 16))):
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _text(name: str, path: str, stream: IO[bytes], part_bytes: int) -> Iterator[Block]:
    rest, offset, part = b"", 0, 0
    while True:
        block = rest + _read(stream, part_bytes + 1 - len(rest))
        whole = len(block) <= part_bytes
        cut = len(block) if whole else _cut(block, part_bytes)
        part_name = name if whole and not part else f"{name} part {part}"
        yield Block("text", part_name, path, 0, offset, "", block[:cut])
        if whole:
            return
        rest, offset, part = block[cut:], offset + cut, part + 1


def _cut(block: bytes, limit: int) -> int:
    """Where to end a part of at most `limit` bytes: after its last newline, else between two characters."""
    cut = block.rfind(b"\n", 0, limit) + 1
    if not cut:
        cut = limit
        while limit - cut < 3 and block[cut] & 0xC0 == 0x80:
            cut -= 1
    return cut


def _jsonl(name: str, path: str, stream: IO[bytes], text_key: str) -> Iterator[Block]:
    """Whole lines. A byte order mark, which some tools write before the first, is no part of it."""
    start = stream.read(len(BOM))
    offset = len(BOM) if start == BOM else 0
    rest, number, more = b"" if offset else start, 1, True
    while more:
        chunk = _read(stream, BLOCK_BYTES)
        more = bool(chunk)
        cut = chunk.rfind(b"\n") + 1 if more else 0
        if len(rest) + (cut or len(chunk)) > MAX_LINE + BLOCK_BYTES:
            raise DataError(
                f"{path} line {number} is longer than {MAX_LINE >> 20} MiB: split its document, or give it as a .txt "
                "file, which is cut at line ends."
            )
        if more and not cut:
            rest += chunk
            continue
        lines = rest + chunk[:cut]
        rest = chunk[cut:]
        if lines:
            yield Block("jsonl", name, path, number, offset, text_key, lines)
        number, offset = number + lines.count(b"\n"), offset + len(lines)


def _parquet(name: str, path: str, raw: IO[bytes], text_key: str) -> Iterator[tuple[Block, int]]:
    import pyarrow as pa  # half a second to import, and few need it
    import pyarrow.parquet as pq

    def position() -> int:
        return size * row // max(1, table.metadata.num_rows)

    try:
        size = raw.seek(0, os.SEEK_END)
        raw.seek(0)
        # Pages are read as they are needed; by default whole column chunks would be held.
        with pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False) as table:
            kind = next((f.type for f in table.schema_arrow if f.name == text_key), None)
            if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                names = ", ".join(table.schema_arrow.names[:8])
                raise DataError(
                    f'{path} has no column "{text_key}" of strings (columns: {names}): name the text\'s column with '
                    "data.text_key."
                )
            row, rows, n_bytes = 0, [], 0
            for batch in table.iter_batches(batch_size=64, columns=[text_key]):
                for value in batch.column(0):
                    if not value.is_valid:
                        raise DataError(
                            f'{path} row {row} has null in the column "{text_key}": remove the row, or set it to "".'
                        )
                    rows.append(value.as_buffer().to_pybytes())
                    n_bytes += len(rows[-1]) + ROW_BYTES
                    row += 1
                if n_bytes >= BLOCK_BYTES:
                    yield Block("rows", name, path, row - len(rows), 0, text_key, rows), position()
                    rows, n_bytes = [], 0
            if rows:
                yield Block("rows", name, path, row - len(rows), 0, text_key, rows), position()
    except pa.ArrowException as error:
        raise DataError(
            f"{path} is truncated or no parquet file ({first_line(error)}): restore or remove it."
        ) from error


def encode_text(text: str, where: str) -> bytes:
    """`text` in UTF-8. Raises DataError naming `where` for half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}, character {error.start}), "
            "which is no text: repair or remove it."
        ) from error


def _decode(data: bytes, path: str, offset: int, place: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{path}{place} is not UTF-8 (byte 0x{data[error.start]:02x} at offset {at}): convert it, for example "
            f"with iconv -f latin1 -t utf8, or remove it."
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to stand inside a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
