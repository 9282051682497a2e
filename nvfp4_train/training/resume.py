"""What the second launch of a run folder may change, and what it starts from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from nvfp4_train.config.schema import Config, TrainingConfig
from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.agreement import Group, from_first
from nvfp4_train.distributed.checkpoint import Checkpoint
from nvfp4_train.errors import CheckpointError
from nvfp4_train.training.history import History, forget_journal, read_journal
from nvfp4_train.training.metrics import truncate_after
from nvfp4_train.training.recovery_report import abandoned_path
from nvfp4_train.training.rewinding import discard_abandoned
from nvfp4_train.training.run_folder import RunFolder, checkpoints_of

# Keys that don't decide what a step computes (or, as the budget and the limits, are meant to be moved).
MAY_CHANGE = (
    "run_dir",
    "dry_run",
    "experiment",
    "device",
    "data.cache_dir",
    "data.corpora.*",  # each name must mean the data set that it meant: data/corpora.py
    "data.mixture",  # from the resumed step on
    "data.workers",
    "training.max_tokens",
    "training.max_steps",
    "training.log_every",
    "training.validate_*",
    "training.sample_*",
    "training.compile",
    "training.kernels",
    "training.deterministic",
    "training.recompute*",
    "recovery.name",
    "recovery.max_*",
    "recovery.*sigmas",  # detection: an alarm that was none is answered with another threshold
    "recovery.skip_norm",
    "recovery.*_floor",
    "recovery.confirm",
    "recovery.slow_*",
    "recovery.health_jump",
    "recovery.snapshot*",
    "recovery.skip_margin",
    "recovery.forget_after",
    "recovery.careful_*",
    "recovery.read_retries",
    "recovery.hang_seconds",
    "precision.health_every",
    "faults",
    "parallel.*",
    "checkpoint.*",
    "logging.*",
)

_ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Start:
    """What a launch starts from: a checkpoint or None, the allowed changes {key: [was, now]}, whether the run had
    finished already (then nothing was touched), and the rewinds of the launches before."""

    checkpoint: Checkpoint | None
    changed: dict[str, list[Any]]
    finished: bool = False
    history: History = dataclasses.field(default_factory=History)

    @property
    def data(self) -> tuple[dict[str, Any] | None, int]:
        """What the batches before the checkpoint's next one were drawn from (`Corpora.record`; None at the start), and the
        number of that one when it was saved: a later rewind may step over it, which doesn't move the phases."""
        if self.checkpoint is None:
            return None, 0
        known = History.from_state(self.checkpoint.values["recovery"]["rewinds"])
        return self.checkpoint.values["data"], known.batch(self.checkpoint.step + 1)


def begin(folder: RunFolder, cfg: Config, warn: Callable[[str], None], group: Group = None) -> Start:
    """Find the newest whole checkpoint, compare configurations, cut metrics.jsonl back, record this launch.

    All ranks of `group` call, share the checking of the files and get the same; the first one writes.
    Without a checkpoint there is nothing to go on with: the run starts over, with any configuration.
    Raises CheckpointError when `cfg` differs in a key that must stay, with all such keys.
    """
    places, history = from_first(group, lambda: _clean(folder))
    for place in places:
        if found := checkpoint.newest(place, warn, group):
            break
    return from_first(group, lambda: _begin(folder, cfg, found, history))


def _clean(folder: RunFolder) -> tuple[list[str], History]:
    """Where checkpoints may be, with what a killed launch left taken out: where they go now, and where the latest launch
    put them if that was elsewhere."""
    saved = (folder.saved_config or {}).get("checkpoint", {}).get("dir")
    places = list(dict.fromkeys([str(folder.checkpoints), str(checkpoints_of(folder.path, saved))]))
    history = read_journal(folder.path)
    for place in places:
        checkpoint.sweep(place)
        # A kill may have come between a rewind's journal and the rest of it.
        discard_abandoned(place, history)
    return places, history


def _begin(folder: RunFolder, cfg: Config, found: Checkpoint | None, history: History) -> Start:
    changed = {}
    if found is None and _is_another_run(folder, cfg):
        history = forget_journal(folder.path)
    if found is not None:
        if folder.saved_config is None:
            raise CheckpointError(
                f"{folder.path} has checkpoints but no config.yaml: restore it, or set run_dir to a new folder"
            )
        changed = check_changes(folder.saved_config, cfg, str(folder.path))
        if folder.finished_step is not None and found.step >= total_steps(cfg.training):
            return Start(found, changed, finished=True)
    left = abandoned_path(folder.path, len(history.rewinds))
    moved_to = left if history.rewinds and not left.exists() else None
    truncate_after(folder.metrics, found.step if found else -1, moved_to)
    folder.start(cfg)
    return Start(found, changed, history=history)


def _is_another_run(folder: RunFolder, cfg: Config) -> bool:
    """Whether a run that starts over has nothing to do with the one that the folder holds."""
    try:
        check_changes(folder.saved_config or {}, cfg, str(folder.path))
    except CheckpointError:
        return True
    return folder.saved_config is None


def total_steps(cfg: TrainingConfig) -> int:
    """Steps of the whole run: the first that reaches `max_tokens`, or `max_steps` if that is earlier."""
    steps = math.ceil(cfg.max_tokens / (cfg.global_batch_size * cfg.seq_len))
    return steps if cfg.max_steps is None else min(steps, cfg.max_steps)


def check_changes(saved: dict[str, Any], cfg: Config, where: str) -> dict[str, list[Any]]:
    """The keys that differ and may, {key: [was, now]}. Raises CheckpointError listing those that must not."""
    differing = differences(saved, cfg)
    refused = {key: pair for key, pair in differing.items() if not _may_change(key)}
    if refused:
        lines = "".join(f"\n  {key}: was {was!r}, now {now!r}" for key, (was, now) in refused.items())
        raise CheckpointError(
            f"the run in {where} can't go on with a changed configuration; restore these keys, or set run_dir to a "
            f"new folder:{lines}"
        )
    return differing


def differences(saved: dict[str, Any], cfg: Config) -> dict[str, list[Any]]:
    """{dotted key: [saved value, value now]}. A key that the saved one lacks had today's default."""
    was = flatten(dataclasses.asdict(Config())) | flatten(saved)
    now = flatten(dataclasses.asdict(cfg))
    keys = [*now, *(key for key in flatten(saved) if key not in now)]
    pairs = {key: [was.get(key, _ABSENT), now.get(key, _ABSENT)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to dotted keys; lists are values."""
    out = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)
