"""The run folder: all there is to know about a run, in one place.

run.json           format, run id, whether the run is finished
config.yaml        the resolved configuration
environment.json   one entry a launch: versions, machine, commit, command line
tokenizer.model    the tokenizer (or tokenizer.json), so that the run can be used where its data is not
metrics.jsonl      one object a step, and events
console.log        what was printed
checkpoints/       step_XXXXXXXX folders (elsewhere with checkpoint.dir)
failures/          collectives and stacks of ranks that lost another one
plots/
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from nvfp4_train.atomic import write_text
from nvfp4_train.config.schema import Config
from nvfp4_train.errors import CheckpointError

FORMAT = "nvfp4_train.run"
FORMAT_VERSION = 1
_OWN_NAMES = ("config.yaml", "environment.json", "metrics.jsonl", "console.log", "checkpoints", "plots")
_PACKAGES = ("numpy", "triton", "transformer-engine", "mamba-ssm", "sentencepiece", "hydra-core", "wandb")


class RunFolder:
    """A run folder that this process holds: no other trainer can open it until `close`."""

    def __init__(self, path: str | Path, checkpoints: str | None = None) -> None:
        """Make the folder, or open the one of an earlier launch. `checkpoints`: `checkpoint.dir`, their own place.

        Raises CheckpointError when another process trains in it, when it holds files of something else, or when
        a newer version of this program wrote it.
        """
        self._locate(Path(path).expanduser().absolute(), checkpoints)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._hold()
        except OSError as error:
            raise CheckpointError(
                f"run_dir={path} can't be written ({error.strerror}); set run_dir to a folder that can"
            ) from None
        try:
            self._run = self._open()
        except BaseException:
            self._lock.close()
            raise

    @classmethod
    def held_by_first(cls, path: Path, run_id: str, checkpoints: str | None) -> RunFolder:
        """The folder that the first rank holds, as the other ranks know it: they read it, and write checkpoints' parts."""
        folder = cls.__new__(cls)
        folder._locate(path, checkpoints)
        folder._run, folder._lock = {"run_id": run_id}, None
        return folder

    @property
    def run_id(self) -> str:
        """Names this run for trackers; the same in all its launches."""
        return self._run["run_id"]

    @property
    def finished_step(self) -> int | None:
        """The step at which the run finished, None if it hasn't."""
        return self._run["finished_step"]

    @property
    def saved_config(self) -> dict[str, Any] | None:
        """The configuration of the latest launch, None before `start`."""
        try:
            return yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise CheckpointError(
                f"{self.path / 'config.yaml'} is unreadable ({' '.join(str(error).split())}); restore it, or set "
                "run_dir to a new folder"
            ) from None

    def start(self, cfg: Config) -> None:
        """Record the configuration and the environment of this launch; the run counts as unfinished again."""
        self.plots.mkdir(exist_ok=True)
        write_text(self.path / "config.yaml", config_yaml(cfg))
        path = self.path / "environment.json"
        launches = _read_json(path)["launches"] if path.exists() else []
        environment = {"format_version": 1, "launches": [*launches, environment_of_launch()]}
        write_text(path, json.dumps(environment, indent=1) + "\n")
        self._update(finished_step=None)

    def finish(self, step: int) -> None:
        """Record that the run ended at `step`, with everything written."""
        self._update(finished_step=step)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _locate(self, path: Path, checkpoints: str | None) -> None:
        self.path = path
        self.checkpoints = checkpoints_of(path, checkpoints)
        self.plots = path / "plots"
        self.metrics = path / "metrics.jsonl"
        self.console_log = path / "console.log"

    def _hold(self) -> IO[str]:
        # Opened for appending: the holder's name must not be wiped by those who find it taken.
        lock = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held until close()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise CheckpointError(
                f"run_dir={self.path} is in use by {holder}; wait for it, stop it, or set another run_dir"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        return lock

    def _open(self) -> dict[str, Any]:
        path = self.path / "run.json"
        if not path.exists():
            if foreign := [name for name in _OWN_NAMES if (self.path / name).exists()]:
                raise CheckpointError(
                    f"run_dir={self.path} holds {', '.join(foreign)} but no run.json, so it isn't a run of this "
                    "program; set run_dir to a new folder"
                )
            run = {"format": FORMAT, "format_version": FORMAT_VERSION, "run_id": uuid.uuid4().hex[:8]}
            run |= {"created": _now(), "finished_step": None}
            write_text(path, json.dumps(run, indent=1) + "\n")
            return run
        run = _read_json(path)
        if run.get("format") != FORMAT:
            raise CheckpointError(f"{path} isn't of this program; set run_dir to a new folder")
        if run["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {run['format_version']}, this program reads up to {FORMAT_VERSION}; update the "
                "program, or set run_dir to a new folder"
            )
        return run

    def _update(self, **fields: Any) -> None:
        self._run |= fields
        write_text(self.path / "run.json", json.dumps(self._run, indent=1) + "\n")


def checkpoints_of(run: Path, configured: str | None) -> str | Path:
    """The folder (or fsspec URL) of the checkpoints of the run in the folder `run`, given its `checkpoint.dir`."""
    if configured is None:
        return run / "checkpoints"
    return configured if "://" in configured else Path(configured).expanduser().absolute()


def config_yaml(cfg: Config) -> str:
    """The whole configuration as YAML, in the schema's order."""
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False, allow_unicode=True)


def environment_of_launch() -> dict[str, Any]:
    """What this process runs on. Bit-equal losses need the same versions, device type and thread count."""
    packages = {"torch": torch.__version__}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": _now(),
        "command": sys.argv,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def _git_commit() -> str | None:
    """The commit that the code comes from, "+" appended when files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head, status = (
            subprocess.run(
                ["git", "-C", root, *args], capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if status.strip() else "")


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is unreadable ({error}); restore it, or set run_dir to a new folder"
        ) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
