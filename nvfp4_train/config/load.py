"""From command-line arguments to a typed `Config`, in Hydra's syntax.

Hydra composes through its compose API, so it writes no files, changes no folder and sets up no logging. Every mistake
becomes a ConfigError of one sentence. Nothing here imports torch: a mistake is told within the first second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nvfp4_train.config.overrides import check_overrides, explain, open_dicts
from nvfp4_train.config.schema import Config
from nvfp4_train.errors import ConfigError

# Inside the package this is a link to the repository's configs/, which a wheel holds as files.
CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"


def option_names(group: str) -> list[str]:
    """The choices of a group: the YAML files in its folder."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def groups() -> dict[str, list[str]]:
    """Every group with its choices."""
    return {path.name: option_names(path.name) for path in sorted(CONFIG_DIR.iterdir()) if path.is_dir()}


def compose_config(overrides: Sequence[str]) -> Config:
    """The configuration of `overrides` ("key=value", "group=option", "+experiment=NAME") as plain dataclasses.

    Raises ConfigError on anything unknown, of the wrong type or missing. Values that fit their type are checked
    against each other by `validate`.
    """
    return OmegaConf.to_object(_compose(overrides))


def load(argv: Sequence[str], prog: str = "nvfp4_train.pretrain") -> Config | None:
    """The configuration that the command line asks for, or None when it asked for text, which is then printed.

    `--cfg job` prints the resolved configuration as YAML, `--help` how to write a command line.
    """
    args = _parse(argv, prog)
    if args.help:
        print(_help(prog))
        return None
    if args.multirun:
        raise ConfigError("--multirun is not supported: start one process for each configuration.")
    cfg = _compose(args.overrides)
    if args.cfg:
        print(OmegaConf.to_yaml(cfg, resolve=True), end="")
        return None
    return OmegaConf.to_object(cfg)


def _compose(overrides: Sequence[str]) -> DictConfig:
    check_overrides(overrides, Config, groups())
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            cfg = compose("pretrain", overrides=open_dicts(overrides, Config))
        OmegaConf.resolve(cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, Config)) from error
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: no value given; set {missing[0]}=VALUE or choose +experiment="
            f"{'|'.join(option_names('experiment'))}."
        )
    return cfg


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message}: see --help.")


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = _Parser(prog=f"python -m {prog}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")  # Hydra's; `--cfg job` always resolves here
    parser.add_argument("--multirun", "-m", action="store_true")
    return parser.parse_intermixed_args(list(argv))


def _help(prog: str) -> str:
    choices = "\n".join(f"  {group + '=':<12} {' '.join(names)}" for group, names in groups().items())
    return f"""usage: python -m {prog} +experiment=NAME [group=OPTION ...] [key=value ...]

Groups and their options:
{choices.replace("  experiment=", " +experiment=")}

Keys: `--cfg job` prints all of them with their values; nvfp4_train/config/schema.py says what they mean.
  dry_run=true              check everything, print the plan of the run, and stop
  run_dir=DIR               the run's folder; the same command again resumes what is in it
  training.max_tokens=1e9   lengths in tokens; precision=bf16 for the baseline

Exit codes: 0 finished, 2 bad configuration, 75 stopped by a signal after saving, 76 recovery gave up, 1 else."""
