"""Checkpoints: whole or not at all, at any number of ranks.

A checkpoint is a folder `step_00000100` that holds PyTorch's distributed format (DCP) for the tensors, and
`checkpoint.json` for everything else: names, sizes and SHA-256 of all files, written last. A folder that bears a
checkpoint's name was complete when it got it (`storage.py` says how, on a disk and in an object store); whatever
happened to it later shows in the checksums, and nothing is unpickled before they have been compared.

`saving.py` writes them; this file finds, checks and reads them. The format doesn't depend on who wrote it: DTensors
are stored by their place in the whole tensor, and each rank reads what its own layout needs.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nvfp4_train.distributed.agreement import Group, from_first, gather, rank_in, size_of
from nvfp4_train.distributed.storage import Storage, TensorFiles
from nvfp4_train.errors import CheckpointError

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # each rank loads for itself
FORMAT = "nvfp4_train.checkpoint"
FORMAT_VERSION = 1
INFO_NAME = "checkpoint.json"
NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """The published checkpoint `name` in `folder` (or fsspec URL). `values` is what was saved beside the tensors (JSON)."""

    folder: str
    name: str
    step: int
    tokens: int
    values: dict[str, Any]

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"


class DamagedError(Exception):
    """A checkpoint that was whole once and isn't now (or a copy that never was); an older one may serve."""


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int:
    return int(NAME.fullmatch(name)[1])


def published(storage: Storage) -> list[str]:
    """Names of the checkpoints there, newest step first."""
    return sorted(filter(NAME.fullmatch, storage.names()), key=step_of, reverse=True)


def newest(folder: str | Path, warn: Callable[[str], None], group: Group = None) -> Checkpoint | None:
    """The newest whole checkpoint under `folder`, None where there is no checkpoint at all.

    With a `group` all its ranks call, share the checking of the files and get the same answer; the first one warns.
    Damaged ones are passed over with a warning that names them. Raises CheckpointError when checkpoints are
    there and none is whole (starting over would hide the loss), or when one has a newer format.
    """
    storage, damaged = Storage(folder), []
    for name in from_first(group, lambda: published(storage)):
        try:
            return read(storage, name, group)
        except DamagedError as error:
            damaged.append(name)
            if rank_in(group) == 0:
                warn(f"checkpoint {folder}/{name} is passed over: {error}")
    if damaged:
        raise CheckpointError(
            f"none of the checkpoints in {folder} is whole ({', '.join(damaged)}); restore one of them, or "
            "delete these folders to start from step 0"
        )
    return None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path` (a `step_...` folder, or a run folder or its `checkpoints`: their newest whole one).

    Raises CheckpointError when there is none or it isn't whole.
    """
    folder, _, name = str(path).rstrip("/").rpartition("/")
    parent = Storage(folder or ".")
    try:
        if NAME.fullmatch(name) or parent.exists(f"{name}/{INFO_NAME}"):
            return read(parent, name)
    except DamagedError as error:
        raise CheckpointError(f"checkpoint {path} is not whole: {error}; use another one") from None
    for folder in (f"{path}/checkpoints", str(path)):
        if found := newest(folder, warnings.warn):
            return found
    raise CheckpointError(
        f"{path} holds no checkpoint of this program; give a run folder or one of its checkpoints/step_... folders"
    )


def read(storage: Storage, name: str, group: Group = None) -> Checkpoint:
    """Check every file of the checkpoint `name` against its `checkpoint.json`; the ranks of `group` share the work.

    Raises DamagedError (missing, truncated or changed files), CheckpointError (foreign, or from a newer version).
    """
    info = from_first(group, lambda: _read_info(storage, name))
    mine = sorted(info["files"].items())[rank_in(group) :: size_of(group)]
    found = gather(group, next(filter(None, (_damage(storage, name, *file) for file in mine)), None))
    if reason := next(filter(None, found), None):
        raise DamagedError(reason)
    return Checkpoint(storage.url, name, info["step"], info["tokens"], info["values"])


def load(checkpoint: Checkpoint, tensors: dict[str, Any]) -> None:
    """Fill the tensors of the nested dict `tensors` in place; it may name a part of what was saved.

    DTensors get their own shard, whatever layout wrote the checkpoint; no rank waits for another.
    Raises CheckpointError for a name that the checkpoint lacks or a shape that differs.
    """
    saved = tensor_names(checkpoint)
    for name, tensor in flatten(tensors).items():
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
    dcp.load(tensors, storage_reader=_reader(checkpoint), no_dist=True)


def tensor_names(checkpoint: Checkpoint) -> dict[str, TensorStorageMetadata]:
    """Full names of the stored tensors with their shapes and dtypes (no tensor is read)."""
    return dict(_reader(checkpoint).read_metadata().state_dict_metadata)


def sweep(folder: str | Path) -> None:
    """Remove what a killed run left half-written or half-deleted. Only the holder of the run folder may."""
    storage = Storage(folder)
    for name in storage.names():
        if name.startswith(".step_"):
            storage.discard(name)
        elif not storage.local and NAME.fullmatch(name) and not storage.exists(f"{name}/{INFO_NAME}"):
            storage.discard(
                name
            )  # on a disk such a folder is a damaged copy, in an object store an unfinished save


def discard(folder: str | Path, unwanted: Callable[[int, dict[str, Any]], bool]) -> None:
    """Remove the checkpoints for whose step and values `unwanted` is true; damaged ones stay, to be passed over."""
    storage = Storage(folder)
    for name in published(storage):
        try:
            info = _read_info(storage, name)
        except DamagedError:
            continue
        if unwanted(info["step"], info["values"]):
            storage.remove(name)


def describe(step: int, tokens: int, values: dict[str, Any], files: dict[str, dict[str, Any]]) -> str:
    """The text of `checkpoint.json`."""
    info = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "tokens": tokens,
        "torch": torch.__version__,
        "values": values,
        "files": files,
    }
    return json.dumps(info | {"checksum": _checksum(info)}, indent=1)


def flatten(tensors: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Nested dicts to dotted names."""
    out = {}
    for key, value in tensors.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _read_info(storage: Storage, name: str) -> dict[str, Any]:
    path = f"{storage.url}/{name}"
    try:
        info = json.loads(storage.read_text(f"{name}/{INFO_NAME}"))
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
    return info


def _damage(storage: Storage, name: str, file: str, expected: dict[str, Any]) -> str | None:
    """What is wrong with one file, None if nothing is."""
    path = f"{name}/{file}"
    try:
        size = storage.size(path)
        if size != expected["size"]:
            return f"{file} has {size} bytes instead of {expected['size']}"
        return None if storage.describe(path) == expected else f"{file} fails its checksum"
    except OSError as error:
        return f"{file} is missing or unreadable ({error.strerror or error})"


def _reader(checkpoint: Checkpoint) -> dcp.FileSystemReader:
    storage = Storage(checkpoint.folder)
    reader = dcp.FileSystemReader(checkpoint.path)
    reader.fs, reader.path = TensorFiles(storage), storage.path(checkpoint.name)
    return reader


def _checksum(info: dict[str, Any]) -> str:
    """Over the meaning of checkpoint.json, not its layout."""
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
