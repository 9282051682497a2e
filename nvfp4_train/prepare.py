"""`python -m nvfp4_train.prepare data.source=PATH out=DIR [key=value ...]`: text to a prepared data set.

action=build   make the data set in DIR (default); done already, it says so at once
action=verify  check every byte of DIR against its checksums
action=stats   print what DIR holds

Other keys: vocab_size, data.tokenizer, data.valid_fraction, data.max_train_bytes (nvfp4_train/config/schema.py).
Training then takes data.source=DIR. Exit codes: 0 done, 2 something to put right, told in one sentence.
"""

from __future__ import annotations

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
from nvfp4_train.data.dataset import SPLITS, Dataset, open_dataset
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.errors import ConfigError
from nvfp4_train.units import table

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
    one_of("action", cfg.action, ["build", "verify", "stats"])
    return OmegaConf.to_object(cfg)


def _run(cfg: PrepareConfig) -> None:
    out = Path(cfg.out).expanduser()
    if cfg.action == "verify":
        dataset = open_dataset(out, check="full")
        print(
            f"{out} is whole: {2 * len(dataset.readers())} files of shards, the tokenizer and the manifest."
        )
    else:
        if cfg.action == "build":
            prepare_into(out, cfg.data, _vocab_size(cfg), report=lambda line: print(line, flush=True))
        print(describe(open_dataset(out)))


def _vocab_size(cfg: PrepareConfig) -> int:
    if cfg.vocab_size is not None:
        return cfg.vocab_size
    return Tokenizer.load(cfg.data.tokenizer).vocab_size if cfg.data.tokenizer else DEFAULT_VOCAB_SIZE


def describe(dataset: Dataset) -> str:
    """What a data set holds, for a person."""
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


if __name__ == "__main__":
    sys.exit(exit_code(main))
