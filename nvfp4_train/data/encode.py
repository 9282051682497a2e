"""From a source's units to pieces: this process reads, the workers encode, this process writes in order.

Reading is some hundred times faster than encoding, so one reader keeps many workers busy, and a single large file, be
it compressed, is shared between them like many small ones. What is in memory: a few blocks a worker, and a piece's
entries.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nvfp4_train.data import pieces
from nvfp4_train.data.pieces import ENTRY, PieceWriter, piece_path, unit_pieces
from nvfp4_train.data.progress import Progress, Report
from nvfp4_train.data.readers import BLOCK_BYTES, Block, Document
from nvfp4_train.data.shards import token_dtype
from nvfp4_train.data.sources import Source, Unit
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.data.workers import Workers
from nvfp4_train.errors import ConfigError, DataError

HASHES = 1 << 64
BATCHES_PER_PIECE = 16
_FEW_UNITS = 4  # a part: with fewer units each, parts share the units' pieces


@dataclass(frozen=True)
class Rules:
    """Which documents are used, by their hashes alone, so that it depends on no other document, order or part.

    Hashes lie in [0, 2^64). Held out are the documents below `valid_below` by their first hash, trained on the
    others that are below `train_below` by their second.
    """

    valid_below: int
    train_below: int = HASHES

    def masks(self, first: np.ndarray, second: np.ndarray) -> dict[str, np.ndarray]:
        """Of each split, which documents belong to it."""
        valid = first <= np.uint64(self.valid_below - 1) if self.valid_below else np.zeros(len(first), bool)
        return {"valid": valid, "train": ~valid & (second <= np.uint64(self.train_below - 1))}

    def uses(self, first: int, second: int) -> bool:
        return first < self.valid_below or second < self.train_below


@dataclass(frozen=True)
class Part:
    """Part `number` of `of`, from 1; units, or where there are few of them pieces, are dealt out in turn."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """From "3/64". Raises ConfigError."""
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise ConfigError(f"part={text} must be NUMBER/PARTS from 1/PARTS on, such as 3/64.")
        return cls(int(number), int(of))

    def has(self, i: int) -> bool:
        return i % self.of == self.number - 1


def hashes(data: bytes) -> tuple[int, int]:
    """Two independent hashes of a document, each 64 bits of its SHA-256."""
    digest = hashlib.sha256(data).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


@functools.lru_cache(1)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def encode_blocks(
    tokenizer_path: Path, rules: Rules, blocks: Sequence[Block]
) -> tuple[np.ndarray, np.ndarray, int]:
    """The tokens of the documents that `rules` use, their ENTRYs, and the bytes of text of all."""
    tokenizer = _tokenizer(tokenizer_path)
    tokens, entries, n_bytes = [np.empty(0, np.int32)], [], 0
    for block in blocks:
        for document in block.documents():
            n_bytes += len(document.data)
            first, second = hashes(document.data)
            if rules.uses(first, second):
                tokens.append(document_tokens(tokenizer, document))
                entries.append((first, second, len(tokens[-1]), len(document.data)))
    dtype = token_dtype(tokenizer.vocab_size)
    return np.concatenate(tokens).astype(dtype), np.array(entries, ENTRY), n_bytes


def document_tokens(tokenizer: Tokenizer, document: Document) -> np.ndarray:
    """int32: ids of a document, eos last. Raises DataError unless they stand for all of its bytes."""
    tokens = tokenizer.encode_document(document.text)
    if tokenizer.byte_lengths[tokens].sum() != len(document.data):
        raise DataError(
            f"The tokenizer changes the text of {document.name}: leave data.tokenizer unset, or use one that keeps "
            "text as it is."
        )
    return tokens


def unit_keys(source: Source, tokenizer: Tokenizer, rules: Rules) -> list[str]:
    """For each unit the name of its pieces: a hash of all that decides what they hold."""
    common = [pieces.FORMAT_VERSION, BATCHES_PER_PIECE, BLOCK_BYTES, tokenizer.hash, asdict(rules)]
    return [
        hashlib.sha256(json.dumps([*common, unit.fingerprint()]).encode()).hexdigest()[:32]
        for unit in source.units
    ]


def encode(
    source: Source,
    keys: Sequence[str],
    tokenizer_path: Path,
    rules: Rules,
    part: Part,
    folder: Path,
    workers: Workers,
    report: Report,
    seen: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> None:
    """Write those pieces of `part` that `folder` lacks; `seen` gets their tokens and entries, in order.

    Raises DataError for text that can't be used.
    """
    dtype = token_dtype(_tokenizer(tokenizer_path).vocab_size)
    by_piece = len(source.units) < _FEW_UNITS * part.of
    mine = [
        (u, k) for i, (u, k) in enumerate(zip(source.units, keys, strict=True)) if by_piece or part.has(i)
    ]
    missing = [(unit, key) for unit, key in mine if not unit_pieces(folder, key)[1]]
    progress = Progress("Encoding", sum(unit.size for unit, _ in missing), report)
    if len(missing) < len(mine):
        report(f"{len(mine) - len(missing)} of {len(mine)} units of text are encoded already")
    sent: deque[_Batch] = deque()

    def calls() -> Iterator[tuple]:
        for batch in _batches(missing, part if by_piece else Part(), folder):
            sent.append(batch)
            yield tokenizer_path, rules, batch.blocks

    writer: PieceWriter | None = None
    text_bytes = 0
    try:
        for tokens, entries, n_bytes in workers.map(encode_blocks, calls()):
            batch = sent.popleft()
            writer = writer or PieceWriter(batch.path, dtype.itemsize)
            writer.append(tokens, entries)
            if seen is not None:
                seen(tokens, entries)
            if batch.ends_piece:
                writer.close(batch.ends_unit)
                writer = None
            text_bytes += n_bytes
            progress(batch.done, text_bytes)
        progress.finish(text_bytes)
    finally:
        if writer is not None:
            writer.abort()


@dataclass(frozen=True)
class _Batch:
    path: Path  # of the piece it belongs to
    blocks: list[Block]
    ends_piece: bool
    ends_unit: bool
    done: int  # bytes on disk behind it


def _batches(units: Sequence[tuple[Unit, str]], part: Part, folder: Path) -> Iterator[_Batch]:
    behind = 0
    for i, (unit, key) in enumerate(units):
        wanted = False
        for number, (blocks, position, last) in enumerate(_grouped(unit)):
            piece, place = divmod(number, BATCHES_PER_PIECE)
            path = piece_path(folder, key, piece)
            if place == 0:  # once for all of the piece: another process may finish it meanwhile
                wanted = part.has(i + piece) and not path.exists()
            if wanted:
                ends = last or place == BATCHES_PER_PIECE - 1
                yield _Batch(path, blocks, ends, last, behind + position)
        behind += unit.size


def _grouped(unit: Unit) -> Iterator[tuple[list[Block], int, bool]]:
    """The unit's blocks, some MiB together, the bytes on disk behind them, and whether they are the last."""
    group: list[Block] = []
    size = position = 0
    for block, after in unit.blocks():
        if size >= BLOCK_BYTES:
            yield group, position, False
            group, size = [], 0
        group.append(block)
        size += block.size
        position = after
    yield group, position, True
