from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from nvfp4_train.training import machine
{first}
def step():
    kept = [torch.zeros(n << 20) for n in (9, 12, 10)]  # above 32 MiB, where glibc always asks the system
    return sum(torch.zeros(9 << 20).sum() + t.sum() for t in kept)
for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(first: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE.format(first=first)], capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_used_again():
    assert page_faults("machine.keep_freed_memory()") < 0.5 * page_faults("")
