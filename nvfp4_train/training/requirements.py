"""What a run needs of the machine, told before anything is built, with what to try instead."""

from __future__ import annotations

import glob
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from nvfp4_train import units
from nvfp4_train.config.layout import Layout, layout_of, world_size
from nvfp4_train.config.load import compose_config, option_names
from nvfp4_train.config.schema import Config
from nvfp4_train.data.sources import HUGGING_FACE
from nvfp4_train.errors import ConfigError
from nvfp4_train.model.flops import parameter_count
from nvfp4_train.training import machine
from nvfp4_train.training.memory import Memory, estimate, host_copies, snapshots_kept
from nvfp4_train.training.run_folder import checkpoints_of


class Problem(NamedTuple):
    """Something that the run needs and that is not there; every field is a phrase for people."""

    what: str
    needed: str
    there: str
    remedy: str


_NO_GPU = Problem(
    what="device",
    needed="a CUDA device, since device=cuda",
    there="none that torch sees; the memory above is planned for one",
    remedy="the run on a machine with a GPU, or device=auto",
)


def check(cfg: Config) -> None:
    """Raise ConfigError when the memory, disk or data that `cfg` needs is not there, with what to try instead.

    Also for device=cuda where there is none, and where a launcher started several processes.
    """
    if problems := find_problems(cfg):
        raise ConfigError(
            f"{cfg.experiment or cfg.model.name} can't run here as it stands:\n{units.table(rows_of(problems))}\n"
            f"{_alternatives(cfg)}"
        )


def rows_of(problems: list[Problem]) -> list[tuple[str, str]]:
    """Rows for `units.table`."""
    return [(p.what, f"needs  {p.needed}\nhas    {p.there}\ntry    {p.remedy}") for p in problems]


def find_problems(cfg: Config) -> list[Problem]:
    """What stands in the way of this run on this machine. Raises ConfigError for a device that is not there, but for a dry
    run, which may plan for another machine."""
    if cfg.dry_run and machine.planned_device(cfg.device).type == "cuda" and not torch.cuda.is_available():
        found = (_NO_GPU, _data(cfg), _disk(cfg))
    else:
        device = machine.resolve_device(cfg.device)
        found = (
            _memory(cfg, device.type, machine.memory_bytes(device)),
            _host(cfg, device.type),
            _data(cfg),
            _disk(cfg),
        )
    return [problem for problem in found if problem is not None]


def checkpoint_bytes(cfg: Config) -> int:
    """Size of one checkpoint: weights and AdamW's moments in fp32."""
    return 12 * parameter_count(cfg.model)


def _memory(cfg: Config, device_type: str, there: int) -> Problem | None:
    need = estimate(cfg, device_type, _layout(cfg))
    if need.total <= there:
        return None
    parts = ", ".join(f"{name} {units.size(value)}" for name, value in vars(need).items() if value)
    return Problem(
        what="memory",
        needed=f"{units.size(need.total)} on one device, for {parameter_count(cfg.model):,} parameters\n       ({parts})",
        there=units.size(there) + (" of GPU memory" if device_type == "cuda" else " of RAM"),
        remedy=_less_memory(cfg, device_type, there, need),
    )


def _host(cfg: Config, device_type: str) -> Problem | None:
    """Of a GPU's machine: the copies that all of its ranks keep there."""
    ranks = 1 if cfg.dry_run else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    need, there = ranks * host_copies(cfg, _layout(cfg)), machine.memory_bytes(torch.device("cpu"))
    if device_type == "cpu" or need <= there:
        return None
    return Problem(
        what="host memory",
        needed=f"{units.size(need)} for the copies that {ranks} rank{'s' * (ranks > 1)} save from and rewind to",
        there=f"{units.size(there)} of RAM",
        remedy=f"recovery=skip_nonfinite, which keeps none of the {snapshots_kept(cfg)} for rewinds"
        if snapshots_kept(cfg)
        else "a machine with more memory, or more of them",
    )


def _less_memory(cfg: Config, device_type: str, there: int, need: Memory) -> str:
    """The largest micro-batch that fits, or else a smaller model."""
    batch = cfg.training.global_batch_size
    for size in (n for n in range(cfg.training.micro_batch_size - 1, 0, -1) if batch % n == 0):
        smaller = replace(cfg, training=replace(cfg.training, micro_batch_size=size))
        if (total := estimate(smaller, device_type, _layout(cfg)).total) <= there:
            return f"training.micro_batch_size={size}, which needs {units.size(total)} and trains the same batches"
    state = need.weights + need.moments + need.gradients
    if state < there:
        return "a shorter training.seq_len, or a smaller model (model.pattern, model.hidden_size, ...)"
    return (
        "more ranks (torchrun; parallel.fsdp), a larger device or a smaller model; weights, moments and gradients\n"
        f"       alone take {units.size(state)} a rank"
    )


def _layout(cfg: Config) -> Layout:
    """That of the run, or of the plan of a run."""
    return layout_of(cfg, None if cfg.dry_run else world_size())


def _data(cfg: Config) -> Problem | None:
    sources = {f"data.corpora.{name}": source for name, source in cfg.data.corpora.items()}
    problems = (
        _missing(source, key) for key, source in (sources or {"data.source": cfg.data.source}).items()
    )
    return next((problem for problem in problems if problem), None)


def _missing(source: str, key: str) -> Problem | None:
    elsewhere = source == "stdlib" or source.startswith(HUGGING_FACE) or "://" in source
    if elsewhere or glob.has_magic(source) or os.path.exists(Path(source).expanduser()):
        return None
    return Problem(
        what="data",
        needed="text: a folder or file of .txt .md .py .jsonl .parquet, or a prepared data set",
        there=f"nothing: {key}={source} doesn't exist",
        remedy=f"{key}=FOLDER, or data=stdlib for a trial with Python's own source code",
    )


def _disk(cfg: Config) -> Problem | None:
    folder = checkpoints_of(Path(cfg.run_dir).expanduser().absolute(), cfg.checkpoint.dir)
    if not isinstance(folder, Path):
        return None  # an object store doesn't tell
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    # While a checkpoint is written the older ones are still there.
    copies = cfg.checkpoint.keep_last + 1
    need, free = copies * checkpoint_bytes(cfg), shutil.disk_usage(existing).free
    held = sum(f.stat().st_size for f in folder.glob("**/*") if f.is_file())
    if need <= free + held:
        return None
    key = "run_dir" if cfg.checkpoint.dir is None else "checkpoint.dir"
    return Problem(
        what="disk",
        needed=f"{units.size(need)} for {copies} checkpoints of {units.size(checkpoint_bytes(cfg))}",
        there=f"{units.size(free)} free at {existing}",
        remedy=f"{key}=DIR on a larger disk" + (", or checkpoint.keep_last=1" * (copies > 2)),
    )


def _alternatives(cfg: Config) -> str:
    """The other experiments that the memory suffices for."""
    device = machine.resolve_device(cfg.device)
    there = machine.memory_bytes(device)
    others = [
        compose_config([f"+experiment={name}"])
        for name in option_names("experiment")
        if name != cfg.experiment
    ]
    small = [other for other in others if 16 * parameter_count(other.model) < there]
    needs = sorted((estimate(other, device.type).total, other.experiment) for other in small)
    fitting = [f"+experiment={name} ({units.size(need)})" for need, name in needs if need <= there]
    if not fitting:
        return f"No experiment fits into {units.size(there)}."
    return f"What fits here: {', '.join(fitting)}; quickstart brings its own text."
