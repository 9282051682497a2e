"""A prepared data set: a folder with manifest.json, tokenizer.model, and the shards of "train" and "valid".

manifest.json says what the text was, how it was cut, and the count, size and SHA-256 of every file; its own checksum
is the SHA-256 of its other keys. The stream of a split is its documents in order, each followed by eos.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train.atomic import write_text
from nvfp4_train.data.shards import (
    FORMAT_VERSION,
    OpenFiles,
    Shard,
    ShardReader,
    again,
    shard_name,
    token_dtype,
)
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.errors import DataError

FORMAT = "nvfp4_train.dataset"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
SPLITS = ("train", "valid")


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write manifest.json last: a folder without it is no data set."""
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, **content}
    manifest["checksum"] = _checksum(manifest)
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def is_dataset(folder: str | Path) -> bool:
    """Whether `folder` is a prepared data set by its manifest or its shards, be it damaged."""
    folder = Path(folder).expanduser()
    try:
        with open(folder / MANIFEST, "rb") as f:
            return FORMAT.encode() in f.read(200) or _has_shards(folder)
    except OSError:
        return _has_shards(folder)


def _has_shards(folder: Path) -> bool:
    return (folder / f"{shard_name(SPLITS[0], 0)}.bin").is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest. Raises DataError for one that is missing, damaged, or of a newer program."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        if _has_shards(folder):
            raise DataError(f"{path} can't be read ({error.strerror}): {again(folder)}.") from error
        raise DataError(
            f"{folder} is no prepared data set ({path.name}: {error.strerror}): make one with "
            "python -m nvfp4_train.prepare."
        ) from error
    except ValueError:
        manifest = {}
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is damaged: {again(folder)}.")
    version = manifest.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DataError(
            f"{path} has format {version}, this program reads up to {FORMAT_VERSION}: update the program, or "
            f"{again(folder)}."
        )
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise DataError(f"{path} has changed since it was written (checksum): {again(folder)}.")
    return manifest


def open_dataset(path: str | Path, check: str = "fast") -> Dataset:
    """Open a prepared data set.

    check "fast": the manifest, the tokenizer, and every shard's size and header. "full": every byte of the shards as
    well. Raises DataError naming the file that is wrong.
    """
    dataset = Dataset(Path(path).expanduser())
    for reader in dataset.readers():
        reader.check()
    if check == "full":
        for reader in dataset.readers():
            reader.check_contents()
    return dataset


class Dataset:
    """`manifest` without its checksum; `hash` names the tokens and the tokenizer, wherever they lie or came from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self.tokenizer = Tokenizer(_read_tokenizer(path, self.manifest["tokenizer"]))
        self._files = OpenFiles()
        self._readers = {
            split: [
                ShardReader(path, Shard(**shard), self.tokenizer.vocab_size, self._files)
                for shard in self._shards(split)
            ]
            for split in SPLITS
        }
        self._starts = {
            split: list(accumulate((reader.shard.tokens for reader in readers), initial=0))
            for split, readers in self._readers.items()
        }

    @cached_property
    def hash(self) -> str:
        return _checksum({key: self.manifest[key] for key in ("tokenizer", "splits")})

    def n_tokens(self, split: str) -> int:
        """Length of the split's stream, eos included."""
        return int(self.manifest["splits"][split]["tokens"])

    def n_bytes(self, split: str) -> int:
        """UTF-8 bytes of the split's text."""
        return int(self.manifest["splits"][split]["bytes"])

    def n_documents(self, split: str) -> int:
        return int(self.manifest["splits"][split]["documents"])

    def tokens(self, split: str, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the split's stream across shards, int64."""
        return self.raw_tokens(split, start, stop).astype(np.int64)

    def raw_tokens(self, split: str, start: int, stop: int) -> np.ndarray:
        """As `tokens`, in the type they are stored in; -1 is the place of the eos that stands before the stream."""
        if start < 0:
            eos = np.array([self.tokenizer.eos_id], dtype=token_dtype(self.tokenizer.vocab_size))
            return np.concatenate([eos, self.raw_tokens(split, 0, stop)])
        parts = [reader.read(first, last) for reader, _, first, last in self._shards_with(split, start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.empty(0, token_dtype(self.tokenizer.vocab_size)), *parts])

    def document_spans(self, split: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents that have tokens in [start, stop) of the split's stream begin and end (eos included)."""
        begins, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for reader, offset, first, last in self._shards_with(split, start, stop):
            begin, end = reader.document_spans(first, last)
            begins.append(begin + offset)
            ends.append(end + offset)
        return np.concatenate(begins), np.concatenate(ends)

    def documents(self, split: str) -> np.ndarray:
        """int64 [documents, 2]: where each document ends in the split's stream (eos included), bytes of its text."""
        parts = [np.empty((0, 2), np.int64)]
        for start, reader in zip(self._starts[split], self._readers[split], strict=False):
            parts.append(reader.index() + np.array([start, 0]))
        return np.concatenate(parts)

    def baselines(self) -> dict[str, float]:
        """Bits a byte of the held-out text by "gzip" (-9, each document alone) and "xz" (-9, all together)."""
        return {name: float(self.manifest["baselines"][name]) for name in ("gzip", "xz")}

    def readers(self, split: str | None = None) -> list[ShardReader]:
        """The shards of a split, or of all."""
        return [reader for name in ([split] if split else SPLITS) for reader in self._readers[name]]

    def _shards_with(self, split: str, start: int, stop: int) -> Iterator[tuple[ShardReader, int, int, int]]:
        """The shards that hold [start, stop) of the stream: reader, where it begins, and the part [first, last) of it."""
        starts = self._starts[split]
        i = bisect_right(starts, start) - 1
        while start < stop:
            offset, end = starts[i], min(stop, starts[i + 1])
            yield self._readers[split][i], offset, start - offset, end - offset
            start, i = end, i + 1

    def _shards(self, split: str) -> list[dict[str, Any]]:
        return self.manifest["splits"][split]["shards"]


def _read_tokenizer(folder: Path, entry: dict[str, Any]) -> bytes:
    path = folder / entry["file"]
    try:
        model = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): {again(folder)}.") from error
    if hashlib.sha256(model).hexdigest() != entry["sha256"]:
        raise DataError(f"{path} is not the tokenizer that the shards were written with: {again(folder)}.")
    return model


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
