"""Train one experiment in several precisions, all else equal, and print what each costs in held-out loss.

    python scripts/compare_precisions.py [--arms bf16 nvfp4] [--out runs/compare] +experiment=quickstart [key=value ...]

An arm is an option of the group `precision`, with more words after it where it differs in more:
--arms bf16 "fp8 precision.backend=te precision.te_recipe=delayed". Each is a run of its own under OUT (resumed when this is
started again); they see the same batches from the same initial weights. The first arm is the baseline.
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
    parser.add_argument(
        "--arms", nargs="+", default=["bf16", "nvfp4"], help="options of precision, more words after"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    args, overrides = parser.parse_known_args()
    results = {}
    for arm in args.arms:
        option, *words = arm.split()
        run = args.out / "_".join([option, *(word.rpartition("=")[2] for word in words)])
        command = [
            sys.executable,
            "-m",
            "nvfp4_train.pretrain",
            *overrides,
            f"precision={option}",
            *words,
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
    width = max(10, *(len(arm) + 1 for arm in results))
    lines = [
        f"{'precision':{width}}{'steps':>7}{'tokens':>9}{'held-out loss':>15}{'bits/byte':>11}{'gap':>9}{'speed':>16}"
    ]
    baseline = None
    for arm, records in results.items():
        last = records[-1]
        loss = last["valid/heldout/loss"]
        speeds = sorted(r["tokens_per_second"] for r in records)
        gap = "" if baseline is None else f"{100 * (loss / baseline - 1):+.2f} %"
        baseline = loss if baseline is None else baseline
        lines.append(
            f"{arm:{width}}{last['step']:>7}{units.count(last['tokens']):>9}{loss:>15.4f}"
            f"{last['valid/heldout/bits_per_byte']:>11.4f}{gap:>9}{units.rate(speeds[len(speeds) // 2]):>16}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
