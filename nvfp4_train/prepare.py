"""`python -m nvfp4_train.prepare data.source=PATH out=DIR [key=value ...]`: text to a prepared data set.

action=build   make the data set in DIR (default); done already, it says so at once; killed, it goes on where it was
action=merge   make it of the parts that several machines have encoded, see below
action=verify  check every byte of DIR against its checksums
action=stats   print what DIR holds: counts, lengths, some documents

data.source is a file, folder, glob or fsspec URL of .txt .md .py .jsonl (also .gz .zst) and .parquet, "hf:NAME" of a
Hugging Face data set, or "stdlib". Other keys: vocab_size, workers, data.tokenizer, data.text_key,
data.drop_duplicates, data.valid_fraction, data.max_train_bytes, data.hf_* (nvfp4_train/config/schema.py).

On several machines that share DIR's parent: the same command with part=1/64 to part=64/64, in any order, then once
with action=merge. Training then takes data.source=DIR. Exit codes: 0 done, 2 something to put right, told in one sentence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nvfp4_train.cli import exit_code
from nvfp4_train.config.checks import one_of
from nvfp4_train.config.overrides import check_overrides, explain
from nvfp4_train.config.schema import PrepareConfig
from nvfp4_train.data.build import prepare_into
from nvfp4_train.data.dataset import open_dataset
from nvfp4_train.data.describe import histogram, samples, summary
from nvfp4_train.data.encode import Part
from nvfp4_train.data.progress import Progress, ProgressLine
from nvfp4_train.data.shards import check_contents
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.data.workers import Workers, cores
from nvfp4_train.errors import ConfigError

DEFAULT_VOCAB_SIZE = 4096


def main(argv: Sequence[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
    else:
        _run(parse(argv))


def parse(overrides: Sequence[str]) -> PrepareConfig:
    """The configuration of "key=value" overrides. Raises ConfigError on anything unknown, mistyped or missing."""
    check_overrides(overrides, PrepareConfig, {})
    cfg = OmegaConf.structured(PrepareConfig)
    try:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            OmegaConf.update(cfg, override.key_or_group, override.value())
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, PrepareConfig)) from error
    if OmegaConf.is_missing(cfg, "out"):
        raise ConfigError("out: no value given; set out=DIR to the data set's folder.")
    one_of("action", cfg.action, ["build", "merge", "verify", "stats"])
    if cfg.workers is not None and cfg.workers < 1:
        raise ConfigError(f"workers={cfg.workers} must be at least 1, or null for one a core.")
    return OmegaConf.to_object(cfg)


def _run(cfg: PrepareConfig) -> None:
    out = Path(cfg.out).expanduser()
    if cfg.action == "verify":
        _verify(out, cfg.workers or cores())
    elif cfg.action == "stats":
        dataset = open_dataset(out)
        print("\n\n".join([summary(dataset), histogram(dataset), samples(dataset)]))
    else:
        part = Part.parse(cfg.part) if cfg.part is not None else None
        if part and cfg.action == "merge":
            raise ConfigError(f"part={cfg.part} doesn't go with action=merge: leave it out.")
        built = prepare_into(
            out, cfg.data, _vocab_size(cfg), _report, part, cfg.workers, merge_only=cfg.action == "merge"
        )
        if part and built != out:
            print(f"Part {cfg.part} is done. When all are: the same command with action=merge, without part.")
        else:
            print(summary(open_dataset(out)))


def _verify(out: Path, workers: int) -> None:
    dataset = open_dataset(out)
    readers = dataset.readers()
    progress = Progress("Checking", sum(reader.size for reader in readers), _report)
    done = 0
    calls = [(out, reader.shard, dataset.tokenizer.vocab_size) for reader in readers]
    with Workers(min(workers, len(readers))) as pool:
        for reader, _ in zip(readers, pool.map(check_contents, calls), strict=True):
            done += reader.size
            progress(done, done)
    print(f"{out} is whole: {2 * len(readers)} files of shards, the tokenizer and the manifest.")


def _report(line: str) -> None:
    """A line of progress replaces the one before it, on a terminal."""
    try:
        if not sys.stdout.isatty():
            print(line, flush=True)
        else:
            print(f"\r\x1b[K{line}", end="" if isinstance(line, ProgressLine) else "\n", flush=True)
    except BrokenPipeError:  # `| head`: the reader has seen enough, the work goes on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _vocab_size(cfg: PrepareConfig) -> int:
    if cfg.vocab_size is not None:
        return cfg.vocab_size
    return Tokenizer.load(cfg.data.tokenizer).vocab_size if cfg.data.tokenizer else DEFAULT_VOCAB_SIZE


if __name__ == "__main__":
    sys.exit(exit_code(main))
