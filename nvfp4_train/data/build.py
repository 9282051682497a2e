"""From text to a prepared data set: choose the held-out documents, train the tokenizer, write the shards.

The source is read twice. The first pass hashes every document; the hash alone decides whether it is held out and, with
`max_train_bytes`, whether it is used, so neither depends on the order or on other documents, and equal documents
share their fate. The tokenizer is trained on the training documents with the smallest hashes (8 MiB of them). The
second pass encodes, in as many threads as there are cores (SentencePiece runs outside Python's lock), and measures
the baselines. Memory stays bounded: a sample, a histogram, and a few documents a core.

A data set appears whole or not at all: it is built in a hidden folder that is renamed at the end. Processes that want
the same one wait for the first, on a lock that the kernel frees when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import sentencepiece

from nvfp4_train.atomic import fsync_dir
from nvfp4_train.config.checks import positive
from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data import tokenizer as tokenizers
from nvfp4_train.data.baselines import Baselines
from nvfp4_train.data.dataset import MANIFEST, TOKENIZER, is_dataset, open_dataset, write_manifest
from nvfp4_train.data.shards import FORMAT_VERSION, SplitWriter
from nvfp4_train.data.sources import Document, Source, find_source
from nvfp4_train.data.tokenizer import Tokenizer, check_vocab_size
from nvfp4_train.errors import ConfigError, DataError
from nvfp4_train.units import duration

T = TypeVar("T")
R = TypeVar("R")
Report = Callable[[str], None]
HASHES = 1 << 64
_BUCKETS = 1 << 16
_REPORT_SECONDS = 2.0


def prepare(cfg: DataConfig, vocab_size: int, report: Report) -> Path:
    """The folder of the data set that `cfg` and `vocab_size` describe, built in the cache unless it is there already.

    A source that is a prepared data set is returned as it is. `report` gets lines for a person. Raises DataError (or
    ConfigError for a value out of range) with one sentence.
    """
    if is_dataset(cfg.source):
        dataset = open_dataset(cfg.source)
        check_vocab_size(dataset.tokenizer, vocab_size, f"the tokenizer of data.source={cfg.source}")
        return dataset.path
    _check(cfg)
    source = find_source(cfg.source)
    key = input_key(source, cfg, vocab_size)
    default = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(cfg.cache_dir or Path(default) / "nvfp4_train").expanduser()
    name = cfg.source if cfg.source == "stdlib" else Path(source.name).stem
    return _build_once(source, cfg, vocab_size, cache / f"{name}-{vocab_size}-{key[:16]}", key, report)


def prepare_into(out: Path, cfg: DataConfig, vocab_size: int, report: Report) -> Path:
    """As `prepare`, into the folder `out`, which must be new, empty, or hold the same data set already."""
    _check(cfg)
    source = find_source(cfg.source)
    key = input_key(source, cfg, vocab_size)
    if out.exists() and not is_dataset(out) and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"out={out} holds other files: give a new folder.")
    if is_dataset(out) and open_dataset(out).manifest["input_key"] != key:
        raise DataError(f"out={out} holds a data set of another source or other settings: give a new folder.")
    return _build_once(source, cfg, vocab_size, out, key, report)


def input_key(source: Source, cfg: DataConfig, vocab_size: int) -> str:
    """A hash of all that decides what a data set holds; no text is read."""
    tokenizer = Tokenizer.load(cfg.tokenizer).hash if cfg.tokenizer else tokenizers.SETTINGS
    inputs = {
        "format_version": FORMAT_VERSION,
        "source": [source.name, source.drop_duplicates, source.part_bytes, source.fingerprint()],
        "tokenizer": [tokenizer, tokenizers.SAMPLE_BYTES, sentencepiece.__version__],
        "vocab_size": vocab_size,
        "valid_fraction": cfg.valid_fraction,
        "max_train_bytes": cfg.max_train_bytes,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _check(cfg: DataConfig) -> None:
    if not 0 < cfg.valid_fraction < 1:
        raise ConfigError(f"data.valid_fraction={cfg.valid_fraction:g} must lie between 0 and 1.")
    positive(cfg, "data", "max_train_bytes")


def _build_once(
    source: Source, cfg: DataConfig, vocab_size: int, target: Path, key: str, report: Report
) -> Path:
    if (target / MANIFEST).exists():
        return open_dataset(target).path
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{target.name}.lock"), report):
            if (target / MANIFEST).exists():  # another process has built it meanwhile
                return open_dataset(target).path
            shutil.rmtree(partial, ignore_errors=True)  # what a killed build left
            partial.mkdir()
            try:
                _build(source, cfg, vocab_size, partial, key, report)
                os.rename(partial, target)
                fsync_dir(target.parent)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise DataError(
            f"The prepared data can't be written to {target} ({error.strerror}): free space there, or set "
            "data.cache_dir (out=DIR of prepare) to another disk."
        ) from error
    return target


@contextlib.contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is preparing the same data; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(source: Source, cfg: DataConfig, vocab_size: int, folder: Path, key: str, report: Report) -> None:
    scan = _scan(source, cfg, report)
    if cfg.tokenizer:
        tokenizer = Tokenizer.load(cfg.tokenizer)
        check_vocab_size(tokenizer, vocab_size, f"data.tokenizer={cfg.tokenizer}")
    else:
        report(f"Training a tokenizer of {vocab_size:,} pieces")
        tokenizer = Tokenizer(tokenizers.train(scan.sample.texts(scan.train_below), vocab_size))
    _write(folder / TOKENIZER, tokenizer.model)
    splits, baselines = _encode(source, scan, tokenizer, folder, report)
    if find_source(cfg.source).fingerprint() != source.fingerprint():
        raise DataError(f"data.source={cfg.source} was changed while it was read: start again.")
    write_manifest(
        folder,
        {
            "source": source.name,
            "input_key": key,
            "valid_fraction": cfg.valid_fraction,
            "max_train_bytes": cfg.max_train_bytes,
            "tokenizer": {
                "file": TOKENIZER,
                "sha256": tokenizer.hash,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
            },
            "splits": splits,
            "baselines": baselines,
        },
    )
    train = splits["train"]
    report(
        f"Prepared {train['tokens']:,} training tokens ({train['bytes'] / train['tokens']:.2f} bytes a token) and "
        f"{splits['valid']['tokens']:,} held-out tokens"
    )


@dataclass
class _Scan:
    """What the first pass learns. Hashes lie in [0, 2^64); documents below `valid_below` by their first hash are held
    out, the others used when their second hash is below `train_below`."""

    sample: tokenizers.Sample
    valid_below: int
    train_below: int = HASHES
    bytes: int = 0
    # Bytes of training text by second hash.
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(_BUCKETS, np.int64))

    def split(self, document: Document) -> str | None:
        """ "train", "valid", or None for a document that isn't used."""
        first, second = _hashes(document.data)
        if first < self.valid_below:
            return "valid"
        return "train" if second < self.train_below else None


def _hashes(data: bytes) -> tuple[int, int]:
    digest = hashlib.sha256(data).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def _scan(source: Source, cfg: DataConfig, report: Report) -> _Scan:
    scan = _Scan(tokenizers.Sample(), valid_below=int(cfg.valid_fraction * HASHES))
    progress = _Progress("Reading", source.size, report)
    documents = held_out = 0
    # Of the training documents with the smallest first hash: both hashes, and their bytes.
    smallest: tuple[int, int, int] | None = None
    for document, done in source.documents():
        first, second = _hashes(document.data)
        documents += 1
        scan.bytes += len(document.data)
        if first < scan.valid_below:
            held_out += 1
        else:
            scan.sample.add(second, document.data)
            scan.histogram[second * _BUCKETS // HASHES] += len(document.data)
            if smallest is None or first <= smallest[0]:
                equal = smallest[2] if smallest and first == smallest[0] else 0
                smallest = first, second, equal + len(document.data)
        progress(done)
    if not held_out and smallest:  # so few documents that chance chose none
        first, second, n_bytes = smallest
        scan.valid_below = first + 1
        scan.sample.remove(second)
        scan.histogram[second * _BUCKETS // HASHES] -= n_bytes
    if not scan.histogram.sum():
        raise DataError(
            f"data.source={cfg.source} has too few documents to train on some and hold out others ({documents} with "
            "text): give at least two that differ, better hundreds."
        )
    if cfg.max_train_bytes is not None and scan.histogram.sum() > cfg.max_train_bytes:
        buckets = int(np.searchsorted(np.cumsum(scan.histogram), cfg.max_train_bytes, side="right"))
        scan.train_below = buckets * (HASHES // _BUCKETS)
        if not scan.histogram[:buckets].sum():
            raise DataError(
                f"data.max_train_bytes={cfg.max_train_bytes} is less than one document: raise it."
            )
    return scan


def _encode(
    source: Source, scan: _Scan, tokenizer: Tokenizer, folder: Path, report: Report
) -> tuple[dict[str, dict], dict[str, float | int]]:
    writers = {split: SplitWriter(folder, split, tokenizer.vocab_size) for split in ("train", "valid")}
    baselines = Baselines()
    progress = _Progress("Encoding", scan.bytes, report)
    done = 0

    def encode(document: Document) -> tuple[Document, str | None, np.ndarray]:
        split = scan.split(document)
        return document, split, _tokens(tokenizer, document) if split else np.empty(0, np.int64)

    try:
        for document, split, tokens in _ordered_map(encode, (document for document, _ in source.documents())):
            if split:
                writers[split].append(tokens, len(document.data))
            if split == "valid":
                baselines.add(document.data)
            done += len(document.data)
            progress(done)
        return {split: writer.close() for split, writer in writers.items()}, baselines.finish()
    finally:
        for writer in writers.values():
            writer.abort()


def _tokens(tokenizer: Tokenizer, document: Document) -> np.ndarray:
    """Token ids of a document, eos last. Raises DataError unless they stand for all of its bytes."""
    tokens = np.array([*tokenizer.encode(document.text), tokenizer.eos_id], dtype=np.int64)
    if tokenizer.byte_lengths[tokens].sum() != len(document.data):
        raise DataError(
            f"The tokenizer changes the text of {document.name}: leave data.tokenizer unset, or use one that keeps "
            "text as it is."
        )
    return tokens


def _ordered_map(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`map` over as many threads as there are cores, a few items ahead of what has been taken."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _Progress:
    """Reports MB, MB/s and time left, at most every two seconds."""

    def __init__(self, what: str, total: int, report: Report) -> None:
        self._what, self._total, self._report = what, total, report
        self._start = self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last >= _REPORT_SECONDS and done:
            self._last = now
            rate = done / (now - self._start)
            left = (self._total - done) / rate
            self._report(
                f"{self._what}: {done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, "
                f"{duration(left)} left"
            )


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
