"""What one asynchronous save costs a training run: tokens a second over 100 steps without a save among them, and with one.

    python scripts/bench_checkpoint.py [--out runs/bench_checkpoint] [--repeat 3] +experiment=125m_hybrid [key=value ...]

Each arm is a real run (pretrain in a process of its own, in a new folder), measured from its metrics after a warm-up; the
arms alternate, so that a machine that gets slower harms both. What the loop waited for, how long writing took behind it
and the size are the `checkpoint` event's.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from nvfp4_train import units
from nvfp4_train.training.metrics import read_metrics

WARM_UP, STEPS = 20, 100
SAVED_AT = WARM_UP + STEPS // 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench_checkpoint"))
    parser.add_argument("--repeat", type=int, default=3)
    args, overrides = parser.parse_known_args()
    speeds: dict[bool, list[float]] = {False: [], True: []}
    saves = []
    for _ in range(args.repeat):
        for saving in (False, True):
            records = train(args.out, overrides, saving)
            speeds[saving].append(tokens_per_second(records))
            saves += [r for r in records if r.get("event") == "checkpoint" and r["step"] == SAVED_AT]
    plain, with_save = (statistics.median(speeds[saving]) for saving in (False, True))
    rows = [
        ("without a save", f"{units.rate(plain)}  (runs: {', '.join(map(units.rate, speeds[False]))})"),
        ("with one", f"{units.rate(with_save)}  (runs: {', '.join(map(units.rate, speeds[True]))})"),
        ("difference", f"{100 * (with_save / plain - 1):+.2f} %"),
        ("the loop waited", ", ".join(f"{1e3 * save['waited_seconds']:.1f} ms" for save in saves)),
        ("published after", ", ".join(units.duration(save["seconds"]) for save in saves)),
        ("size", units.size(saves[0]["bytes"])),
    ]
    print(units.table(rows))
    return 0


def train(out: Path, overrides: list[str], saving: bool) -> list[dict]:
    """The metrics of a new run of WARM_UP + STEPS steps."""
    shutil.rmtree(out, ignore_errors=True)
    words = [
        f"run_dir={out}",
        f"training.max_steps={WARM_UP + STEPS}",
        "training.validate_every=0",
        "training.validate_tokens=1",
        "training.sample_tokens=0",
        "training.log_every=10",
        f"checkpoint.every_steps={SAVED_AT if saving else WARM_UP + STEPS}",
    ]
    command = [sys.executable, "-m", "nvfp4_train.pretrain", *overrides, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_metrics(out / "metrics.jsonl")


def tokens_per_second(records: list[dict]) -> float:
    """Over the steps after the warm-up."""
    steps = [r for r in records if "event" not in r and r["step"] > WARM_UP]
    return len(steps) / sum(1 / r["tokens_per_second"] for r in steps)


if __name__ == "__main__":
    sys.exit(main())
