"""Several processes of one group: a script's, as torchrun starts them, or forked ones."""

from __future__ import annotations

import json
import os
import pathlib
import signal
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


def serve_stores(n: int) -> tuple[int, list[int]]:
    """(process, ports) of `n` stores for forked ranks, until the process is killed.

    Stores have threads, and a fork while one of them resolves a name would leave the ranks a lock that nobody opens.
    """
    import torch.distributed as dist

    got, to = os.pipe()
    if (server := os.fork()) == 0:
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(n)]
        os.write(to, json.dumps([store.port for store in stores]).encode())
        signal.pause()
    return server, json.loads(os.read(got, 1000))
