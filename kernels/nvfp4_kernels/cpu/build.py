"""Compile `quantize.cpp` for this machine and keep the library in the user's cache.

The cache key holds source, flags, compiler and processor, so another machine sharing the home folder
gets its own build. Where there is no compiler the reason is kept for the log and PyTorch code runs instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("quantize.cpp")
# Bits are a contract: no fast-math, no contraction of multiply and add.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-std=c++17",
    "-shared",
    "-fPIC",
)


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/nvfp4_train/cpu_kernels`, or a private temporary folder when the home is read-only."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nvfp4_train" / "cpu_kernels"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="nvfp4_cpu_kernels_"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """(library, description), or (None, reason) when it cannot be had here."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None, "no C++ compiler found (install g++ for the fast CPU kernels)"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        return None, f"the C++ compiler {compiler} does not run: {e}"
    text = "\0".join((SOURCE.read_text(), *FLAGS, version, _processor()))
    path = cache_dir() / f"nvfp4_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        tmp = path.with_suffix(f".{os.getpid()}.tmp")
        done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(tmp)], capture_output=True, text=True)
        if done.returncode:
            return (
                None,
                f"{compiler} could not compile the CPU kernels: {(done.stderr.splitlines() or ['?'])[0]}",
            )
        os.replace(tmp, path)
    try:
        return ctypes.CDLL(str(path)), f"C++ kernels compiled by {version.splitlines()[0]}"
    except OSError as e:
        return None, f"the compiled CPU kernels do not load: {e}"
