"""The launch scripts with a fake Slurm, a fake remote shell, and a stand-in for the trainer that ends as it is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake"
WORDS = ["+experiment=quickstart", "training.sample_prompt=two words"]


class Job:
    """A script as the cluster would run it."""

    def __init__(
        self, folder: Path, *command: str | Path, words: Sequence[str] = WORDS, **environment: str
    ) -> None:
        self.log = folder / "log"
        self.log.touch()
        self._process = subprocess.Popen(
            [*map(str, command), *words],
            cwd=ROOT,
            env=os.environ
            | {
                "PATH": f"{FAKE}:{os.environ['PATH']}",
                "FAKE_LOG": str(self.log),
                "PYTHON": str(FAKE / "python"),
            }
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(self, pid: int | None = None) -> None:
        """SIGTERM once the trainer waits for it."""
        while "waiting" not in self.log.read_text():
            assert self._process.poll() is None, self._process.stdout.read()
            time.sleep(0.02)
        os.kill(pid or self._process.pid, signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        output, _ = self._process.communicate(timeout=240)
        return self._process.returncode, output

    @property
    def starts(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("rank")]


def slurm(folder: Path, nodes: str, per_node: int = 1, **environment: str) -> Job:
    return Job(
        folder,
        "bash",
        ROOT / "scripts" / "slurm" / "pretrain.sbatch",
        SLURM_JOB_ID="77",
        SLURM_JOB_NODELIST=nodes,
        SLURM_JOB_NUM_NODES=str(len(nodes.split(","))),
        SLURM_NTASKS_PER_NODE=str(per_node),
        SLURM_SUBMIT_DIR=str(ROOT),
        FAKE_GPUS=str(per_node),
        **environment,
    )


def test_slurm_gives_every_task_its_rank_and_the_words_as_typed(tmp_path):
    job = slurm(tmp_path, "a,b", per_node=2)
    code, output = job.end()
    assert code == 0, output
    assert "finished" in output
    assert sorted(job.starts) == [
        f"rank {rank} of 4 local {rank % 2} on {'ab'[rank // 2]} at 127.0.0.1: -m nvfp4_train.pretrain {' '.join(WORDS)}"
        for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("codes", "starts", "code", "said"),
    [
        ("1 137 0", 3, 0, "ended with 137; going on from the last checkpoint"),
        ("1 1 1 1", 3, 1, "gave up after 3 starts"),
        ("2", 1, 2, "needs a person"),
        ("76", 1, 76, "recovery gave up"),
    ],
)
def test_slurm_starts_again_what_may_succeed(tmp_path, codes, starts, code, said):
    job = slurm(tmp_path, "a,b", FAKE_CODES=codes, MAX_RESTARTS="2")
    got, output = job.end()
    assert (got, len(job.starts)) == (code, 2 * starts), output
    assert said in output
    assert "requeued" not in job.log.read_text()


def test_slurm_puts_a_stopped_run_back_into_the_queue(tmp_path):
    job = slurm(tmp_path, "a", FAKE_CODES="75")
    code, output = job.end()
    assert code == 75
    assert "stopped and saved; back into the queue" in output
    assert "requeued 77" in job.log.read_text()


def test_slurm_starts_nothing_anew_shortly_before_the_time_limit(tmp_path):
    job = slurm(tmp_path, "a", FAKE_CODES="1", SLURM_JOB_END_TIME=str(int(time.time()) + 60))
    assert job.end()[0] == 75
    assert len(job.starts) == 1
    assert "requeued 77" in job.log.read_text()


def test_slurm_takes_a_spare_for_a_node_that_fails_its_check(tmp_path):
    job = slurm(tmp_path, "a,b,c", NODES="2", FAKE_DEAD_NODES="a")
    code, output = job.end()
    assert code == 0, output
    assert {line.split()[7] for line in job.starts} == {"b", "c"}


def test_slurm_does_not_start_on_too_few_nodes(tmp_path):
    job = slurm(tmp_path, "a,b", FAKE_DEAD_NODES="b")
    code, output = job.end()
    assert (code, job.starts) == (75, [])
    assert "1 of 2 nodes are healthy" in output
    assert "requeued 77" in job.log.read_text()


@pytest.mark.parametrize(("gpus", "faults"), [("2", []), ("1", ["1 of 2 GPUs answer"])])
def test_the_health_check_counts_gpus(gpus, faults):
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "slurm" / "health.sh", "2"],
        env=os.environ | {"PATH": f"{FAKE}:{os.environ['PATH']}", "FAKE_GPUS": gpus},
        capture_output=True,
        text=True,
    )
    assert done.returncode == bool(faults)
    assert all(fault in done.stdout for fault in faults), done.stdout


def dgx(folder: Path, hosts: str = "first second", words: Sequence[str] = WORDS, **environment: str) -> Job:
    (folder / "hosts").write_text("# machines\n" + "\n".join(hosts.split()) + "\n")
    script = ROOT / "scripts" / "dgx" / "launch.sh"
    settings = {"RSH": str(FAKE / "remote_shell"), "GPUS": "2", "PAUSE": "0", "MAX_RESTARTS": "1"}
    return Job(folder, script, folder / "hosts", words=words, **settings | environment)


def test_dgx_starts_torchrun_on_every_machine(tmp_path):
    job = dgx(tmp_path)
    code, output = job.end()
    assert code == 0, output
    first, second = (line.partition(": ")[2] for line in job.starts)
    assert first == second
    assert first.startswith("-m nvfp4_train.torchrun --nnodes=2 --nproc-per-node=2")
    assert "--rdzv-endpoint=first:29400 --max-restarts=0 -m nvfp4_train.pretrain" in first
    assert first.endswith(" ".join(WORDS))


@pytest.mark.parametrize(
    ("first", "second", "starts", "code", "said"),
    [
        ("1 0", "1 0", 2, 0, "ended with 1; going on from the last checkpoint"),
        ("1 1", "255 1", 2, 1, "gave up after 2 starts"),
        ("75 0", "1 0", 2, 0, "ended with 1"),  # one that failed stopped the other's ranks
        ("then-1 0", "signal 0", 2, 0, "ended with 1"),  # ... or didn't: the launcher does
        ("75", "75", 1, 75, "stopped and saved"),  # someone stopped a single rank
        ("then-2", "signal", 1, 2, "needs a person"),
        ("76", "76", 1, 76, "recovery gave up"),
    ],
)
def test_dgx_starts_all_machines_again_for_what_may_succeed(tmp_path, first, second, starts, code, said):
    patience = "0" if first == "then-1 0" else "120"
    job = dgx(tmp_path, FAKE_CODES_first=first, FAKE_CODES_second=second, PATIENCE=patience)
    got, output = job.end()
    assert (got, len([line for line in job.starts if " on first at" in line])) == (code, starts), output
    assert said in output


def test_dgx_ends_a_run_that_is_refused_with_real_torchruns(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here = {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    words = [*WORDS, "training.seq_len=-1"]
    job = dgx(tmp_path, "localhost 127.0.0.1", words, GPUS="1", PORT=str(port), **here)
    code, output = job.end()
    assert code == 2, output
    assert "training.seq_len=-1" in output
    assert "going on" not in output


def test_dgx_hands_a_stop_on_and_ends_with_75(tmp_path):
    job = dgx(tmp_path, FAKE_CODES="signal")
    job.stop()
    code, output = job.end()
    assert code == 75, output
    assert len(job.starts) == 2


def test_dgx_stops_a_machine_that_is_only_about_to_start(tmp_path):
    job = dgx(tmp_path, "first", FAKE_SLOW=str(tmp_path / "stopped"))
    job.stop()
    code, output = job.end()
    assert (code, job.starts) == (75, []), output


def test_scripts_and_dockerfile_pass_their_linters():
    scripts = [
        ROOT / ".ci" / "run",
        *sorted((ROOT / "scripts").glob("*/*.sh")),
        *sorted((ROOT / "scripts").glob("*/*.sbatch")),
    ]
    done = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in scripts:
        assert str(path.relative_to(ROOT)) in done.stdout
    assert "hadolint Dockerfile" in done.stdout
