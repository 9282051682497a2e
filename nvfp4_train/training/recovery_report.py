"""What a person gets when recovery gives up: recovery_report.md in the run folder, with a picture beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train import units
from nvfp4_train.atomic import atomic_open, write_text
from nvfp4_train.data.sampler import SPLIT, Sampler
from nvfp4_train.errors import CheckpointError
from nvfp4_train.training.history import History
from nvfp4_train.training.metrics import read_metrics

ABANDONED = "recovery"  # folder of the run folder's: the records of steps that a rewind has left
_AROUND = 60  # steps drawn and looked at before the onset
_BATCHES, _SEQUENCES, _CHARACTERS = 4, 8, 160  # how much of the data is shown
_LAYERS = 20


def abandoned_path(folder: Path, number: int) -> Path:
    """Where the records go that rewind `number` (from 1) leaves."""
    return folder / ABANDONED / f"rewind_{number:03d}.jsonl"


def write_report(
    path: Path,
    cause: str,
    history: History,
    metrics: Path,
    sampler: Sampler,
    total_steps: int,
) -> Path:
    """Write the report to `path`, whole or not at all. `metrics`: the run's metrics.jsonl, up to the present step.

    `sampler` gives the texts of the batches. What can't be read or drawn is left out, and the report says so.
    """
    folder = metrics.parent
    records = read_metrics(metrics)
    steps = [r for r in records if "event" not in r and "loss" in r]
    last = steps[-1]["step"] if steps else 0
    onset = _onset(steps)
    parts = [f"# Recovery gave up after step {last}\n", f"{cause}\n"]
    parts.append(_timeline(history, records, onset, last, total_steps))
    parts.append(_picture(folder, path, history, records, onset))
    parts.append(_health(steps))
    parts.append(_data(sampler, history, onset, last))
    write_text(path, "\n".join(parts))
    return path


def _onset(steps: Sequence[dict[str, Any]]) -> int:
    """The first of the latest steps in which something stood out; the last step where none is known."""
    if not steps:
        return 1
    last = steps[-1]
    return last["step"] - max(0, int(last.get("exceedance_age", 0)) - 1)


def _timeline(history: History, records: list[dict[str, Any]], onset: int, last: int, total: int) -> str:
    rows = []
    for number, r in enumerate(history.rewinds, start=1):
        careful = ""
        if r.careful_until > r.back_to:
            layers = f"{len(r.bf16)} layers in BF16" if r.bf16 else "precision as it was"
            careful = f"; through step {r.careful_until} learning rate x {r.lr_factor:g}, {layers}"
        skip = f"; batches {r.skip[0]} to {r.skip[1]} stepped over" if r.skip else ""
        rows.append(
            (
                r.onset,
                f"rewind {number} from step {r.found} to step {r.back_to}{skip}{careful}. Reason: {r.reason}",
            )
        )
    kinds = ("spike", "quantization_alarm", "resume")
    events = [r for r in records if r.get("event") in kinds and r.get("step", 0) >= onset - _AROUND]
    rows += [
        (
            r["step"],
            f"{r['event'].replace('_', ' ')}{': ' + r['reason'] if 'reason' in r else ''}"
            f"{' (update skipped)' if r.get('skipped') else ''}",
        )
        for r in events[-40:]
    ]
    rows.append((last, f"recovery gave up, at {100 * last / max(1, total):.1f} % of the run's {total} steps"))
    lines = [f"| {step} | {text} |" for step, text in sorted(rows, key=lambda row: row[0])]
    return "## Timeline\n\n| step | what |\n| --- | --- |\n" + "\n".join(lines) + "\n"


def _picture(folder: Path, path: Path, history: History, records: list[dict[str, Any]], onset: int) -> str:
    """A curve for every attempt: the abandoned ones, and the last."""
    attempts = []
    for number, rewind in enumerate(history.rewinds, start=1):
        try:
            left = read_metrics(abandoned_path(folder, number))
        except (OSError, CheckpointError):
            continue
        if rewind.found >= onset - 10 * _AROUND:
            attempts.append((f"attempt {number}", left))
    attempts.append((f"attempt {len(history.rewinds) + 1}", records))
    first = min([onset, *(r.onset for r in history.rewinds if r.found >= onset - 10 * _AROUND)]) - _AROUND
    image = path.with_suffix(".png")
    try:
        _draw(image, attempts, first)
    except Exception as error:  # a picture that fails must not cost the report
        return f"(The picture could not be drawn: {error}.)\n"
    return f"## Around the onset\n\n![Loss and gradient norm of every attempt]({image.name})\n"


def _draw(image: Path, attempts: list[tuple[str, list[dict[str, Any]]]], first: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.0), dpi=110, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, key in zip(panels, ("loss", "grad_norm"), strict=True):
        for name, records in attempts:
            rows = [r for r in records if key in r and r["step"] >= first]
            values = np.array([r[key] for r in rows], dtype=float)
            axes.plot([r["step"] for r in rows], np.where(values > 0, values, np.nan), ".-", ms=3, label=name)
            for r in rows:
                if not math.isfinite(r[key]):
                    axes.axvline(r["step"], color="#c92a2a", lw=0.8, alpha=0.5)
        axes.set_yscale("log")
        axes.set_ylabel(key)
        axes.grid(alpha=0.3)
    panels[0].set_title("red: not finite", loc="right", fontsize=9)
    panels[0].legend()
    panels[1].set_xlabel("step")
    with atomic_open(image, "wb") as f:
        figure.savefig(f, format="png")


def _health(steps: list[dict[str, Any]]) -> str:
    """The last two measurements of every layer, the noisiest first."""
    measured = [r for r in steps if any(key.startswith("health/") for key in r)]
    title = "## Quantization health\n\n"
    if not measured:
        return title + "No layer's health was measured (precision.health_every), or none is quantized.\n"
    now, before = measured[-1], measured[-2] if len(measured) > 1 else {}
    rows = []
    for key, value in now.items():
        if key.startswith("health/") and key.endswith("/sqnr_db"):
            stem = key.removesuffix("sqnr_db")
            _, layer, gemm, _ = key.split("/")
            cells = [
                f"{_number(before.get(stem + kind))} -> {_number(now[stem + kind])}"
                for kind in ("sqnr_db", "underflow", "saturation")
            ]
            rows.append(
                (value if math.isfinite(value) else -math.inf, f"| {layer} | {gemm} | {' | '.join(cells)} |")
            )
    lines = [line for _, line in sorted(rows)[:_LAYERS]]
    head = (
        "| layer | GEMM | signal to noise (dB) | underflow | saturation |\n| --- | --- | --- | --- | --- |\n"
    )
    where = f"Steps {before['step']} -> {now['step']}" if before else f"Step {now['step']}"
    return f"{title}{where}, the {len(lines)} noisiest of {len(rows)}:\n\n{head}" + "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _data(sampler: Sampler, history: History, onset: int, last: int) -> str:
    """The documents of the batches from the onset on."""
    lines = ["## What was trained on\n"]
    for step in range(onset, min(last, onset + _BATCHES - 1) + 1):
        number = history.batch(step)
        lines.append(f"### Step {step}: batch {number}\n")
        try:
            lines += _documents(sampler, number)
        except Exception as error:  # data that can't be read may be why this report is written
            lines.append(f"It could not be read: {error}.")
        lines.append("")
    return "\n".join(lines)


def _documents(sampler: Sampler, number: int) -> list[str]:
    lines = ["| data set | tokens of its stream | documents | begins with |", "| --- | --- | --- | --- |"]
    sequences = sampler.spans(number)
    for dataset, spans in sequences[:_SEQUENCES]:
        where = [f"{start} to {stop - 1}" for start, stop in spans]
        documents = sum(len(dataset.document_spans(SPLIT, *span)[0]) for span in spans)
        text = units.printable(dataset.tokenizer.decode(dataset.tokens(SPLIT, *spans[0]).tolist()))
        text = " ".join(text.split())[:_CHARACTERS].replace("|", "\\|").replace("`", "'")
        lines.append(f"| {dataset.path.name} | {', '.join(where)} | {documents} | `{text}` |")
    if len(sequences) > _SEQUENCES:
        lines.append(f"\n{len(sequences) - _SEQUENCES} more sequences.")
    return lines
