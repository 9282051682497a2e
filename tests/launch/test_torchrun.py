"""nvfp4_train.torchrun: real torchruns on ranks that end as they are told, and on pretrain's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvfp4_train.torchrun import outcome
from tests.child import results_of

# Each case's launcher is forked, so that torch is imported once; its ranks are shell scripts that note their starts.
_LAUNCHERS = """
import json, os, pathlib, signal, sys, time
import torch.distributed.run
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher import api
from nvfp4_train import torchrun

class Agent(api.LocalElasticAgent):
    def _start_workers(self, group):
        workers = super()._start_workers(group)
        if os.environ["LOG"].endswith("/started/log"):  # as if the signal came before torchrun has noted them down
            while log("started").count("waiting") < 2:
                time.sleep(0.02)
            self._pcontext = None
            os.kill(os.getpid(), signal.SIGTERM)
        if os.environ["LOG"].endswith("/store_gone/log"):
            while log("store_gone").count("waiting") < 2:
                time.sleep(0.02)
            group.spec.rdzv_handler.num_nodes_waiting = gone
        return workers

def gone():
    raise RendezvousConnectionError

def log(name):
    path = folder / name / "log"
    return path.read_text() if path.exists() else ""

api.LocalElasticAgent = Agent

folder, codes, launchers = pathlib.Path(sys.argv[1]), {}, {}
for name, ranks in json.loads(sys.argv[2]).items():
    (folder / name).mkdir()
    if (pid := os.fork()) == 0:
        os.environ["LOG"] = str(folder / name / "log")
        words = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", "--no-python", "bash", "-c", sys.argv[3], "rank"]
        sys.argv = ["torchrun", *words, *ranks]
        code = 9
        try:
            code = torchrun.main()
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    launchers[name] = pid
while log("stopped").count("waiting") < 2:
    time.sleep(0.02)
os.kill(launchers["stopped"], signal.SIGTERM)
codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in launchers.items()}
print(json.dumps(codes))
"""
# Its n-th start does the n-th word of its argument: a number to exit with, "kill" itself once the others wait, or "wait".
_RANK = """
words=(${@:RANK+1:1})
word=${words[TORCHELASTIC_RESTART_COUNT]}
trap 'echo "end of $RANK" >>"$LOG"; exit 75' TERM
echo "start of $RANK" >>"$LOG"
case $word in
  wait) echo waiting >>"$LOG"; while [ -e "$LOG" ]; do sleep 0.05; done ;;
  kill) until grep -q waiting "$LOG"; do sleep 0.02; done; kill -KILL "$BASHPID" ;;
esac
exit "$word"
"""
CASES = {
    "fails": (["1 0", "1 0"], 0, 2),
    "refused": (["2 0", "wait 0"], 2, 1),
    "gives_up": (["76 0", "76 0"], 76, 1),
    "rank_stopped": (["75 0", "wait 0"], 75, 1),
    "killed": (["kill 0", "wait 0"], 0, 2),  # the rank that waits answers torchrun's SIGTERM with 75
    "stopped": (["wait", "wait"], 75, 1),
    "store_gone": (["wait", "wait"], 75, 1),  # the machine that had it ended first
    "started": (["wait", "wait"], 75, 1),  # stopped in the middle of starting ranks
}


@pytest.fixture(scope="module")
def codes(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("launchers")
    ranks = json.dumps({name: case[0] for name, case in CASES.items()})
    return folder, results_of(_LAUNCHERS, str(folder), ranks, _RANK)


@pytest.mark.parametrize("name", CASES)
def test_torchrun_starts_again_only_what_may_succeed_and_ends_with_its_code(codes, name):
    folder, ended = codes
    _, code, starts = CASES[name]
    assert ended[name] == code
    log = (folder / name / "log").read_text()
    assert log.count("start of 0") == starts
    if name in ("stopped", "started", "store_gone"):
        assert log.count("end of") == 2  # nothing is left behind


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([75, -15], 75), ([75, -9], 1), ([1, 75], 1), ([-9, 2], 2), ([1, 76], 76), ([143], 1)],
)
def test_outcome(codes, code):
    assert outcome(codes) == code
