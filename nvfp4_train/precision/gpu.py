"""What this machine offers to the GEMM backends, learnt without importing torch: a refusal comes within the first second."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class Machine:
    """Version numbers of what is there; None for what is not."""

    gpu: str | None = None
    capability: tuple[int, int] | None = None  # compute capability of the GPU
    cuda: tuple[int, int] | None = None  # that this torch was built with
    triton: str | None = None
    te: str | None = None  # Transformer Engine's Python part ...
    te_core: str | None = None  # ... its library ...
    te_torch: str | None = None  # ... and its torch part
    processes: int = 1  # that the launcher started

    def describe(self) -> str:
        """The GPU, for people."""
        if self.gpu is None:
            return "no CUDA GPU is found"
        return f"this is a {self.gpu}, compute capability {self.capability[0]}.{self.capability[1]}"


def this_machine(device: str = "auto") -> Machine:
    """What is here for a run with `device`: on a CPU no GPU counts."""
    gpu, capability = (None, None) if device == "cpu" else _first_gpu()
    return Machine(
        gpu=gpu,
        capability=capability,
        cuda=_torch_cuda(),
        triton=_version("triton"),
        te=_version("transformer_engine"),
        te_core=_version("transformer_engine_cu13") or _version("transformer_engine_cu12"),
        te_torch=_version("transformer_engine_torch"),
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )


def _first_gpu() -> tuple[str, tuple[int, int]] | tuple[None, None]:
    """Name and compute capability of the first GPU that the driver shows this process (it heeds CUDA_VISIBLE_DEVICES)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None
    device, name, values = ctypes.c_int(), ctypes.create_string_buffer(128), []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None, None
    driver.cuDeviceGetName(name, len(name), device)
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return name.value.decode(), (values[0], values[1])


def _torch_cuda() -> tuple[int, int] | None:
    spec = importlib.util.find_spec("torch")
    found = spec and re.search(
        r"^cuda\b.*'(\d+)\.(\d+)'", Path(spec.origin).with_name("version.py").read_text(), re.M
    )
    return (int(found[1]), int(found[2])) if found else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
