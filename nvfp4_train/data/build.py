"""From text to a prepared data set, in as many processes and on as many machines as there are.

1. Decide (`decide.py`): train the tokenizer on a sample of the training documents, unless one is given.
2. Encode (`encode.py`): the source's units become pieces, finished parts that later launches and other machines use.
3. Merge (`merge.py`): held-out documents, duplicates and shards, from the pieces' hashes and tokens.

Whether a document is held out, and with `max_train_bytes` whether it is used, follows from its hash alone, so neither
depends on the order, on other documents or on the part, and equal documents share their fate. All that a data set
holds is a function of the source and the settings: it is the same for any number of processes, parts and restarts.

A data set appears whole or not at all: everything before lies in a hidden folder beside it (".NAME.partial") and is
renamed at the end. Processes that want the same one wait for the first, on a lock that the kernel frees when its
holder dies; parts share the lock. What is finished when an error or a kill ends a launch is kept for the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from nvfp4_train.atomic import fsync_dir
from nvfp4_train.config.checks import positive
from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data import merge, pieces
from nvfp4_train.data import tokenizer as tokenizers
from nvfp4_train.data.dataset import is_dataset, open_dataset, write_manifest
from nvfp4_train.data.decide import Decision, decide, too_few
from nvfp4_train.data.duplicates import mark_duplicates
from nvfp4_train.data.encode import Part, encode, unit_keys
from nvfp4_train.data.measure import HeldOutText
from nvfp4_train.data.progress import Report
from nvfp4_train.data.shards import FORMAT_VERSION
from nvfp4_train.data.sources import Source, find_source
from nvfp4_train.data.tokenizer import Tokenizer, check_vocab_size
from nvfp4_train.data.workers import Workers, cores
from nvfp4_train.errors import ConfigError, DataError

SMALL = 4 << 20  # bytes on disk a worker: with less, starting it takes longer than it saves


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
    source = find_source(cfg.source, cfg)
    key = input_key(source, cfg, vocab_size)
    default = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(cfg.cache_dir or Path(default) / "nvfp4_train").expanduser()
    name = cfg.source if cfg.source == "stdlib" else Path(source.name).stem
    target = cache / f"{name}-{vocab_size}-{key[:16]}"
    return _Build(source, cfg, vocab_size, target, key, report).run()


def prepare_into(
    out: Path,
    cfg: DataConfig,
    vocab_size: int,
    report: Report,
    part: Part | None = None,
    workers: int | None = None,
    merge_only: bool = False,
) -> Path:
    """As `prepare`, into the folder `out`, which must be new, empty, or hold the same data set already.

    With `part` only its pieces are made; `merge_only` refuses to make any. `workers`: processes, default one a core.
    """
    _check(cfg)
    source = find_source(cfg.source, cfg)
    key = input_key(source, cfg, vocab_size)
    if out.exists() and not is_dataset(out) and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"out={out} holds other files: give a new folder.")
    return _Build(source, cfg, vocab_size, out, key, report, workers).run(part, merge_only)


def input_key(source: Source, cfg: DataConfig, vocab_size: int) -> str:
    """A hash of all that decides what a data set holds; no text is read."""
    tokenizer = Tokenizer.load(cfg.tokenizer).hash if cfg.tokenizer else tokenizers.SETTINGS
    inputs = {
        "format_version": [FORMAT_VERSION, pieces.FORMAT_VERSION],
        "source": [source.name, source.drop_duplicates, source.fingerprint()],
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


class _Build:
    """One launch."""

    def __init__(
        self,
        source: Source,
        cfg: DataConfig,
        vocab_size: int,
        target: Path,
        key: str,
        report: Report,
        workers: int | None = None,
    ) -> None:
        self._source, self._cfg, self._vocab_size, self._report = source, cfg, vocab_size, report
        self._target, self._key = target, key
        self._partial = target.with_name(f".{target.name}.partial")
        self._pieces = self._partial / "pieces"
        n = workers or min(cores(), -(-source.size // SMALL) or cores())
        self._workers = Workers(n)

    def run(self, part: Part | None = None, merge_only: bool = False) -> Path:
        """The data set's folder; with `part`, the folder of its pieces."""
        if self._is_built():
            return self._target
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            lock = self._target.with_name(f".{self._target.name}.lock")
            with _lock(lock, fcntl.LOCK_SH if part else fcntl.LOCK_EX, self._report), self._workers:
                if self._is_built():  # by another process, meanwhile
                    return self._target
                self._pieces.mkdir(parents=True, exist_ok=True)
                try:
                    if part:
                        with _lock(
                            self._partial / f"part-{part.number}-of-{part.of}.lock",
                            fcntl.LOCK_EX,
                            self._report,
                        ):
                            self._encode(self._decide(), part)
                        return self._partial
                    self._finish(merge_only)
                finally:
                    # Nothing worth keeping: a refusal before the first piece.
                    if self._partial.exists() and not part and not any(self._pieces.iterdir()):
                        shutil.rmtree(self._partial, ignore_errors=True)
        except OSError as error:
            raise DataError(
                f"The prepared data can't be written to {self._target} ({error.strerror or error}): free space there (or "
                "make it writable) and start again (what is finished is kept), or set data.cache_dir (out=DIR of "
                "prepare) to another disk."
            ) from error
        return self._target

    def _is_built(self) -> bool:
        """Raises DataError for a damaged data set, or another one, in its place."""
        if not is_dataset(self._target):
            return False
        if open_dataset(self._target).manifest["input_key"] != self._key:
            raise DataError(
                f"{self._target} holds a data set of another source or other settings: give a new folder with out=DIR."
            )
        return True

    def _finish(self, merge_only: bool) -> None:
        decision = self._decide()
        folder = self._partial / f"dataset-{self._key[:16]}"
        with contextlib.closing(HeldOutText(decision.tokenizer, decision.rules)) as held_out:
            if not merge_only:
                self._encode(decision, Part(), held_out.add)
            found = self._found(decision)
            folder.mkdir(exist_ok=True)
            self._merge(found, decision, held_out, folder)
        os.rename(folder, self._target)
        fsync_dir(self._target.parent)
        shutil.rmtree(self._partial, ignore_errors=True)

    def _decide(self) -> Decision:
        return decide(self._source, self._cfg, self._vocab_size, self._partial, self._key, self._report)

    def _encode(
        self, decision: Decision, part: Part, seen: Callable[[np.ndarray, np.ndarray], None] | None = None
    ) -> None:
        encode(
            self._source,
            unit_keys(self._source, decision.tokenizer, decision.rules),
            decision.path,
            decision.rules,
            part,
            self._pieces,
            self._workers,
            self._report,
            seen,
        )
        if find_source(self._cfg.source, self._cfg).fingerprint() != self._source.fingerprint():
            raise DataError(f"data.source={self._cfg.source} was changed while it was read: start again.")

    def _found(self, decision: Decision) -> list[pieces.Piece]:
        keys = unit_keys(self._source, decision.tokenizer, decision.rules)
        found, missing = [], 0
        for key in keys:
            of_unit, complete = pieces.unit_pieces(self._pieces, key)
            found += of_unit
            missing += not complete
        if missing:
            raise DataError(
                f"{missing} of {len(keys)} units of data.source={self._cfg.source} aren't encoded in {self._partial}: "
                "finish every part, or use action=build, which encodes what is missing."
            )
        return found

    def _merge(
        self, found: Sequence[pieces.Piece], decision: Decision, held_out: HeldOutText, folder: Path
    ) -> None:
        tokenizer = decision.tokenizer
        flags = self._partial / "duplicates" if self._source.drop_duplicates else None
        if flags and (dropped := mark_duplicates(found, flags)):
            self._report(f"{dropped:,} documents are equal to one before them and are left out")
        selection = merge.Selection(merge.hold_out(found, decision.rules), flags)
        splits = merge.merge(found, selection, tokenizer.vocab_size, folder, self._workers)
        train, valid = splits["train"], splits["valid"]
        if not train["documents"]:
            raise too_few(self._cfg.source, sum(piece.documents for piece in found))
        for marker in folder.glob(".*.json"):
            marker.unlink()
        _write(folder / tokenizer.file_name, tokenizer.model)
        write_manifest(
            folder,
            {
                "source": self._source.name,
                "input_key": self._key,
                "valid_fraction": self._cfg.valid_fraction,
                "max_train_bytes": self._cfg.max_train_bytes,
                "tokenizer": {
                    "file": tokenizer.file_name,
                    "sha256": tokenizer.hash,
                    "vocab_size": tokenizer.vocab_size,
                    "eos_id": tokenizer.eos_id,
                },
                "splits": splits,
                "baselines": held_out.baselines(found, selection, folder, valid["shards"]),
            },
        )
        self._report(
            f"Prepared {train['tokens']:,} training tokens ({train['bytes'] / train['tokens']:.2f} bytes a token) and "
            f"{valid['tokens']:,} held-out tokens"
        )


@contextlib.contextmanager
def _lock(path: Path, kind: int, report: Report) -> Iterator[None]:
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is preparing the same data; waiting for it.")
            fcntl.flock(lock, kind)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            report(
                f"{path.parent} has no file locks: see to it that no other process prepares the same data."
            )
        yield


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
