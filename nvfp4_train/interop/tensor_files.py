"""safetensors files, one tensor at a time: neither reading nor writing ever holds more than one in memory.

The format (github.com/huggingface/safetensors): 8 bytes, the little-endian length of the header; the header, JSON
{name: {"dtype", "shape", "data_offsets": [begin, end)}}; the tensors' bytes, little-endian, row by row.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.errors import CheckpointError

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER = 100_000_000  # the reference implementation's


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what it will be, and how to get it when its turn comes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_sharded(folder: Path, entries: Sequence[Entry], shard_bytes: int) -> list[Path]:
    """Write `entries` in order into files of at most `shard_bytes` (a larger tensor has one for itself), and their index.

    The names are Hugging Face's: model.safetensors, or model-00001-of-0000N.safetensors with an index beside them.
    """
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    if len(shards) == 1:
        _write(folder / SINGLE, shards[0])
        return [folder / SINGLE]
    paths = [folder / f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    where = {}
    for path, shard in zip(paths, shards, strict=True):
        _write(path, shard)
        where |= {entry.key: path.name for entry in shard}
    total = sum(entry.nbytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return paths


def _write(path: Path, entries: Sequence[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        header[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.make()
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise AssertionError(
                    f"{entry.key} is {tensor.dtype} {tuple(tensor.shape)}, announced as {entry}"
                )
            f.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())


class TensorFolder:
    """The tensors of a folder with one safetensors file, or several and their index; each is read when it is asked for.

    Raises CheckpointError for files that are missing, damaged or of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).exists():
            try:
                files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{folder / INDEX} can't be read ({error}): restore it.") from error
        else:
            files = {SINGLE}
        self._where: dict[str, tuple[Path, str, list[int], int]] = {}
        for name in sorted(files):
            self._where |= _read_header(folder / name)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def keys(self) -> list[str]:
        return list(self._where)

    def read(self, key: str) -> Tensor:
        """The tensor `key` in its own dtype, on the CPU."""
        if key not in self._where:
            raise CheckpointError(
                f"{self.folder} has no tensor {key}: it belongs to another model, or is incomplete."
            )
        path, dtype, shape, begin = self._where[key]
        if dtype not in _DTYPES:
            raise CheckpointError(f"{key} in {path} is {dtype}: this program reads {', '.join(_DTYPES)}.")
        data = torch.empty(math.prod(shape) * _DTYPES[dtype].itemsize, dtype=torch.uint8)
        with open(path, "rb") as f:
            f.seek(begin)
            if f.readinto(data.numpy().data) != data.numel():
                raise CheckpointError(f"{path} ends within {key}: it is truncated, so copy it again.")
        return data.view(_DTYPES[dtype]).view(shape)


def _read_header(path: Path) -> dict[str, tuple[Path, str, list[int], int]]:
    """{key: (file, dtype, shape, first byte)}; sizes and bounds are checked."""
    try:
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            size = os.fstat(f.fileno()).st_size
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("its header's length is impossible")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        start, out = 8 + length, {}
        for key, value in header.items():
            begin, end = value["data_offsets"]
            itemsize = _DTYPES[value["dtype"]].itemsize if value["dtype"] in _DTYPES else None
            if itemsize and math.prod(value["shape"]) * itemsize != end - begin:
                raise ValueError(f"the size of {key} doesn't fit its shape")
            if start + end > size:
                raise ValueError("it is truncated")
            out[key] = (path, value["dtype"], value["shape"], start + begin)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}): the model needs it.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file ({error}): copy it again.") from error
    return out
