"""What a prepared data set holds, for a person: counts, lengths, and a look at some documents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nvfp4_train.data.dataset import SPLITS, Dataset
from nvfp4_train.data.shards import ShardReader
from nvfp4_train.units import count, printable, table

_SLICE = 1 << 20  # documents whose index is looked at together
_WIDTH = 40
_SAMPLE_TOKENS = 60


def summary(dataset: Dataset) -> str:
    """Counts of both splits, and what compressors need for the held-out text."""
    rows = [
        ("folder", str(dataset.path)),
        ("source", dataset.manifest["source"]),
        ("tokenizer", f"{dataset.tokenizer.vocab_size:,} pieces, {dataset.tokenizer.hash[:16]}"),
    ]
    for split, name in zip(SPLITS, ("training", "held out"), strict=True):
        documents, tokens, n_bytes = (
            dataset.n_documents(split),
            dataset.n_tokens(split),
            dataset.n_bytes(split),
        )
        rows.append(
            (
                name,
                f"{documents:,} documents, {n_bytes:,} bytes, {tokens:,} tokens ({n_bytes / tokens:.2f} bytes a token)",
            )
        )
    baselines = dataset.baselines()
    rows.append(
        ("compressors", f"gzip -9 {baselines['gzip']:.3f}, xz -9 {baselines['xz']:.3f} bits a byte, held out")
    )
    return table(rows)


def histogram(dataset: Dataset, split: str = "train") -> str:
    """Documents by length in tokens (eos included), a row for each power of two, with the share of tokens in each."""
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    for reader in dataset.readers(split):
        for lengths in _lengths(reader):
            powers = np.frexp(lengths)[1] - 1  # exact: 2^p <= length < 2^(p+1)
            documents += np.bincount(powers, minlength=64)
            tokens += np.bincount(powers, lengths, minlength=64).astype(np.int64)
    rows = []
    used = np.flatnonzero(documents)
    for power in range(used[0], used[-1] + 1):
        bar = "#" * round(_WIDTH * documents[power] / documents.max())
        share = tokens[power] / tokens.sum()
        label = f"{2**power:,} to {2 ** (power + 1) - 1:,}"
        rows.append((label, f"{count(int(documents[power])):>5} documents, {share:6.1%} of tokens  {bar}"))
    return f"Length of {split} documents in tokens:\n" + table(rows)


def samples(dataset: Dataset, n: int = 3, split: str = "train") -> str:
    """The starts of `n` documents, evenly spaced over the split."""
    chosen = {round((i + 0.5) * dataset.n_documents(split) / n - 0.5) for i in range(n)}
    lines, number, token = [f"Some {split} documents, how they start:"], 0, 0
    for reader in dataset.readers(split):
        index = reader.index()
        for i in sorted(c - number for c in chosen if number <= c < number + len(index)):
            start = int(index[i - 1, 0]) if i else 0
            tokens = reader.read(start, min(int(index[i, 0]), start + _SAMPLE_TOKENS)).tolist()
            text = printable(dataset.tokenizer.decode(tokens)).replace("\n", "\n    ")
            lines.append(
                f"  document {number + i:,}, token {token + start:,}, {int(index[i, 1]):,} bytes\n    {text}"
            )
        number, token = number + len(index), token + reader.shard.tokens
    return "\n".join(lines)


def _lengths(reader: ShardReader) -> Iterator[np.ndarray]:
    index, before = reader.index(), 0
    for at in range(0, len(index), _SLICE):
        ends = np.asarray(index[at : at + _SLICE, 0])
        yield np.diff(ends, prepend=before)
        before = int(ends[-1])
