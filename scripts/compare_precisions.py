"""Train one experiment in several precisions, all else equal, and print what each costs in held-out loss.

    python scripts/compare_precisions.py [--arms bf16 nvfp4] [--out runs/compare] +experiment=quickstart [key=value ...]

Each arm is a run of its own under OUT (resumed when this is started again); they differ in `precision` alone, so they see
the same batches from the same initial weights. The first arm is the baseline.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from nvfp4_train import units
from nvfp4_train.training.metrics import read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=["bf16", "nvfp4"], help="options of the group precision")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    args, overrides = parser.parse_known_args()
    results = {}
    for arm in args.arms:
        run = args.out / arm
        command = [
            sys.executable,
            "-m",
            "nvfp4_train.pretrain",
            *overrides,
            f"precision={arm}",
            f"run_dir={run}",
        ]
        print(f"\n=== precision={arm} ===", flush=True)
        if code := subprocess.run(command).returncode:
            return code
        results[arm] = [r for r in read_metrics(run / "metrics.jsonl") if "event" not in r]
    print("\n" + table(results))
    return 0


def table(results: dict[str, list[dict]]) -> str:
    """One row an arm: held-out loss and bits per byte at the end, the gap to the first arm's, median speed."""
    lines = [
        f"{'precision':10}{'steps':>7}{'tokens':>9}{'held-out loss':>15}{'bits/byte':>11}{'gap':>9}{'speed':>16}"
    ]
    baseline = None
    for arm, records in results.items():
        last = records[-1]
        loss = last["valid/heldout/loss"]
        speeds = sorted(r["tokens_per_second"] for r in records)
        gap = "" if baseline is None else f"{100 * (loss / baseline - 1):+.2f} %"
        baseline = loss if baseline is None else baseline
        lines.append(
            f"{arm:10}{last['step']:>7}{units.count(last['tokens']):>9}{loss:>15.4f}"
            f"{last['valid/heldout/bits_per_byte']:>11.4f}{gap:>9}{units.rate(speeds[len(speeds) // 2]):>16}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
