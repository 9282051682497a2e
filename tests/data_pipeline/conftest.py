from __future__ import annotations

import random
from pathlib import Path

import pytest

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data.build import prepare
from nvfp4_train.data.dataset import Dataset, open_dataset

VOCAB = 384
WORDS = [
    "def",
    "return",
    "self",
    "the",
    "of",
    "value",
    "=",
    "(",
    ")",
    ":",
    "import",
    "naïve",
    "漢字",
    "x1",
    "42",
]


def make_text(rng: random.Random, words: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(["", " ", "  ", "\n"]) for _ in range(words))


def make_corpus(folder: Path, documents: int = 60, words: int = 200, seed: int = 0) -> Path:
    """A folder of `documents` text files, of differing lengths."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    for i in range(documents):
        (folder / f"{i:03d}.txt").write_bytes(make_text(rng, rng.randint(1, 2 * words)).encode())
    return folder


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="session")
def dataset(corpus, tmp_path_factory) -> Dataset:
    """A prepared data set, shared: don't change its files."""
    cfg = DataConfig(source=str(corpus), cache_dir=str(tmp_path_factory.mktemp("cache")), valid_fraction=0.1)
    return open_dataset(prepare(cfg, VOCAB, silent))
