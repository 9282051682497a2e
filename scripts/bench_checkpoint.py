"""What one asynchronous save costs a training run: tokens a second over 100 steps without a save among them, and with one.

    python scripts/bench_checkpoint.py [--out runs/bench_checkpoint] [--repeat 3] +experiment=125m_hybrid [key=value ...]

One real run (pretrain in a process of its own, in a new folder), whose stretches of 100 steps without and with a save
alternate, so that a machine that gets slower harms both. A save comes after the tenth step of its stretch: writing it behind
the loop falls into the same stretch if it takes less than 90 steps. What the loop waited for, how long writing took and the
size are the `checkpoint` event's. The first save of a run finds nothing warm (libraries, planning, the disk): it has a line
of its own, and the `--repeat` stretches with a save begin with the second.
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

STEPS, LOG_EVERY = 100, 10
SAVE_EVERY = 2 * STEPS  # steps 391 to 490 have the second save, 291 to 390 none


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench_checkpoint"))
    parser.add_argument("--repeat", type=int, default=3)
    args, overrides = parser.parse_known_args()
    records = train(args.out, overrides, args.repeat)
    first, *saves = [r for r in records if r.get("event") == "checkpoint" and r["step"] % SAVE_EVERY == 0]
    starts = [SAVE_EVERY * n - LOG_EVERY for n in range(2, args.repeat + 2)]
    plain = [tokens_per_second(records, start - STEPS) for start in starts]
    with_save = [tokens_per_second(records, start) for start in starts]
    slower = [100 * (b / a - 1) for a, b in zip(plain, with_save, strict=True)]
    rows = [
        ("without a save", ", ".join(f"{rate:,.0f} tok/s" for rate in plain)),
        ("with one", ", ".join(f"{rate:,.0f} tok/s" for rate in with_save)),
        (
            "difference",
            f"{statistics.median(slower):+.2f} %  ({', '.join(f'{x:+.2f} %' for x in slower)})",
        ),
        ("the loop waited", ", ".join(f"{1e3 * save['waited_seconds']:.1f} ms" for save in saves)),
        ("published after", ", ".join(units.duration(save["seconds"]) for save in saves)),
        ("100 steps took", units.duration(STEPS * step_tokens(records) / statistics.median(plain))),
        (
            "the first save",
            f"the loop waited {1e3 * first['waited_seconds']:.1f} ms, published after {units.duration(first['seconds'])}",
        ),
        ("size", units.size(first["bytes"])),
    ]
    print(units.table(rows))
    return 0


def train(out: Path, overrides: list[str], repeat: int) -> list[dict]:
    """The metrics of a new run, to the end of its last stretch with a save."""
    shutil.rmtree(out, ignore_errors=True)
    words = [
        f"run_dir={out}",
        f"training.max_steps={SAVE_EVERY * (repeat + 1) + STEPS - LOG_EVERY}",
        "training.validate_every=0",
        "training.validate_tokens=1",
        "training.sample_tokens=0",
        f"training.log_every={LOG_EVERY}",
        f"checkpoint.every_steps={SAVE_EVERY}",
        "recovery=skip_nonfinite",  # whose copies for rewinds come every 200 steps, too
        "precision.health_every=0",
    ]
    command = [sys.executable, "-m", "nvfp4_train.pretrain", *overrides, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_metrics(out / "metrics.jsonl")


def tokens_per_second(records: list[dict], after: int) -> float:
    """Over the STEPS steps after step `after`."""
    steps = [r for r in records if "event" not in r and after < r["step"] <= after + STEPS]
    return len(steps) / sum(1 / r["tokens_per_second"] for r in steps)


def step_tokens(records: list[dict]) -> float:
    """Tokens a step."""
    last = [r for r in records if "event" not in r][-1]
    return last["tokens"] / last["step"]


if __name__ == "__main__":
    sys.exit(main())
