"""What several runs of one experiment cost in held-out loss: a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_train import units
from nvfp4_train.atomic import write_text
from nvfp4_train.training.metrics import read_metrics

Records = list[dict[str, Any]]


def write(runs: Mapping[str, Path], out: Path) -> str:
    """Write `comparison.txt` and `comparison.png` of finished runs {arm: run folder} into `out`; returns the table."""
    records = {
        arm: [r for r in read_metrics(run / "metrics.jsonl") if "event" not in r] for arm, run in runs.items()
    }
    text = table(records)
    write_text(out / "comparison.txt", text + "\n")
    plot(records, out / "comparison.png")
    return text


def table(runs: Mapping[str, Records]) -> str:
    """One row an arm: held-out loss and bits per byte at the end, the gap to the first arm's, median speed."""
    width = max(10, *(len(arm) + 2 for arm in runs))
    lines = [
        f"{'precision':{width}}{'steps':>7}{'tokens':>9}{'held-out loss':>15}{'bits/byte':>11}{'gap':>9}{'speed':>16}"
    ]
    baseline = None
    for arm, records in runs.items():
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


def plot(runs: Mapping[str, Records], path: Path) -> None:
    """Held-out loss over tokens, and each arm's gap to the first arm's, where both were validated."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, gaps) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    baseline: dict[int, float] = {}
    for arm, records in runs.items():
        points = {r["tokens"]: r["valid/heldout/loss"] for r in records if "valid/heldout/loss" in r}
        baseline = baseline or points
        shared = [t for t in points if t in baseline]
        losses.plot(list(points), list(points.values()), marker="o", markersize=3, label=arm)
        gaps.plot(shared, [100 * (points[t] / baseline[t] - 1) for t in shared], marker="o", markersize=3)
    losses.set(xlabel="tokens", ylabel="held-out loss")
    gaps.set(xlabel="tokens", ylabel=f"gap to {next(iter(runs))} (%)")
    losses.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
