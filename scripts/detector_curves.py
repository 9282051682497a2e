"""How the spike detector does on recorded curves, and the table of docs/results/spike_detection.md.

    python scripts/detector_curves.py table tests/data/healthy_curves.npz
    python scripts/detector_curves.py record NAME=RUN_DIR ... out=tests/data/healthy_curves.npz

`record` takes loss and gradient norm of every step from finished runs. `table` runs the detector, with recovery's defaults,
over each curve as it is (false alarms) and over copies with one injected spike each (misses, delay).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nvfp4_train.config.schema import RecoveryConfig
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.history import History
from nvfp4_train.training.metrics import read_metrics
from nvfp4_train.training.recovery import Recovery

RESOLUTION = 2e-4  # of the stored loss and of the logarithm of the norm: far below a step's noise


@dataclass
class Curve:
    """Loss and gradient norm of every step, float64 [steps]."""

    loss: np.ndarray
    norm: np.ndarray


@dataclass(frozen=True)
class Spike:
    """What happens to a curve from its onset on, given the steps since then and the local deviations."""

    name: str
    loss: Callable[[np.ndarray, float], np.ndarray]  # added
    norm: Callable[[np.ndarray], np.ndarray]  # multiplied
    wants: str  # "skip": a single update; "rewind"; "slow"


SPIKES = [
    Spike("one step, loss +25 sigma", lambda t, s: 25 * s * (t == 0), lambda t: 1 + 0 * t, "skip"),
    Spike("one step, norm x 40", lambda t, s: 0 * t, lambda t: np.where(t == 0, 40.0, 1.0), "skip"),
    Spike("not finite for one step", lambda t, s: np.where(t == 0, np.nan, 0.0), lambda t: 1 + 0 * t, "skip"),
    Spike("jump of 1 nat that stays", lambda t, s: 1.0 + 0 * t, lambda t: 1 + 0 * t, "rewind"),
    Spike(
        "jump of 1 nat, decays over 50 steps",
        lambda t, s: np.exp(-t / 50),
        lambda t: 1 + 3 * np.exp(-t / 50),
        "rewind",
    ),
    Spike(
        "ramp to +1 nat over 30 steps",
        lambda t, s: np.minimum(1, t / 30),
        lambda t: 1 + np.minimum(3, t / 10),
        "rewind",
    ),
    Spike("norm x 8 for 40 steps", lambda t, s: 0 * t, lambda t: np.where(t < 40, 8.0, 1.0), "rewind"),
    Spike(
        "rise of 0.3 nats over 1500 steps",
        lambda t, s: np.minimum(0.3, t / 5000),
        lambda t: 1 + 0 * t,
        "slow",
    ),
]


@dataclass
class Found:
    """What recovery saw: the steps (from 1) whose update was skipped, and the first trouble (after which it stops)."""

    skipped: list[int]
    exceedances: int
    trouble: tuple[int, bool] | None = (
        None  # the step after which it was found, and whether as slow divergence
    )


def detect(curve: Curve, stop_at_trouble: bool = True) -> Found:
    """Run the detector and the host's part over a curve, reading every 10 steps as the trainer does."""
    cfg = RecoveryConfig(name="auto")
    detector, ladder = SpikeDetector(cfg, "cpu"), Recovery(cfg, History())
    found, records = Found([], 0), []
    for step, (loss, norm) in enumerate(zip(curve.loss.tolist(), curve.norm.tolist(), strict=True), start=1):
        finite = float(np.isfinite(loss) and np.isfinite(norm))
        accepted = detector.update(torch.tensor(loss), torch.tensor(norm), torch.tensor(finite)).item()
        metrics = {name: value.item() for name, value in detector.metrics().items()}
        records.append({"step": step, "loss": loss, "grad_norm": norm, "skipped": 1 - accepted, **metrics})
        if not accepted:
            found.skipped.append(step)
        if step % 10 == 0:
            events, trouble = ladder.look(records)
            found.exceedances += sum(event["event"] == "spike" for event in events)
            records = []
            if trouble and found.trouble is None:
                found.trouble = (trouble.found, trouble.slow)
                if stop_at_trouble:
                    break
    return found


def injected(curve: Curve, spike: Spike, onset: int, before: int = 1500, after: int = 2500) -> Curve:
    """The steps around `onset`, with the spike."""
    first, last = max(0, onset - before), min(len(curve.loss), onset + after)
    loss, norm = curve.loss[first:last].copy(), curve.norm[first:last].copy()
    since = np.arange(len(loss) - (onset - first), dtype=float)
    sigma = float(np.std(loss[onset - first - 100 : onset - first]))
    loss[onset - first :] += spike.loss(since, sigma)
    norm[onset - first :] *= spike.norm(since)
    return Curve(loss, norm)


def spikes_in(curve: Curve, n: int) -> Iterator[tuple[Spike, int]]:
    """Every kind of spike at `n` places, spread over the curve."""
    for i, spike in enumerate(SPIKES):
        for k in range(n):
            yield spike, int(len(curve.loss) * (k + 0.25 + 0.5 * i / len(SPIKES)) / n * 0.75) + 600


def record(runs: dict[str, str], out: Path) -> None:
    arrays = {}
    for name, run in runs.items():
        steps = [r for r in read_metrics(Path(run) / "metrics.jsonl") if "event" not in r]
        loss = np.array([r["loss"] for r in steps])
        norm = np.log([r["grad_norm"] for r in steps])
        arrays[f"{name}/loss"] = np.round(loss / RESOLUTION).astype(np.uint16)
        arrays[f"{name}/log_norm"] = np.round(norm / RESOLUTION).astype(np.int16)
    np.savez_compressed(out, **arrays)


def read(path: Path) -> dict[str, Curve]:
    """The recorded curves by name."""
    with np.load(path) as arrays:
        names = dict.fromkeys(key.split("/")[0] for key in arrays)
        return {
            name: Curve(arrays[f"{name}/loss"] * RESOLUTION, np.exp(arrays[f"{name}/log_norm"] * RESOLUTION))
            for name in names
        }


def table(curves: dict[str, Curve]) -> None:
    print(
        "| healthy run | steps | exceedances (logged only) | updates skipped | rewinds |\n| --- | --- | --- | --- | --- |"
    )
    steps = alarms = 0
    for name, curve in curves.items():
        found = detect(curve, stop_at_trouble=False)
        rewinds = int(found.trouble is not None)
        steps, alarms = steps + len(curve.loss), alarms + len(found.skipped) + rewinds
        print(
            f"| {name} | {len(curve.loss)} | {found.exceedances} | {len(found.skipped)} | {rewinds} |",
            flush=True,
        )
    print(
        f"\nFalse alarms (skips and rewinds): {alarms} in {steps} steps, {1e4 * alarms / steps:.2f} in 10,000.\n"
    )
    print(
        "| injected spike | wanted | injected | found | missed | delay in steps: median | most |\n|"
        + " --- |" * 7
    )
    delays: dict[str, list[int | None]] = {spike.name: [] for spike in SPIKES}
    for curve in curves.values():
        for spike, onset in spikes_in(curve, 2):
            delays[spike.name].append(_delay(spike, detect(injected(curve, spike, onset)), min(onset, 1500)))
    for spike in SPIKES:
        seen = [d for d in delays[spike.name] if d is not None]
        missed = len(delays[spike.name]) - len(seen)
        median, most = (f"{np.median(seen):.0f}", max(seen)) if seen else ("-", "-")
        print(
            f"| {spike.name} | {spike.wants} | {len(seen) + missed} | {len(seen)} | {missed} | {median} | {most} |"
        )


def _delay(spike: Spike, found: Found, onset: int) -> int | None:
    """Steps from the first bad one (counted from 0 in the curve) to the reaction, None for a miss."""
    if spike.wants == "skip":
        return next((step - 1 - onset for step in found.skipped if step - 1 >= onset), None)
    return found.trouble[0] - 1 - onset if found.trouble and found.trouble[0] > onset else None


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
    if sys.argv[1] == "record":
        record({k: v for k, v in words.items() if k != "out"}, Path(words["out"]))
    else:
        table(read(Path(sys.argv[2])))
