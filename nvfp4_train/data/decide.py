"""What has to be known before the first document is encoded: the tokenizer, and which documents are used.

The tokenizer is trained on the training documents with the smallest hashes (8 MiB of them). Of a source above
1 GiB only the start of 256 evenly spaced units is looked at for that. `data.max_train_bytes` needs the size of
every document first: then the whole source is read. Memory holds the sample and a histogram. The decision is kept
for later launches; other machines come to the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from nvfp4_train.atomic import atomic_open, write_text
from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data import tokenizer as tokenizers
from nvfp4_train.data.encode import HASHES, Rules, hashes
from nvfp4_train.data.progress import Progress, Report
from nvfp4_train.data.readers import Document
from nvfp4_train.data.sources import Source
from nvfp4_train.data.tokenizer import Tokenizer, check_vocab_size
from nvfp4_train.errors import DataError

SCAN_BYTES = 1 << 30  # on disk
SCAN_UNITS = 256
_BUCKETS = 1 << 16


@dataclass(frozen=True)
class Decision:
    tokenizer: Tokenizer
    path: Path  # of the tokenizer, for the workers
    rules: Rules


def decide(
    source: Source, cfg: DataConfig, vocab_size: int, folder: Path, key: str, report: Report
) -> Decision:
    """Found in `folder` under `key`, or made and put there. Raises DataError."""
    path, rules_path = folder / f"tokenizer-{key[:16]}", folder / f"rules-{key[:16]}.json"
    if rules_path.exists():  # written last
        return Decision(Tokenizer.load(path), path, Rules(**json.loads(rules_path.read_text())))
    scan = _Scan(Rules(int(cfg.valid_fraction * HASHES)))
    if cfg.tokenizer is None or cfg.max_train_bytes is not None:
        scan.read(source, cfg.max_train_bytes is None, report)
        scan.decide(cfg)
    if cfg.tokenizer:
        tokenizer = Tokenizer.load(cfg.tokenizer)
        check_vocab_size(tokenizer, vocab_size, f"data.tokenizer={cfg.tokenizer}")
    else:
        report(f"Training a tokenizer of {vocab_size:,} pieces")
        tokenizer = Tokenizer(tokenizers.train(scan.sample.texts(scan.rules.train_below), vocab_size))
    with atomic_open(path, "wb") as f:
        f.write(tokenizer.model)
    write_text(rules_path, json.dumps(asdict(scan.rules)))
    return Decision(tokenizer, path, scan.rules)


@dataclass
class _Scan:
    """What a pass over the documents learns."""

    rules: Rules
    sample: tokenizers.Sample = field(default_factory=tokenizers.Sample)
    documents: int = 0
    held_out: int = 0
    # Bytes of training text by second hash.
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(_BUCKETS, np.int64))
    # Of the training documents with the smallest first hash: both hashes, and their bytes.
    smallest: tuple[int, int, int] | None = None

    def read(self, source: Source, some: bool, report: Report) -> None:
        """`some`: of a large source a part is enough."""
        limit = SCAN_BYTES if some and source.size > SCAN_BYTES else None
        progress = Progress("Reading", limit or source.size, report)
        n_bytes = 0
        for document, done in _documents(source, limit):
            self._add(document)
            n_bytes += len(document.data)
            progress(done, n_bytes)

    def _add(self, document: Document) -> None:
        first, second = hashes(document.data)
        self.documents += 1
        if first < self.rules.valid_below:
            self.held_out += 1
            return
        self.sample.add(second, document.data)
        self.histogram[second * _BUCKETS // HASHES] += len(document.data)
        if self.smallest is None or first <= self.smallest[0]:
            equal = self.smallest[2] if self.smallest and first == self.smallest[0] else 0
            self.smallest = first, second, equal + len(document.data)

    def decide(self, cfg: DataConfig) -> None:
        """Set the rules. Raises DataError where nothing is left to train on."""
        if not self.held_out and self.smallest:  # so few documents that chance chose none
            first, second, n_bytes = self.smallest
            self.rules = replace(self.rules, valid_below=first + 1)
            self.sample.remove(second)
            self.histogram[second * _BUCKETS // HASHES] -= n_bytes
        total = self.histogram.sum()
        if not total:
            raise too_few(cfg.source, self.documents)
        if cfg.max_train_bytes is not None and total > cfg.max_train_bytes:
            buckets = int(np.searchsorted(np.cumsum(self.histogram), cfg.max_train_bytes, side="right"))
            if not self.histogram[:buckets].sum():
                raise DataError(
                    f"data.max_train_bytes={cfg.max_train_bytes} is less than one document: raise it."
                )
            self.rules = replace(self.rules, train_below=buckets * (HASHES // _BUCKETS))


def _documents(source: Source, limit: int | None) -> Iterator[tuple[Document, int]]:
    """Every document, or those from the start of evenly spaced units, with the bytes on disk behind them."""
    step = max(1, len(source.units) // SCAN_UNITS) if limit else 1
    units = source.units[::step]
    behind = 0
    for unit in units:
        position = 0
        for block, after in unit.blocks():
            for document in block.documents():
                yield document, behind + position
            position = after
            if limit and position >= limit // len(units):
                break
        behind += position


def too_few(source: str, documents: int) -> DataError:
    return DataError(
        f"data.source={source} has too few documents to train on some and hold out others ({documents} with text): give "
        "at least two that differ, better hundreds."
    )
