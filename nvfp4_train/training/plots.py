"""One picture of a run, drawn from metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_train import units
from nvfp4_train.atomic import atomic_open
from nvfp4_train.training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, GRID = "#22303c", "#7b8794", "#e4e7eb"
LIGHT, BLUE, ORANGE, GREEN, RED = "#b3cde8", "#1c5d99", "#d9480f", "#2b8a3e", "#c92a2a"
_VALID_COLORS = (ORANGE, GREEN, "#862e9c", "#5c940d")
_MOST_POINTS = 4000  # of a line; about as many as the picture has columns
_STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


def plot_run(
    metrics_path: str | Path,
    out_png: str | Path,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
) -> Path:
    """Draw a run's loss, bits per byte, gradient norm, learning rate and throughput over its tokens.

    `baselines` are bits per byte of compressors on the held-out text ({"gzip": ..., "xz": ...}). What the file lacks
    is left out; a file without steps gives a picture that says so. The PNG is replaced whole or not at all.
    """
    import matplotlib
    from matplotlib.figure import Figure

    run = _Curves.of(read_metrics(metrics_path))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12.0, 7.0), dpi=150, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        if len(run.tokens):
            _draw(figure, run, dict(baselines or {}))
        else:
            figure.text(0.5, 0.5, "no training step is recorded yet", ha="center", fontsize=13, color=GREY)
        out_png = Path(out_png)
        out_png.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(out_png, "wb") as f:
            figure.savefig(f, format="png", facecolor="white")
    return out_png


@dataclass
class _Curves:
    """Columns of metrics.jsonl: one value a step (NaN where it is missing), and points of the validations."""

    tokens: np.ndarray
    steps: dict[str, np.ndarray]
    valid: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # metric: (tokens, value)

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> _Curves:
        rows = [r for r in records if "event" not in r and "loss" in r and "tokens" in r]
        names = ("loss", "grad_norm", "clip_threshold", "lr", "tokens_per_second")
        steps = {name: np.array([r.get(name, math.nan) for r in rows], dtype=float) for name in names}
        curves = cls(np.array([r["tokens"] for r in rows], dtype=float), steps)
        tokens = 0.0
        for record in records:
            tokens = record.get("tokens", tokens)
            for name, value in record.items():
                if name.startswith("valid/") and math.isfinite(value):
                    curves.valid.setdefault(name, []).append((tokens, value))
        return curves

    def valid_points(self, metric: str) -> dict[str, np.ndarray]:
        """{name of the held-out set: points [n, 2]} of valid/NAME/`metric`."""
        found = {
            k.split("/", 1)[1].rsplit("/", 1)[0]: v for k, v in self.valid.items() if k.endswith(f"/{metric}")
        }
        return {name: np.array(points) for name, points in found.items()}


def smoothed(values: np.ndarray) -> np.ndarray:
    """An exponential average over a fiftieth of the curve, shorter at the start, where it falls fast.

    Non-finite values are passed over; before the first finite one the result is NaN.
    """
    out, total, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        if math.isfinite(value):
            decay = math.exp(-1.0 / max(0.2, min(len(values) / 50, i / 10)))
            total, weight = decay * total + value, decay * weight + 1.0
        out[i] = total / weight if weight else math.nan
    return out


def _draw(figure: Any, run: _Curves, baselines: dict[str, float]) -> None:
    from matplotlib.ticker import MaxNLocator

    bytes_too = bool(run.valid_points("bits_per_byte"))
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.35, 1.0))
    panels = top.subplots(
        1, 2 if bytes_too else 1, width_ratios=(1.7, 1.0) if bytes_too else None, squeeze=False
    )[0]
    _loss(panels[0], run)
    if bytes_too:
        _bits_per_byte(panels[1], run, baselines)
    panels = [*panels, *bottom.subplots(1, 3)]
    _grad_norm(panels[-3], run)
    _learning_rate(panels[-2], run)
    _throughput(panels[-1], run)
    for axes in panels:
        axes.tick_params(length=3)
        axes.set_xlim(0, run.tokens.max() * 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(lambda n, _: _short(n))
        axes.set_xlabel("tokens")


def _loss(axes: Axes, run: _Curves) -> None:
    axes.set_title("Loss (nats a token)")
    loss = run.steps["loss"]
    _raw_and_smoothed(axes, run.tokens, loss, label=f"training  {smoothed(loss)[-1]:.3f}")
    _validations(axes, run.valid_points("loss"))
    _mark_non_finite(axes, run, run.steps["loss"])
    axes.legend()


def _bits_per_byte(axes: Axes, run: _Curves, baselines: dict[str, float]) -> None:
    axes.set_title("Held-out bits per byte")
    _validations(axes, run.valid_points("bits_per_byte"))
    for name, value in baselines.items():
        axes.axhline(value, color=GREY, lw=1.1, ls=(0, (5, 3)))
        axes.annotate(
            f"{name} {value:.2f}",
            (0.01, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=GREY,
            fontsize=9,
        )
    axes.margins(y=0.15)
    axes.legend()


def _grad_norm(axes: Axes, run: _Curves) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_title("Gradient norm")
    norm, threshold = run.steps["grad_norm"], run.steps["clip_threshold"]
    _raw_and_smoothed(axes, run.tokens, norm)
    if np.isfinite(threshold).any():
        _line(axes, run.tokens, threshold, color=INK, lw=1.1, ls=(0, (5, 3)), label="clipping threshold")
        axes.legend()
    if (norm[np.isfinite(norm)] > 0).any():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda n, _: f"{n:g}")
        axes.yaxis.set_minor_formatter(lambda n, _: "")
    _mark_non_finite(axes, run, norm)


def _learning_rate(axes: Axes, run: _Curves) -> None:
    axes.set_title("Learning rate")
    _line(axes, run.tokens, run.steps["lr"], color=BLUE, lw=1.6)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda n, _: f"{n:.1e}".replace("e-0", "e-") if n else "0")


def _throughput(axes: Axes, run: _Curves) -> None:
    axes.set_title("Tokens per second")
    _raw_and_smoothed(axes, run.tokens, run.steps["tokens_per_second"])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda n, _: _short(n))


def _raw_and_smoothed(axes: Axes, tokens: np.ndarray, values: np.ndarray, label: str = "") -> None:
    if len(values) <= _MOST_POINTS:
        axes.plot(tokens, values, color=LIGHT, lw=0.9)
    else:  # the band between the least and the greatest of every bin
        starts = np.arange(0, len(values), math.ceil(len(values) / _MOST_POINTS))
        low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
        axes.fill_between(tokens[starts], low, high, color=LIGHT, lw=0.9)
    _line(axes, tokens, smoothed(values), color=BLUE, lw=1.8, label=label)


def _line(axes: Axes, tokens: np.ndarray, values: np.ndarray, **style: Any) -> None:
    every = math.ceil(len(values) / _MOST_POINTS)
    marker = "." if len(values) == 1 else None
    axes.plot(tokens[::every], values[::every], marker=marker, **style)


def _mark_non_finite(axes: Axes, run: _Curves, values: np.ndarray) -> None:
    """Steps whose loss or gradient is not finite (their update was skipped), as marks at the foot."""
    bad = run.tokens[~np.isfinite(values)]
    if len(bad):
        label = f"not finite, update skipped ({len(bad)})"
        axes.plot(
            bad,
            np.zeros(len(bad)),
            "|",
            color=RED,
            ms=9,
            mew=1.5,
            label=label,
            transform=axes.get_xaxis_transform(),
        )
        axes.legend()


def _validations(axes: Axes, sets: dict[str, np.ndarray]) -> None:
    for i, (name, points) in enumerate(sets.items()):
        label = f"held out{f', {name}' if len(sets) > 1 else ''}  {points[-1, 1]:.3f}"
        color = _VALID_COLORS[i % len(_VALID_COLORS)]
        axes.plot(*points.T, "o-", color=color, ms=4.5, lw=1.2, label=label, zorder=3)


def _short(n: float) -> str:
    """A tick's number without zeros that say nothing: 200k, 1.2M."""
    text = units.count(n)
    head, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (head.rstrip("0").rstrip(".") if "." in head else head) + unit
