"""Checkpoints of two ranks: every layout reads what any other wrote, and what goes wrong on one rank harms nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Forked, so that torch is imported once. Rank 1 may be killed at its n-th write, or find its disk full.
_RANKS = """
import json, os, pathlib, signal, sys, traceback
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from nvfp4_train.distributed import checkpoint, storage
from nvfp4_train.distributed.agreement import control_group
from nvfp4_train.distributed.saving import Saver, save
from nvfp4_train.errors import SaveError
from tests.distributed.ranks import serve_stores

folder = sys.argv[1]
WHOLE = {"rows": torch.arange(15.0).view(5, 3), "columns": torch.arange(14.0).view(2, 7).bfloat16(), "n": torch.tensor(3)}
LAYOUTS = [{"rows": Shard(0), "columns": Shard(1)}, {"rows": Shard(1), "columns": Replicate()}]

def shards(mesh, layout, whole):
    put = {n: distribute_tensor(t, mesh, [layout[n]]) if n in layout else t for n, t in whole.items()}
    return {"model": put}

def same(state, whole):
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    return all(torch.equal(full(t), whole[n]) for n, t in state["model"].items())

def in_ranks(function):
    (server, (port,)), pids = serve_stores(1), []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            try:
                client = dist.TCPStore("127.0.0.1", port, is_master=False)
                dist.init_process_group("gloo", store=client, rank=rank, world_size=2)
                mesh = init_device_mesh("cpu", (2,))
                os._exit(function(rank, mesh, control_group()))
            except BaseException:
                traceback.print_exc()
                os._exit(9)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.kill(server, signal.SIGKILL)
    return codes

def write(step, layout, harm=None):
    def rank_of(rank, mesh, group):
        if rank == 1 and harm:
            original, count = storage.HashingStream.write, 0
            def write(self, data):
                nonlocal count
                count += 1
                if harm == "full":
                    raise OSError(28, "No space left on device")
                if count == harm:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(self, data)
            storage.HashingStream.write = write
        saver = Saver(folder, group=group)
        try:
            saver.allocate(shards(mesh, layout, WHOLE))
            saver.save(step, step, shards(mesh, layout, {n: t + step for n, t in WHOLE.items()}), {})
            saver.wait()
        except SaveError as error:
            print(error, file=sys.stderr)
            return 3
        return 0
    return in_ranks(rank_of)

def read(layout, step):
    def rank_of(rank, mesh, group):
        found = checkpoint.newest(folder, print, group)
        state = shards(mesh, layout, {n: torch.zeros_like(t) for n, t in WHOLE.items()})
        checkpoint.load(found, state)
        return 0 if found.step == step and same(state, {n: t + step for n, t in WHOLE.items()}) else 4
    return in_ranks(rank_of)

def alone():
    found = checkpoint.newest(folder, print)
    state = {"model": {n: torch.zeros_like(t) for n, t in WHOLE.items()}}
    checkpoint.load(found, state)
    return [found.step, same(state, {n: t + found.step for n, t in WHOLE.items()})]

results = {}
for i, layout in enumerate(LAYOUTS):
    results[f"write {i}"] = write(i + 1, layout)
    results[f"alone {i}"] = alone()
    results[f"read {i}"] = read(LAYOUTS[1 - i], i + 1)
save(folder, 3, 3, {"model": {n: t + 3 for n, t in WHOLE.items()}}, {})
results["read 2"] = read(LAYOUTS[0], 3)
results["full"] = write(4, LAYOUTS[0], "full")
results["hidden"] = [name for name in os.listdir(folder) if name.startswith(".")]
results["after full"] = alone()
for harm in (1, 7, 20):
    results[f"kill {harm}"] = [write(5, LAYOUTS[0], harm)[1], *alone()]
checkpoint.sweep(folder)
results["write at last"] = write(5, LAYOUTS[0])
results["alone at last"] = alone()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    done = subprocess.run(
        [sys.executable, "-c", _RANKS, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"errors": done.stderr}


def test_every_layout_reads_what_any_other_wrote(results):
    for i in range(2):
        assert results[f"write {i}"] == results[f"read {i}"] == [0, 0]
        assert results[f"alone {i}"] == [i + 1, True]
    assert results["read 2"] == [0, 0]  # written by one process


def test_a_full_disk_on_one_rank_is_an_error_on_both_and_leaves_nothing(results):
    assert results["full"] == [3, 3], results["errors"]
    assert results["errors"].count("step 4 could not be written") == 2
    assert "No space left on device" in results["errors"]
    assert results["hidden"] == []
    assert results["after full"] == [3, True]


@pytest.mark.parametrize("harm", [1, 7, 20])
def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint(results, harm):
    assert results[f"kill {harm}"] == [-9, 3, True]
    assert results["write at last"] == [0, 0]
    assert results["alone at last"] == [5, True]
