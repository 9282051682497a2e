"""What the data pipeline costs and whether it keeps its promises: python scripts/bench_loader.py [huge|exact|speed ...]

Opens a synthetic data set of 10^10 documents (its shards are links to one real shard) and asks for steps all over it;
counts epochs and mixtures; compares ranks, workers and restarts; and reads from the page cache as fast as it can.
Needs 1 GiB of free disk and takes about a minute on two cores.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch

from nvfp4_train import units
from nvfp4_train.data import tokenizer as tokenizers
from nvfp4_train.data.corpora import Corpora
from nvfp4_train.data.dataset import open_dataset, write_manifest
from nvfp4_train.data.loader import Loader
from nvfp4_train.data.mixture import Draw, Segment, shares_of
from nvfp4_train.data.sampler import Sampler
from nvfp4_train.data.shards import Shard, ShardWriter, split_entry, token_dtype
from nvfp4_train.data.tokenizer import MODEL_FILE, Tokenizer

DOCUMENTS = 10**10
SHARD_TOKENS, MEAN_TOKENS = 1 << 28, 1000
Rows = list[tuple[str, str]]


def main() -> None:
    wanted = sys.argv[1:] or ["huge", "exact", "speed"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = write_dataset(Path(folder) / "one")
        sections = {"huge": lambda: huge(Path(folder), data), "exact": exact, "speed": lambda: speed(data)}
        for name in wanted:
            print(units.table(sections[name](), indent=""), end="\n\n", flush=True)


def write_dataset(folder: Path) -> Path:
    """A data set of one shard, its documents of log-normal lengths."""
    folder.mkdir()
    text = Path(tokenizers.__file__).read_text() * 4
    tokenizer = Tokenizer(tokenizers.train([text], 512))
    (folder / MODEL_FILE).write_bytes(tokenizer.model)
    rng = np.random.default_rng(0)
    splits = {}
    for split, size in (("train", SHARD_TOKENS), ("valid", 1 << 16)):
        lengths = rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, size // MEAN_TOKENS).astype(np.int64) + 2
        tokens = rng.integers(3, tokenizer.vocab_size, lengths.sum(), dtype=np.uint16)
        tokens[np.cumsum(lengths) - 1] = tokenizer.eos_id
        writer = ShardWriter(folder, f"{split}-00000", token_dtype(tokenizer.vocab_size))
        writer.write(tokens, lengths, 4 * lengths)
        splits[split] = split_entry([writer.close()])
    entry = {"file": MODEL_FILE, "sha256": tokenizer.hash, "vocab_size": 512, "eos_id": tokenizer.eos_id}
    write_manifest(
        folder,
        {"source": "synthetic", "tokenizer": entry, "splits": splits, "baselines": {"gzip": 8.0, "xz": 8.0}},
    )
    return folder


def huge(parent: Path, one: Path) -> Rows:
    """A data set of 10^10 documents: opened, and read at any step."""
    manifest = open_dataset(one).manifest
    shard = Shard(**manifest["splits"]["train"]["shards"][0])
    count = -(-DOCUMENTS // shard.documents)
    folder = parent / "huge"
    folder.mkdir()
    os.link(one / MODEL_FILE, folder / MODEL_FILE)
    for name in ("valid-00000.bin", "valid-00000.idx"):
        os.link(one / name, folder / name)
    shards = []
    for i in range(count):
        named = replace(shard, tokens_file=f"train-{i:05d}.bin", index_file=f"train-{i:05d}.idx")
        os.link(one / shard.tokens_file, folder / named.tokens_file)
        os.link(one / shard.index_file, folder / named.index_file)
        shards.append(named)
    content = {key: value for key, value in manifest.items() if key not in ("format", "format_version")}
    write_manifest(folder, {**content, "splits": {**manifest["splits"], "train": split_entry(shards)}})
    del shards, content
    gc.collect()

    before = psutil.Process().memory_info().rss
    begin = time.perf_counter()
    dataset = open_dataset(folder)
    opened = time.perf_counter() - begin
    rows = [
        (
            "documents",
            f"{dataset.n_documents('train'):,} ({dataset.n_tokens('train'):.3g} tokens, {count:,} shards)",
        ),
        ("opening, with the fast check of all files", f"{opened:.2f} s"),
    ]
    rng = random.Random(0)
    for packing in ("stream", "documents"):
        for seq_len, batch in ((2048, 8), (8192, 8), (8192, 64)):
            begin = time.perf_counter()
            sampler = Sampler(
                Corpora({"huge": dataset}, packing=packing), seq_len=seq_len, global_batch_size=batch, seed=1
            )
            built = 1e3 * (time.perf_counter() - begin)
            times = []
            for _ in range(50):
                step = rng.randrange(10**7)
                begin = time.perf_counter()
                sampler.batch(step)
                times.append(1e3 * (time.perf_counter() - begin))
            spent = f"median {statistics.median(times):.2f} ms, worst of 50 {max(times):.2f} ms"
            rows.append(
                (f"batch(step), {packing}, {batch} x {seq_len}", f"{spent}; sampler made in {built:.2f} ms")
            )
    gc.collect()
    rows.append(
        (
            "memory, opened and read",
            units.size(psutil.Process().memory_info().rss - before) + " more than before",
        )
    )
    return rows


def exact() -> Rows:
    """Counts that must hold exactly, or within what is promised."""
    rows = []
    for packing in ("stream", "documents"):
        text = Corpora({"text": Lengths(seed=1, documents=20_000)}, packing=packing)
        sampler = Sampler(text, seq_len=1024, global_batch_size=7, seed=3)
        (count,) = sampler.n_sequences.values()
        steps = [sampler.sequences(step) for step in range(-(-2 * count // 7))]
        _, epochs, numbers = (np.concatenate(parts)[: 2 * count] for parts in zip(*steps, strict=True))
        once = all((np.sort(numbers[epochs == e]) == np.arange(count)).all() for e in (0, 1))
        rows.append((f"each sequence once in each of two epochs, {packing}", f"{once} ({count:,} sequences)"))
    for weights in ((70, 20, 10), (0.5, 0.3, 0.15, 0.04, 0.01)):
        shares = shares_of({f"corpus {i}": weight for i, weight in enumerate(weights)})
        corpora, _ = Draw([Segment(0, shares)], 736, seed=1).places(0, 10**6)
        worst = max(abs((corpora == i).mean() / share - 1) for i, share in enumerate(shares.values()))
        rows.append(
            (
                f"10^6 sequences mixed {'/'.join(map(str, weights))}",
                f"within {100 * worst:.4f} % of each weight",
            )
        )

    segments = [Segment(0, shares_of({"a": 3, "b": 1})), Segment(40, shares_of({"b": 1, "c": 1}))]
    data = {name: Lengths(seed, documents=3000) for seed, name in enumerate("abc")}
    corpora = Corpora(data, segments, "documents")
    runs = [[(0, ranks, workers)] for ranks in (1, 2, 3, 4, 8) for workers in (0, 2)]
    runs.append([(0, 8, 2), (1, 3, 0), (38, 2, 2), (40, 6, 2), (41, 1, 0), (97, 4, 2)])
    hashes = {digest_of(corpora, launches, steps=100) for launches in runs}
    what = "100 global batches, 1, 2, 3, 4, 8 ranks x 0, 2 workers, and restarts with other ranks"
    rows.append((what, "identical" if len(hashes) == 1 else f"{len(hashes)} DIFFERENT ONES"))
    return rows


def digest_of(corpora: Corpora, launches: list[tuple[int, int, int]], steps: int) -> str:
    """Of the global batches of a run that was launched at these (step, ranks, workers)."""
    digest = hashlib.sha256()
    ends = [*(launch[0] for launch in launches[1:]), steps]
    for (first, ranks, workers), end in zip(launches, ends, strict=True):
        sampler = Sampler(corpora, seq_len=256, global_batch_size=48, seed=5, reset_state_at_documents=True)
        count = 48 // ranks
        loaders = [Loader(sampler, first, rank * count, count, workers=workers) for rank in range(ranks)]
        for _ in range(first, end):
            parts = [loader.next() for loader in loaders]
            masks = [torch.ones(p.tokens.shape, dtype=bool) if p.mask is None else p.mask for p in parts]
            for tensors in (
                [p.tokens for p in parts],
                [p.targets for p in parts],
                [p.seq_idx for p in parts],
                masks,
            ):
                digest.update(torch.cat(tensors).numpy().tobytes())
        for loader in loaders:
            loader.close()
    return digest.hexdigest()


class Lengths:
    """A data set of documents of random lengths whose token i is i, in memory."""

    path = "memory"

    def __init__(self, seed: int, documents: int) -> None:
        self._ends = np.cumsum(np.random.default_rng(seed).integers(2, 2000, documents))
        self.tokenizer = SimpleNamespace(eos_id=0, hash="")

    def n_tokens(self, split: str) -> int:
        return int(self._ends[-1])

    def document_spans(self, split: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(self._ends, stop, side="left")
        return np.concatenate([[0], self._ends])[first : last + 1], self._ends[first : last + 1]

    def raw_tokens(self, split: str, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)


def speed(one: Path) -> Rows:
    """Tokens a second from the page cache, the loader alone: two threads of it, and the thread that takes the batches."""
    dataset = open_dataset(one)
    for name in os.listdir(one):
        (one / name).read_bytes()  # into the page cache
    rows = []
    for packing, seq_len, batch, reset in (
        ("stream", 256, 8, False),
        ("stream", 2048, 32, False),
        ("stream", 8192, 8, False),
        ("stream", 8192, 8, True),
        ("documents", 2048, 32, True),
        ("documents", 8192, 8, True),
    ):
        sampler = Sampler(
            Corpora({"text": dataset}, packing=packing),
            seq_len=seq_len,
            global_batch_size=batch,
            seed=1,
            reset_state_at_documents=reset,
        )
        rates = [f"{workers} workers {rate(sampler, workers):6.1f}" for workers in (0, 1, 2)]
        name = f"{packing}, {batch} x {seq_len}{', seq_idx' if reset else ''}"
        rows.append((name, f"{', '.join(rates)} M tokens/s"))
    return rows


def rate(sampler: Sampler, workers: int, seconds: float = 1.5) -> float:
    """Million tokens a second."""
    with Loader(sampler, 0, workers=workers) as loader:
        loader.next()
        begin, tokens = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            tokens += loader.next().tokens.numel()
        return tokens / (time.perf_counter() - begin) / 1e6


if __name__ == "__main__":
    main()
