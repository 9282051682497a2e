"""Checkpoints: whole or not at all.

A checkpoint is a folder `step_00000100` that holds PyTorch's distributed format (DCP) for the tensors, and
`checkpoint.json` for everything else. It is written into a hidden folder beside its final place, fsynced,
described by `checkpoint.json` (names, sizes and SHA-256 of all files) as its last file, and only then renamed.
So a folder that bears a checkpoint's name was complete when it got it; whatever happened to it later shows in
the checksums, and nothing is unpickled before they have been compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nvfp4_train.atomic import fsync_dir, write_text
from nvfp4_train.errors import CheckpointError, SaveError

FORMAT = "nvfp4_train.checkpoint"
FORMAT_VERSION = 1
INFO_NAME = "checkpoint.json"
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint. `values` is what was saved beside the tensors (JSON)."""

    path: Path
    step: int
    tokens: int
    values: dict[str, Any]


class DamagedError(Exception):
    """A checkpoint that was whole once and isn't now (or a copy that never was); an older one may serve."""


def save(
    folder: Path,
    step: int,
    tokens: int,
    tensors: dict[str, Any],
    values: dict[str, Any],
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Publish `folder/step_XXXXXXXX` and then remove checkpoints that are no longer to be kept.

    `tensors` is a nested dict with string keys and tensors as leaves (any dtype and device); `values` must be
    JSON. Of the checkpoints up to `step`, the newest `keep_last` stay (None: all), and every one whose step is
    a multiple of `keep_every`. Raises SaveError when it can't be written (full disk); what stood in
    `folder` before is then as it was.
    """
    folder = Path(folder)
    final = folder / f"step_{step:08d}"
    tmp = folder / f".{final.name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        tmp.mkdir(parents=True)
        # One process writes whole tensors; the layout on disk doesn't depend on that.
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # "assuming the intent is to save in a single process"
            dcp.save(_own_storage(tensors), storage_writer=dcp.FileSystemWriter(tmp), no_dist=True)
        files = {p.name: _describe(p) for p in sorted(tmp.iterdir())}
        info = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": step,
            "tokens": tokens,
            "torch": torch.__version__,
            "values": values,
            "files": files,
        }
        write_text(tmp / INFO_NAME, json.dumps(info | {"checksum": _checksum(info)}, indent=1))
        if final.exists():  # a damaged one that a resumed run has now reached again
            _remove(final)
        os.rename(tmp, final)
        fsync_dir(folder)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise SaveError(
            f"checkpoint of step {step} could not be written to {folder} ({_reason(error)}); earlier checkpoints are "
            "untouched: free some space there, or set run_dir on another disk"
        ) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    _retain(folder, step, keep_last, keep_every)
    return final


def newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint under `folder`, None where there is no checkpoint at all.

    DamagedError ones are passed over with a warning that names them. Raises CheckpointError when checkpoints are
    there and none is whole (starting over would hide the loss), or when one has a newer format.
    """
    damaged = []
    for path in _published(folder):
        try:
            return read(path)
        except DamagedError as error:
            damaged.append(path.name)
            warn(f"checkpoint {path} is passed over: {error}")
    if damaged:
        raise CheckpointError(
            f"none of the checkpoints in {folder} is whole ({', '.join(damaged)}); restore one of them, or "
            "delete these folders to start from step 0"
        )
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path` (a `step_...` folder, or a run folder or its `checkpoints`: their newest whole one).

    Raises CheckpointError when there is none or it isn't whole.
    """
    path = Path(path)
    try:
        if (path / INFO_NAME).exists() or _NAME.fullmatch(path.name):
            return read(path)
    except DamagedError as error:
        raise CheckpointError(f"checkpoint {path} is not whole: {error}; use another one") from None
    for folder in (path / "checkpoints", path):
        if found := newest(folder, warnings.warn):
            return found
    raise CheckpointError(
        f"{path} holds no checkpoint of this program; give a run folder or one of its checkpoints/step_... folders"
    )


def read(path: Path) -> Checkpoint:
    """Check every file of the checkpoint at `path` against `checkpoint.json`.

    Raises DamagedError (missing, truncated or changed files), CheckpointError (foreign, or from a newer version).
    """
    try:
        info = json.loads((path / INFO_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(
            f"it has no {INFO_NAME}, so it is an incomplete copy or not a checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"its {INFO_NAME} is unreadable ({error})") from None
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this program (format {FORMAT}); use another folder"
        )
    if info.get("format_version", 0) > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {info['format_version']}, this program reads up to {FORMAT_VERSION}; "
            "update the program"
        )
    if info.pop("checksum", None) != _checksum(info):
        raise DamagedError(f"its {INFO_NAME} was changed after it was written")
    for name, expected in info["files"].items():
        try:
            size = (path / name).stat().st_size
            if size != expected["size"]:
                raise DamagedError(f"{name} has {size} bytes instead of {expected['size']}")
            if _describe(path / name) != expected:
                raise DamagedError(f"{name} fails its checksum")
        except OSError as error:
            raise DamagedError(f"{name} is missing or unreadable ({error.strerror})") from None
    return Checkpoint(path, info["step"], info["tokens"], info["values"])


def load(checkpoint: Checkpoint, tensors: dict[str, Any]) -> None:
    """Fill the tensors of the nested dict `tensors` in place; it may name a part of what was saved.

    Raises CheckpointError for a name that the checkpoint lacks or a shape that differs.
    """
    reader = dcp.FileSystemReader(checkpoint.path)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in _flatten(tensors).items():
        stored = saved.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"{checkpoint.path} has no tensor {name}; it belongs to another model or optimizer"
            )
        if stored.size != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {list(stored.size)} in {checkpoint.path} and {list(tensor.shape)} in this "
                "configuration; use the model that the checkpoint was written with"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def tensor_names(checkpoint: Checkpoint) -> dict[str, TensorStorageMetadata]:
    """Full names of the stored tensors with their shapes and dtypes (no tensor is read)."""
    return dict(dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata)


def sweep(folder: Path) -> None:
    """Remove what a killed run left half-written or half-deleted. Only the holder of the run folder may."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def _published(folder: Path) -> list[Path]:
    """Checkpoint folders, newest step first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def _retain(folder: Path, step: int, keep_last: int | None, keep_every: int | None) -> None:
    if not keep_last:
        return
    # Steps past `step` belong to damaged checkpoints this run resumed before: they don't count as kept ones.
    older = [p for p in _published(folder) if _step(p) <= step]
    for path in older[keep_last:]:
        if not (keep_every and _step(path) % keep_every == 0):
            _remove(path)


def _remove(path: Path) -> None:
    """Delete a checkpoint under a hidden name, so that a kill in between leaves no damaged one to be seen."""
    hidden = path.with_name(f".{path.name}.deleted-{uuid.uuid4().hex[:8]}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _own_storage(tensors: dict[str, Any]) -> dict[str, Any]:
    """A view is cloned: the format would store all of the tensor that it looks into."""
    out = {}
    for key, value in tensors.items():
        if isinstance(value, dict):
            out[key] = _own_storage(value)
        else:
            value = value.detach()
            whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
            out[key] = value if whole else value.clone()
    return out


def _flatten(tensors: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    out = {}
    for key, value in tensors.items():
        out |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _checksum(info: dict[str, Any]) -> str:
    """Over the meaning of checkpoint.json, not its layout."""
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    """The system's own words where there are any ("No space left on device"), on one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:200]
