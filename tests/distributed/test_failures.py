"""Ranks that are killed, stopped or broken, and what the others say about it: real processes over gloo."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from nvfp4_train.distributed.failures import PeerWatch
from tests.child import results_of

# For each deed three ranks reduce without end; rank 1 does it to itself in its third step. Forked: torch is imported once.
_RANKS = """
import datetime, json, os, pathlib, signal, sys, traceback
import torch, torch.distributed as dist
from nvfp4_train.distributed import failures
from tests.distributed.ranks import serve_stores

def rank_of(rank, port, deed, folder):
    failures.record_collectives(folder)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    say = lambda line: (folder / f"said_{rank}").open("a").write(line)
    watch = failures.PeerWatch(folder, say, tick=0.1, patience=10_000 if deed == "hang" else 20)
    if deed == "hang":
        failures.STEP_TIMEOUT = datetime.timedelta(seconds=2)
        failures.short_timeouts()
    try:
        for step in range(1, 6):
            watch.at(f"step {step}")
            if rank == 1 and step == 3:
                if deed == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if deed == "raise":
                    raise ValueError("a bug in one rank")
                if deed in ("leave", "leave slowly"):
                    watch.stop_all()
                    os._exit(75) if deed == "leave" else signal.pause()
                signal.pause() if deed == "hang" else os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(7))
    except Exception as error:
        error = watch.explain(error)
        say(f"{type(error).__name__}: {error}")
        os._exit(getattr(error, "exit_code", 1))
    os._exit(0)

children, deeds = {}, sys.argv[2:]
server, ports = serve_stores(len(deeds))
for deed, port in zip(deeds, ports, strict=True):
    folder = pathlib.Path(sys.argv[1]) / deed
    folder.mkdir()
    children[deed] = []
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                rank_of(rank, port, deed, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(9)
        children[deed].append(pid)
codes = {}
for deed, pids in children.items():
    codes[deed] = [os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) for rank in (0, 2)]
    if deed in ("hang", "stop", "leave slowly"):
        os.kill(pids[1], signal.SIGKILL)
os.kill(server, signal.SIGKILL)
print(json.dumps(codes))
"""
DEEDS = {
    "kill": "is gone or hangs, last seen at",
    "hang": "is gone or hangs, last seen at step 3",
    "raise": "ended at step 3 with ValueError: a bug in one rank",
    "stop": "has shown no sign of life for 2 s",
}


# Stopped before there is anything to save, rank 1 ends, or is still there when the others look.
LEAVES = {"leave": 75, "leave slowly": -signal.SIGTERM}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, results_of(_RANKS, str(folder), *DEEDS, *LEAVES)


@pytest.mark.parametrize("deed", DEEDS)
def test_the_others_name_the_rank_and_the_collective(results, deed):
    folder, codes = results
    assert codes[deed] == [1, 1]
    for rank in (0, 2):
        report = (folder / deed / f"said_{rank}").read_text()
        assert DEEDS[deed] in report
        assert f"rank 1 ({socket.gethostname()}, process " in report
        assert "in gloo:all_reduce [[7]] of group default_pg" in report
    dumped = json.loads((folder / deed / "rank_0.json").read_text())
    assert dumped["at"] == "step 3"
    assert dumped["collectives"][-1]["profiling_name"] == "gloo:all_reduce"
    assert dumped["stacks"]


@pytest.mark.parametrize("deed", LEAVES)
def test_a_stop_before_there_is_anything_to_save_stops_the_others_too(results, deed):
    folder, codes = results
    assert codes[deed] == [LEAVES[deed]] * 2
    for rank in (0, 2):
        assert "rank 1 (" in (report := (folder / deed / f"said_{rank}").read_text())
        assert "was stopped by a signal before it had anything to save" in report


def test_the_watch_has_ended_when_it_is_closed(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watch, asking = PeerWatch(tmp_path, pytest.fail, tick=0.001, patience=10**9), threading.Event()
    watch._beat = lambda count: (asking.set(), time.sleep(0.2))  # a store that is slow to answer
    assert asking.wait(60)
    watch.close()
    assert not watch._thread.is_alive()
    dist.destroy_process_group()
