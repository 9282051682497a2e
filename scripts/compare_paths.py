"""Whether the fast paths train as the reference does: loss curves of one run by each, on the same data, and their plot.

    python scripts/compare_paths.py OUT +experiment=125m_hybrid training.max_steps=200 [key=value ...]

The arms, all in BF16: the fast paths; the reference (scan in PyTorch, uncompiled); and the reference in FP32, whose distance
from the second says what BF16's own rounding does to such a curve. Prints a table in Markdown as the arms come in, and
writes it with the plot to OUT. An arm that is there already is not trained again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib

from nvfp4_train.atomic import write_text
from nvfp4_train.training.metrics import read_metrics

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REFERENCE = ["training.kernels=torch", "training.compile=off"]
ARMS = {
    "fast": ["precision=bf16"],
    "reference": ["precision=bf16", *REFERENCE],
    "reference, FP32": ["precision=fp32", *REFERENCE],
}
LAST = 20  # steps over which final losses are averaged


def main(out: Path, words: list[str]) -> None:
    curves: dict[str, list[float]] = {}
    lines = [
        f"| arm | first loss | mean of the last {LAST} | mean distance from the reference | largest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, more in ARMS.items():
        curves[arm] = train(out / arm.replace(", ", "_"), [*words, *more])
        print(
            f"{arm}: {len(curves[arm])} steps, last loss {curves[arm][-1]:.4f}", file=sys.stderr, flush=True
        )
    for arm, losses in curves.items():
        distance = [abs(a - b) for a, b in zip(losses, curves["reference"], strict=True)]
        lines.append(
            f"| {arm} | {losses[0]:.5f} | {sum(losses[-LAST:]) / LAST:.5f} | {sum(distance) / len(distance):.5f} | "
            f"{max(distance):.5f} (step {distance.index(max(distance)) + 1}) |"
        )
    print("\n".join(lines))
    write_text(out / "paths.md", "\n".join(lines) + "\n")
    plot(curves, out / "paths.png")


def train(run: Path, words: list[str]) -> list[float]:
    """The losses of a run, step by step."""
    command = [
        sys.executable,
        "-m",
        "nvfp4_train.pretrain",
        *words,
        f"run_dir={run}",
        "training.sample_tokens=0",
    ]
    subprocess.run([*command, "training.validate_tokens=1"], check=True, stdout=subprocess.DEVNULL)
    return [r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """The curves, and their distances from the reference's."""
    figure, (losses, distances) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for arm, curve in curves.items():
        losses.plot(range(1, len(curve) + 1), curve, linewidth=1, label=arm)
        gap = [a - b for a, b in zip(curve, curves["reference"], strict=True)]
        distances.plot(range(1, len(curve) + 1), gap, linewidth=1)
    losses.set(xlabel="step", ylabel="training loss")
    distances.set(xlabel="step", ylabel="loss minus the reference's")
    losses.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
