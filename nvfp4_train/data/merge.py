"""From pieces to shards: which documents go where is decided from their hashes, then their tokens are copied.

The first step reads the pieces' entries only and cuts each split into shards; the second writes every shard by itself,
in the workers. A shard that is finished has a marker beside it, so that a later launch goes on with the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from nvfp4_train.atomic import write_text
from nvfp4_train.data.encode import Rules
from nvfp4_train.data.pieces import SLICE, Piece
from nvfp4_train.data.shards import SHARD_TOKENS, Shard, ShardWriter, shard_name, split_entry, token_dtype
from nvfp4_train.data.workers import Workers

SPLITS = ("train", "valid")


@dataclass(frozen=True)
class Selection:
    """Whose documents are in a split: those the rules put there, less those whose flag (a byte each, in `flags`) is set."""

    rules: Rules
    flags: Path | None = None

    def masks(self, entries: np.ndarray, number: int) -> dict[str, np.ndarray]:
        """Of each split, which of `entries` belong to it; `number` is that of the first, counted over all pieces."""
        masks = self.rules.masks(entries["first"], entries["second"])
        if self.flags is None or not len(entries):
            return masks
        kept = np.fromfile(self.flags, np.uint8, len(entries), offset=number) == 0
        return {split: mask & kept for split, mask in masks.items()}


@dataclass(frozen=True)
class Span:
    """Documents [start, stop) of a piece whose first document is number `number` over all pieces."""

    piece: Path
    number: int
    start: int
    stop: int


def hold_out(pieces: Sequence[Piece], rules: Rules) -> Rules:
    """`rules`, or where they hold out none of so few documents, such that one is: that with the smallest hash."""
    smallest = 1 << 64
    for piece in pieces:
        for _, entries in piece.slices():
            smallest = min(smallest, int(entries["first"].min()))
            if smallest < rules.valid_below:
                return rules
    return replace(rules, valid_below=min(smallest + 1, 1 << 64))


def merge(
    pieces: Sequence[Piece], selection: Selection, vocab_size: int, folder: Path, workers: Workers
) -> dict[str, dict]:
    """Write the shards into `folder`, an existing one; returns the manifest's "splits"."""
    shards = cut(pieces, selection)
    calls = [
        (folder, split, number, spans, selection, vocab_size)
        for split in SPLITS
        for number, spans in enumerate(shards[split])
    ]
    written = iter([*workers.map(write_shard, calls)])
    return {split: split_entry([next(written) for _ in shards[split]]) for split in SPLITS}


def cut(
    pieces: Sequence[Piece], selection: Selection, shard_tokens: int = SHARD_TOKENS
) -> dict[str, list[list[Span]]]:
    """The shards of each split: a shard is closed by the document that takes it past `shard_tokens`."""
    shards: dict[str, list[list[Span]]] = {split: [] for split in SPLITS}
    room = dict.fromkeys(SPLITS, 0)  # tokens that the split's last shard still takes; 0: it is closed
    number = 0
    for piece in pieces:
        for start, entries in piece.slices():
            for split, mask in selection.masks(entries, number + start).items():
                ends = np.cumsum(np.where(mask, entries["tokens"], 0), dtype=np.int64)
                done = behind = 0
                while len(ends) and ends[-1] > behind:  # there are documents left
                    if room[split] <= 0:
                        shards[split].append([])
                        room[split] = shard_tokens
                    stop = min(int(np.searchsorted(ends, behind + room[split])) + 1, len(ends))
                    shards[split][-1].append(Span(piece.path, number, start + done, start + stop))
                    room[split] -= int(ends[stop - 1]) - behind
                    done, behind = stop, int(ends[stop - 1])
        number += piece.documents
    return shards


def write_shard(
    folder: Path, split: str, number: int, spans: Sequence[Span], selection: Selection, vocab_size: int
) -> Shard:
    """Write one shard into `folder`, unless its marker says that it is there. Raises DataError for a damaged piece."""
    name = shard_name(split, number)
    marker = folder / f".{name}.json"
    if marker.exists():
        return Shard(**json.loads(marker.read_text()))
    writer = ShardWriter(folder, name, token_dtype(vocab_size))
    checked = None
    try:
        for span in spans:
            piece = Piece(span.piece)
            if checked != span.piece:
                piece.check()
                checked = span.piece
            _copy(piece, span, split, selection, writer)
        shard = writer.close()
    except BaseException:
        writer.abort()
        raise
    write_text(marker, json.dumps(asdict(shard)))
    return shard


def _copy(piece: Piece, span: Span, split: str, selection: Selection, writer: ShardWriter) -> None:
    tokens = piece.token_map()
    behind = sum(int(entries["tokens"].sum(dtype=np.int64)) for entries in _slices(piece, 0, span.start))
    at = span.start
    for entries in _slices(piece, span.start, span.stop):
        ends = behind + np.cumsum(entries["tokens"], dtype=np.int64)
        mask = selection.masks(entries, span.number + at)[split]
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        for a, b in edges.reshape(-1, 2):  # runs of documents that are taken
            begin = int(ends[a - 1]) if a else behind
            writer.write(tokens[begin : ends[b - 1]], entries["tokens"][a:b], entries["bytes"][a:b])
        behind, at = int(ends[-1]), at + len(entries)


def _slices(piece: Piece, start: int, stop: int):
    return (piece.entries(at, min(at + SLICE, stop)) for at in range(start, stop, SLICE))
