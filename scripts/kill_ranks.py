"""Kill -9 one rank of a run, time and again, and watch it go on by itself.

    python scripts/kill_ranks.py [--ranks 4] [--kills 5] [--out runs/kill_ranks] +experiment=quickstart [key=value ...]

Starts the run twice under `torchrun --max-restarts`: once undisturbed, once with a random rank killed at a random moment
KILLS times. Prints, for each kill, the step it struck at, the checkpoint that the run went on from, and how long it took
until that step was passed; and whether every loss of the disturbed run equals the undisturbed one's, which on GPUs takes
training.deterministic=true, the default.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from nvfp4_train.training.metrics import read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kill_ranks"))
    args, overrides = parser.parse_known_args()
    choose = random.Random(args.seed)

    whole = launch(args.ranks, 0, args.out / "undisturbed", overrides)
    if code := whole.wait():
        return code
    losses = losses_of(args.out / "undisturbed")

    run = args.out / "disturbed"
    launcher = launch(args.ranks, args.kills, run, overrides)
    reached = 0
    print(f"{'kill':>4}{'rank':>6}{'at step':>9}{'from checkpoint':>17}{'past it after':>15}")
    for number in range(args.kills):
        target = choose.randint(
            reached + 2, reached + max(2, (len(losses) - reached) // (args.kills - number)) - 1
        )
        wait_for(launcher, run, target)
        victims = ranks_of(launcher)
        victim = choose.randrange(len(victims))
        struck = time.monotonic()
        victims[victim].send_signal(signal.SIGKILL)
        at = max(losses_of(run))
        resumed = wait_for_resume(launcher, run, number + 1)
        wait_for(launcher, run, at + 1)
        reached = at + 1
        print(
            f"{number + 1:>4}{victim:>6}{at:>9}{resumed:>17}{time.monotonic() - struck:>13.1f} s", flush=True
        )
    if code := launcher.wait():
        return code
    same = losses_of(run) == losses
    print(f"{len(losses)} steps; losses of the two runs: {'bit-equal' if same else 'NOT equal'}")
    return 0 if same else 1


def launch(ranks: int, restarts: int, run: Path, overrides: list[str]) -> subprocess.Popen:
    log = run.parent / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "-m", "nvfp4_train.pretrain", *overrides, f"run_dir={run}"]
    with open(log, "w") as f:
        return subprocess.Popen([*command, "training.log_every=1"], stdout=f, stderr=subprocess.STDOUT)


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children()
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def losses_of(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if "event" not in r} or {0: 0.0}


def wait_for(launcher: subprocess.Popen, run: Path, step: int) -> None:
    while max(losses_of(run)) < step:
        if launcher.poll() is not None:
            raise SystemExit(f"the launcher ended with {launcher.returncode} before step {step}")
        time.sleep(0.02)


def wait_for_resume(launcher: subprocess.Popen, run: Path, n: int) -> int:
    """The step of the n-th resume."""
    while True:
        events = [r for r in read_metrics(run / "metrics.jsonl") if r.get("event") == "resume"]
        if len(events) >= n:
            return events[-1]["step"]
        if launcher.poll() is not None:
            raise SystemExit(f"the launcher ended with {launcher.returncode}")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
