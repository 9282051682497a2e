"""Text for tests: the same on every machine and Python, with enough order that a tiny model learns some of it."""

from __future__ import annotations

import random
from pathlib import Path


def write_documents(folder: Path, n: int = 16, seed: int = 0) -> Path:
    """Make `folder` with `n` documents of some 8 kB, all of them different; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        (folder / f"document_{i:02}.py").write_text(document(seed * 1000 + i))
    return folder


def data_words(root: Path) -> list[str]:
    """A run's words for such documents, a fifth of them held out; everything lies in `root`."""
    source = write_documents(root / "text")
    return [f"data.source={source}", f"data.cache_dir={root / 'cache'}", "data.valid_fraction=0.2"]


def document(seed: int) -> str:
    """About 250 lines of words, each of which has favourite successors."""
    draw = random.Random(seed)
    lines, word = [f"# document {seed}"], _WORDS[0]
    for _ in range(250):
        line = []
        for _ in range(2 + int(6 * draw.random())):
            word = draw.choices(_SUCCESSORS[word], weights=(8, 4, 2, 1))[0]
            line.append(word)
        head = draw.choices(("def {}({}):", "    {} = {}", "        return {}({})", "# {} {}"))[0]
        lines.append(head.format(line[0], draw.choices((", ", " + ", " "))[0].join(line[1:])))
    return "\n".join(lines) + "\n"


def _vocabulary() -> tuple[list[str], dict[str, list[str]]]:
    draw = random.Random("words")  # its own, so that documents share their words
    syllables = [a + b for a in "bcdfglmnprst" for b in "aeiou"]
    words = sorted({"".join(draw.choices(syllables, k=1 + int(3 * draw.random()))) for _ in range(400)})
    return words, {word: draw.choices(words, k=4) for word in words}


_WORDS, _SUCCESSORS = _vocabulary()
