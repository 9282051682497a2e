"""Runs a script in several processes of one group, as torchrun does."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys


def run_ranks(n: int, script: pathlib.Path | str, *words: str, timeout: float = 300) -> str:
    """What `script` (a file, or "-m" and a module's name in `words`) printed, run by torchrun on `n` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    done = subprocess.run(
        [*command, str(script), *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout
