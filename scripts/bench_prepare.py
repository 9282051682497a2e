"""How fast `prepare` is beside SentencePiece alone, what memory it takes, and that a kill costs nothing but time.

    python scripts/bench_prepare.py source=FOLDER_OR_GLOB work=DIR [vocab_size=32768] [workers=2] [seed=0]

Trains a tokenizer on a sample of the text, encodes all of it with SentencePiece in this process (documents in memory, ids as
lists: its own rate), then runs `python -m nvfp4_train.prepare` with that tokenizer: once unbroken, from start of the
interpreter to its exit, watching the memory of all its processes; and once killed (SIGKILL) at three random moments and
started again each time. Prints a table in Markdown.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import sentencepiece

from nvfp4_train import cli
from nvfp4_train.data.dataset import MANIFEST
from nvfp4_train.data.encode import hashes
from nvfp4_train.data.sources import find_source
from nvfp4_train.data.tokenizer import Sample, train

KILLS = 3


@dataclass
class Options:
    source: str = cli.option("text to prepare")
    work: str = cli.option("folder for the results, emptied first")
    vocab_size: int = cli.option("pieces of the tokenizer", 32768)
    workers: int = cli.option("processes", 2)
    seed: int = cli.option("of the moments of the kills", 0)


def main(argv: list[str]) -> None:
    options = cli.parse(argv, Options, "scripts/bench_prepare.py")
    if options is None:
        return
    work = Path(options.work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    texts = [document.text for document, _ in find_source(options.source).documents()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    start = time.perf_counter()
    sample = Sample()
    for text in texts:
        sample.add(hashes(text.encode())[1], text.encode())
    model = train(sample.texts(1 << 64), options.vocab_size)
    (work / "tokenizer.model").write_bytes(model)
    rows = [("tokenizer trained on 8 MiB", f"{time.perf_counter() - start:.1f} s")]

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    start = time.perf_counter()
    tokens = sum(len(processor.encode(text, out_type=int)) for text in texts)
    alone = megabytes / (time.perf_counter() - start)
    rows.append(("SentencePiece alone, one process", f"{alone:.2f} MB/s"))
    rows.append(("documents, text, tokens", f"{len(texts):,}, {megabytes:.1f} MB, {tokens:,}"))
    del texts

    seconds, memory = _unbroken(_command(options, work / "unbroken"))
    rate = megabytes / seconds
    rows.append((f"prepare, {options.workers} workers", f"{rate:.2f} MB/s ({seconds:.1f} s)"))
    rows.append(("of SentencePiece alone", f"{rate / alone:.2f} x"))
    rows.append(("peak memory of all its processes", f"{memory / 2**20:.0f} MiB"))

    moments, same = _killed(options, work, seconds)
    rows.append(
        (f"killed after {', '.join(f'{moment:.1f}' for moment in moments)} s", f"manifest equal: {same}")
    )
    print("\n| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows))
    if not same:
        sys.exit(1)


def _command(options: Options, out: Path) -> list[str]:
    return [
        sys.executable, "-m", "nvfp4_train.prepare", f"data.source='{options.source}'", f"out={out}",
        f"workers={options.workers}", f"data.tokenizer={Path(options.work) / 'tokenizer.model'}",
    ]  # fmt: skip


def _unbroken(command: list[str]) -> tuple[float, int]:
    """Seconds, and the largest sum of resident memory over the process and its children, looked at every 20 ms."""
    start, peak = time.perf_counter(), 0
    process = psutil.Popen(command)
    while process.poll() is None:
        peak = max(peak, sum(_resident(p) for p in (process, *_children(process))))
        time.sleep(0.02)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - start, peak


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def _killed(options: Options, work: Path, seconds: float) -> tuple[list[float], bool]:
    """When it was killed, in seconds from each start, and whether the manifest is the unbroken run's."""
    rng = random.Random(options.seed)
    command, moments = _command(options, work / "killed"), []
    for _ in range(KILLS):
        moments.append(rng.uniform(0.05, 0.3) * seconds)  # together less than the whole
        process = subprocess.Popen(command)
        time.sleep(moments[-1])
        if process.poll() is not None:
            sys.exit(f"It ended before the kill after {moments[-1]:.1f} s: take another seed.")
        process.kill()
        process.wait()
    subprocess.run(command, check=True)
    manifests = [json.loads((work / run / MANIFEST).read_bytes()) for run in ("unbroken", "killed")]
    return moments, manifests[0] == manifests[1]


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
