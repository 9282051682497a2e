"""Where text comes from: documents in an order that never changes, in units that can be read independently.

A source (`data.source`) is one of
- "stdlib": the running interpreter's own standard library, every .py file but those in folders of tests (many
  distributions leave them out, and some hold broken or non-UTF-8 source on purpose), of site-packages, and those
  generated when Python was built. Exact duplicates are dropped.
- a file, a folder searched to any depth, or a glob ("/data/*/part-*.jsonl.zst", "**" for any depth), local or behind
  an fsspec URL ("s3://bucket/folder"). Hidden names (".git") and other kinds of file are passed over:

  .txt .md .py     one document a file (a file above 16 MiB is cut at line ends into parts of that size)
  .jsonl           one document a line, the field data.text_key
  .parquet         one document a row, the column data.text_key

  .txt .md .py and .jsonl also as .gz or .zst. A source that is a single text file is cut at line ends into
  documents of about 64 KiB, so that some can be held out.
- "hf:NAME" or "hf:FOLDER": a Hugging Face data set (nvfp4_train/data/huggingface.py).

Text is taken as it is, byte for byte; empty documents are passed over. Memory holds a block of documents at a time,
and some 300 bytes a file.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data.readers import Block, Document, first_line, read_blocks
from nvfp4_train.errors import DataError

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSIONS = ("", ".gz", ".zst")
TEXT_NAMES = tuple(suffix + compression for suffix in TEXT_SUFFIXES for compression in COMPRESSIONS)
SUFFIXES = (*TEXT_NAMES, *(".jsonl" + compression for compression in COMPRESSIONS), ".parquet")
MAX_PART = 1 << 24  # bytes a document, of a text file in a folder
SINGLE_FILE_PART = 1 << 16  # bytes a document, of a source that is one text file
UNIT_BYTES = 1 << 26  # on disk: small files are put together to units of this size
_FILE_COST = 1 << 12  # bytes of reading that opening a file is counted for
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_GENERATED = ("config-", "_sysconfigdata")


class Unit(Protocol):
    """A part of a source that is read by itself, from its start; units follow each other."""

    @property
    def size(self) -> int:
        """Bytes on disk, 0 where unknown."""

    def fingerprint(self) -> list[Any]:
        """Changes when the unit's text may have; nothing is read."""

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Its blocks in order, each with the bytes of `size` that are behind it. Raises DataError."""


@dataclass(frozen=True)
class Source:
    name: str  # for people: "stdlib (Python 3.11.7)" or the path
    units: tuple[Unit, ...]
    drop_duplicates: bool = False

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(unit.size for unit in self.units)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for unit in self.units:
            digest.update(repr(unit.fingerprint()).encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[tuple[Document, int]]:
        """Every document with the bytes on disk that are behind it; with `drop_duplicates`, 32 bytes are kept for each.

        Raises DataError for text that isn't UTF-8, broken compression or JSON, a missing field, an unreadable file.
        """
        seen: set[bytes] = set()
        done = 0
        for unit in self.units:
            for block, position in unit.blocks():
                for document in block.documents():
                    if self.drop_duplicates:
                        digest = hashlib.sha256(document.data).digest()
                        if digest in seen:
                            continue
                        seen.add(digest)
                    yield document, done + position
            done += unit.size


@dataclass(frozen=True, slots=True)
class SourceFile:
    name: str  # relative to the source, with "/"
    path: str  # or URL
    size: int  # bytes on disk
    stamp: str  # changes with the content: modification time, or what a remote store has for it
    filesystem: Any = None  # of fsspec; None: a local file

    def open(self) -> IO[bytes]:
        return self.filesystem.open(self.path, "rb") if self.filesystem else open(self.path, "rb")

    def check_unchanged(self) -> None:
        """Raise DataError when a local file is no longer what it was: what is read of it would be kept as the old text."""
        if not self.filesystem:
            stat = os.stat(self.path)
            if (stat.st_size, str(stat.st_mtime_ns)) != (self.size, self.stamp):
                raise DataError(f"{self.path} was changed while it was read: start again.")


@dataclass(frozen=True)
class FileUnit:
    files: tuple[SourceFile, ...]
    part_bytes: int
    text_key: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def fingerprint(self) -> list[Any]:
        files = [[file.name, file.size, file.stamp] for file in self.files]
        return [self.part_bytes, self.text_key, files]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        done = 0
        for file in self.files:
            remote = (Exception,) if file.filesystem else ()  # each store's client raises its own
            try:
                with file.open() as raw:
                    for block, position in read_blocks(
                        file.name, file.path, raw, self.part_bytes, self.text_key
                    ):
                        file.check_unchanged()
                        yield block, done + position
            except DataError:
                raise
            except (OSError, *remote) as error:
                raise _unreadable(file.path, error) from error
            done += file.size


def find_source(source: str, options: DataConfig | None = None) -> Source:
    """The source that `source` names, read as `options` (default: DataConfig's own) say.

    Raises DataError when there is none, or no text in it.
    """
    options = options or DataConfig()
    if source == STDLIB:
        return _stdlib(options)
    if source.startswith(HUGGING_FACE):
        from nvfp4_train.data.huggingface import hugging_face

        units = hugging_face(source.removeprefix(HUGGING_FACE), options)
        return Source(source, units, options.drop_duplicates)
    name, files = _remote(source) if "://" in source else _local(source)
    files = tuple(sorted(files, key=lambda file: file.name))
    if not files:
        raise DataError(
            f"data.source={source} holds no text that can be read: give {' '.join(SUFFIXES)} files."
        )
    alone = len(files) == 1 and name.endswith(TEXT_NAMES)
    units = _units(files, SINGLE_FILE_PART if alone else MAX_PART, options.text_key)
    return Source(name, units, options.drop_duplicates)


def _units(files: Iterable[SourceFile], part_bytes: int, text_key: str) -> tuple[FileUnit, ...]:
    units: list[FileUnit] = []
    waiting: list[SourceFile] = []
    cost = 0
    for file in files:
        if waiting and cost + file.size + _FILE_COST > UNIT_BYTES:
            units.append(FileUnit(tuple(waiting), part_bytes, text_key))
            waiting, cost = [], 0
        waiting.append(file)
        cost += file.size + _FILE_COST
    return (*units, FileUnit(tuple(waiting), part_bytes, text_key))


def _stdlib(options: DataConfig) -> Source:
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
    files = sorted(_stat(paths, root), key=lambda file: file.name)
    name = f"stdlib (Python {platform.python_version()})"
    return Source(name, _units(files, MAX_PART, options.text_key), drop_duplicates=True)


def _local(source: str) -> tuple[str, Iterator[SourceFile]]:
    root = Path(source).expanduser()
    if root.exists():
        root = root.resolve()
        base, found = (root.parent, [root]) if root.is_file() else (root, _walk(root))
    elif glob.has_magic(source):
        root, base, found = _glob(source)
    else:
        raise DataError(
            f"data.source={source} doesn't exist: give a file or folder of text ({' '.join(SUFFIXES)}), or "
            "data.source=stdlib for the text that Python itself brings."
        )
    return str(root), _stat((path for path in found if path.name.endswith(SUFFIXES)), base)


def _glob(source: str) -> tuple[Path, Path, set[Path]]:
    """The whole pattern, its folder without wildcards, and the files it matches, those of matched folders included."""
    pattern = Path(source).expanduser().absolute()
    base = pattern
    while glob.has_magic(str(base)):
        base = base.parent
    matches = [Path(match) for match in glob.glob(str(pattern), recursive=True)]
    if not matches:
        raise DataError(f"data.source={source} matches nothing: check the pattern.")
    files = {path for path in matches if path.is_file() or path.is_symlink()}
    return pattern, base, files.union(*(_walk(path) for path in matches if path.is_dir()))


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [
            n for n in folders if not n.startswith(".") and n != "__pycache__" and n not in left_out
        ]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        # Pipes and sockets would be waited for; a broken link stays, to be told by its name.
        yield from (path for path in paths if path.is_file() or path.is_symlink())


def _refuse(error: OSError) -> None:
    raise _unreadable(error.filename, error) from error


def _stat(paths: Iterable[Path], base: Path) -> Iterator[SourceFile]:
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            if path.is_symlink():
                raise DataError(
                    f"{path} is a link to {os.readlink(path)}, which can't be reached: repair or remove the link."
                ) from error
            raise _unreadable(str(path), error) from error
        name = path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)
        yield SourceFile(name, str(path), stat.st_size, str(stat.st_mtime_ns))


def _remote(url: str) -> tuple[str, list[SourceFile]]:
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(url)
        if glob.has_magic(root):
            found = filesystem.glob(root, detail=True)
            base = root[: next(i for i, c in enumerate(root) if c in "*?[")].rpartition("/")[0]
        elif filesystem.isfile(root):
            found, base = {root: filesystem.info(root)}, root.rpartition("/")[0]
        else:
            found, base = filesystem.find(root, detail=True), root
    except ImportError as error:
        raise DataError(
            f"data.source={url} needs another package ({first_line(error)}): install it."
        ) from error
    except Exception as error:  # each store's client raises its own
        raise DataError(
            f"data.source={url} can't be listed ({first_line(error)}): check the address and your access to it."
        ) from error
    files = []
    for path, info in found.items():
        name = path.removeprefix(base).lstrip("/")
        hidden = any(part.startswith(".") for part in name.split("/"))
        if info["type"] == "file" and name.endswith(SUFFIXES) and not hidden:
            stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
            files.append(SourceFile(name, path, int(info.get("size") or 0), stamp, filesystem))
    return url, files


_STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)


def _unreadable(path: str, error: BaseException) -> DataError:
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    return DataError(f"{path} can't be read ({reason}): make it readable or remove it.")
