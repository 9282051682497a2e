"""The device that a run takes, and how much memory it has."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import torch

from nvfp4_train.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


def resolve_device(name: str) -> torch.device:
    """`device`: "auto" takes a CUDA device where there is one. Raises ConfigError for "cuda" where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda
        reason = f"torch {torch.__version__} sees no CUDA device" if build else "this torch is a CPU build"
        raise ConfigError(f"device=cuda: {reason}; use device=auto or device=cpu, or install a CUDA torch.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def planned_device(name: str) -> torch.device:
    """`resolve_device`, but that "cuda" needs none here: a run is planned where it doesn't run."""
    return torch.device("cuda") if name == "cuda" else resolve_device(name)


def memory_bytes(device: torch.device) -> int:
    """Memory of the device in bytes; of the CPU what this process may use: the RAM, or its container's limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min(psutil.virtual_memory().total, *_container_limits(), 1 << 62)


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors for the next ones, where it can (glibc).

    By default large ones go back to the system, and each step begins with pages that the kernel must clear again.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def describe(device: torch.device) -> str:
    """One line for people: what the device is, without its memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"


def _container_limits() -> list[int]:
    """Memory limits of this process's control groups (version 2), from its own up to the root."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    except OSError:
        return []
    group = _CGROUP / own.lstrip("/")
    files = [folder / "memory.max" for folder in (group, *group.parents) if folder.is_relative_to(_CGROUP)]
    return [int(text) for file in files if file.is_file() and (text := file.read_text().strip()).isdigit()]
