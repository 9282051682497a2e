"""Where text comes from: a stream of documents, one at a time, in an order that never changes.

A source is one of
- "stdlib": the running interpreter's own standard library, every .py file but those in folders of tests (many
  distributions leave them out, and some hold broken or non-UTF-8 source on purpose), of site-packages, and those
  generated when Python was built. Exact duplicates are dropped.
- a file, or a folder searched to any depth; hidden names (".git") and other kinds of file are passed over:

  .txt .md .py     one document a file (a file above 16 MiB is cut at line ends into parts of that size)
  .jsonl           one document a line, the field "text"
  .parquet         one document a row, the column "text"

  .txt .md .py and .jsonl also as .gz or .zst. A source that is a single text file is cut at line ends into
  documents of about 64 KiB, so that some can be held out.

Text is taken as it is, byte for byte; empty documents are passed over. Memory holds one document at a time.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from nvfp4_train.errors import DataError

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSIONS = ("", ".gz", ".zst")
TEXT_NAMES = tuple(suffix + compression for suffix in TEXT_SUFFIXES for compression in COMPRESSIONS)
SUFFIXES = (*TEXT_NAMES, *(".jsonl" + compression for compression in COMPRESSIONS), ".parquet")
MAX_PART = 1 << 24  # bytes a document, of a text file in a folder
SINGLE_FILE_PART = 1 << 16  # bytes a document, of a source that is one text file
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_GENERATED = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class Document:
    name: str  # file, line or row it came from, for messages
    text: str
    data: bytes  # text in UTF-8


@dataclass(frozen=True)
class SourceFile:
    name: str  # relative to the source, with "/"
    path: Path
    size: int  # bytes on disk
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """The files of a source, in order."""

    name: str  # for people: "stdlib (Python 3.11.7)" or the path
    files: tuple[SourceFile, ...]
    drop_duplicates: bool
    part_bytes: int

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)

    def fingerprint(self) -> list[list[Any]]:
        """Changes when any file's name, size or modification time does; nothing is read."""
        return [[file.name, file.size, file.mtime_ns] for file in self.files]

    def documents(self) -> Iterator[tuple[Document, int]]:
        """Every document with the bytes on disk of the files that are behind it (for progress).

        Raises DataError for text that isn't UTF-8, broken compression or JSON, a missing field, an unreadable file.
        """
        seen: set[bytes] = set()
        done = 0
        for file in self.files:
            for document in _read(file, self.part_bytes):
                if not document.data:
                    continue
                if self.drop_duplicates:
                    digest = hashlib.sha256(document.data).digest()
                    if digest in seen:
                        continue
                    seen.add(digest)
                yield document, done
            done += file.size


def find_source(source: str) -> Source:
    """The source that `data.source` names. Raises DataError when there is none, or no text in it."""
    if source == STDLIB:
        return _stdlib()
    root = Path(source).expanduser()
    if not root.exists():
        raise DataError(
            f"data.source={source} doesn't exist: give a file or folder of text ({' '.join(SUFFIXES)}), or "
            "data.source=stdlib for the text that Python itself brings."
        )
    root = root.resolve()
    candidates = [root] if root.is_file() else _walk(root)
    paths = [path for path in candidates if path.name.endswith(SUFFIXES)]
    if not paths:
        raise DataError(
            f"data.source={source} holds no text that can be read: give {' '.join(SUFFIXES)} files."
        )
    files = _stat(paths, root.parent if root.is_file() else root)
    part_bytes = SINGLE_FILE_PART if root.is_file() and root.name.endswith(TEXT_NAMES) else MAX_PART
    return Source(str(root), files, drop_duplicates=False, part_bytes=part_bytes)


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in _walk(root, _STDLIB_LEFT_OUT)
        if path.suffix == ".py" and not path.relative_to(root).parts[0].startswith(_GENERATED)
    ]
    if not paths:
        raise DataError(
            f"data.source=stdlib: this Python has no library source in {root}; give a folder of text instead."
        )
    name = f"stdlib (Python {platform.python_version()})"
    return Source(name, _stat(paths, root), drop_duplicates=True, part_bytes=MAX_PART)


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [
            n for n in folders if not n.startswith(".") and n != "__pycache__" and n not in left_out
        ]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        # Pipes and sockets would be waited for; a broken link stays, to be told by its name.
        yield from (path for path in paths if path.is_file() or path.is_symlink())


def _stat(paths: list[Path], base: Path) -> tuple[SourceFile, ...]:
    files = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        files.append(SourceFile(path.relative_to(base).as_posix(), path, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(files, key=lambda file: file.name))


def _read(file: SourceFile, part_bytes: int) -> Iterator[Document]:
    path = file.path
    try:
        if path.suffix == ".parquet":
            yield from _parquet(file)
        else:
            kind = _jsonl if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl") else _text
            with _open(path) as stream:
                yield from kind(file, stream, part_bytes)
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is truncated or damaged ({_first_line(error)}): restore or remove it."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdReader(path), 1 << 17)
    return open(path, "rb")


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a .zst file of one or more frames; a frame cut short raises EOFError.

    zstandard's own stream reader takes the end of a truncated file for the end of the text.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        unused = b""
        while not self._ready:
            compressed = unused or self._file.read(1 << 16)
            if self._frame.eof:
                if not compressed:
                    return 0
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            elif not compressed:
                raise EOFError("the file ends inside a frame")
            self._ready = memoryview(self._frame.decompress(compressed))
            unused = self._frame.unused_data
            if unused:
                self._file.seek(-len(unused), os.SEEK_CUR)
                unused = b""
        n = min(len(buffer), len(self._ready))
        buffer[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def _text(file: SourceFile, stream: IO[bytes], part_bytes: int) -> Iterator[Document]:
    rest, offset, part = b"", 0, 0
    while True:
        block = rest + stream.read(part_bytes + 1 - len(rest))
        whole = len(block) <= part_bytes
        cut = len(block) if whole else _cut(block, part_bytes)
        name = file.name if whole and not part else f"{file.name} part {part}"
        yield Document(name, _decode(block[:cut], file.path, offset), block[:cut])
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


def _jsonl(file: SourceFile, stream: IO[bytes], part_bytes: int) -> Iterator[Document]:
    offset = 0
    for number, line in enumerate(stream, start=1):
        if line.strip():
            where = f"{file.path} line {number}"
            try:
                record = json.loads(_decode(line, file.path, offset))
            except ValueError as error:
                raise DataError(
                    f"{where} is not JSON ({_first_line(error)}): repair or remove it."
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                fields = ", ".join(sorted(record)[:8]) if isinstance(record, dict) else "none"
                raise DataError(
                    f'{where} has no field "text" that holds text (fields: {fields}): name the text\'s field so.'
                )
            yield _document(f"{file.name} line {number}", record["text"], where)
        offset += len(line)


def _parquet(file: SourceFile) -> Iterator[Document]:
    import pyarrow as pa  # half a second to import, and few need it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as table:
            kind = next((f.type for f in table.schema_arrow if f.name == "text"), None)
            if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                names = ", ".join(table.schema_arrow.names[:8])
                raise DataError(
                    f'{file.path} has no column "text" of strings (columns: {names}): name the text\'s column so.'
                )
            row = 0
            for batch in table.iter_batches(batch_size=64, columns=["text"]):
                for value in batch.column(0):
                    where = f"{file.path} row {row}"
                    if not value.is_valid:
                        raise DataError(
                            f'{where} has null in the column "text": remove the row, or set it to "".'
                        )
                    data = value.as_buffer().to_pybytes()
                    yield Document(f"{file.name} row {row}", _decode(data, file.path, 0, f" row {row}"), data)
                    row += 1
    except pa.ArrowException as error:
        raise DataError(
            f"{file.path} is truncated or no parquet file ({_first_line(error)}): restore or remove it."
        ) from error


def _document(name: str, text: str, where: str) -> Document:
    try:
        return Document(name, text, text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}, character {error.start}), "
            "which is no text: repair or remove it."
        ) from error


def _decode(data: bytes, path: Path, offset: int, place: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{path}{place} is not UTF-8 (byte 0x{data[error.start]:02x} at offset {at}): convert it, for example "
            f"with iconv -f latin1 -t utf8, or remove it."
        ) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} can't be read ({error.strerror or _first_line(error)}): make it readable or remove it."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
