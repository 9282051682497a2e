from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.image import imread

from nvfp4_train.training import plots
from nvfp4_train.training.metrics import MetricsWriter, truncate_after
from nvfp4_train.training.plots import plot_run, smoothed

pytestmark = pytest.mark.filterwarnings("error")


def write(path, steps: range, bad=(), validate_at=()) -> None:
    with MetricsWriter(path) as metrics:
        for step in steps:
            row = {"step": step, "tokens": 4096 * step, "loss": 8 * step**-0.2, "grad_norm": 3 / step}
            row |= {"clip_threshold": 0.65, "lr": 1e-3, "tokens_per_second": 1e4}
            if step in bad:
                row |= {"loss": math.nan, "grad_norm": math.inf}
            metrics.write([row])
            if step in validate_at:
                metrics.write([{"step": step, "valid/main/loss": 4.0, "valid/main/bits_per_byte": 2.0}])
                metrics.event("checkpoint", step=step, path="x")


def drawn(path) -> np.ndarray:
    image = imread(path)
    assert image.shape[:2] == (1050, 1800)
    return image


def pixels(image: np.ndarray, color: str) -> int:
    """How many pixels have about this colour."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(image[..., :3] - rgb).max(-1) < 0.05).sum())


def test_a_run_with_validations_and_baselines(tmp_path):
    write(tmp_path / "m.jsonl", range(1, 200), validate_at=(100, 199))
    image = drawn(
        plot_run(tmp_path / "m.jsonl", tmp_path / "plots" / "run.png", {"gzip": 2.04, "xz": 1.69}, "a run")
    )
    assert pixels(image, plots.BLUE) > 1000
    assert pixels(image, plots.ORANGE) > 100
    assert pixels(image, plots.RED) == 0
    assert [p.name for p in (tmp_path / "plots").iterdir()] == ["run.png"]


@pytest.mark.parametrize("steps", [range(1, 2), range(1, 4), range(5, 5)])
def test_short_and_empty_runs(tmp_path, steps):
    write(tmp_path / "m.jsonl", steps)
    image = drawn(plot_run(tmp_path / "m.jsonl", tmp_path / "run.png", {"gzip": 2.04}))
    assert (pixels(image, plots.BLUE) > 0) == (len(steps) > 0)
    assert (image[..., :3] < 0.9).any()


def test_a_missing_file_gives_a_picture_that_says_so(tmp_path):
    assert (drawn(plot_run(tmp_path / "none.jsonl", tmp_path / "run.png"))[..., :3] < 0.9).any()


@pytest.mark.parametrize("bad", [(1,), (50, 51), tuple(range(1, 100))])
def test_steps_that_are_not_finite_are_marked(tmp_path, bad):
    write(tmp_path / "m.jsonl", range(1, 100), bad=bad)
    assert pixels(drawn(plot_run(tmp_path / "m.jsonl", tmp_path / "run.png")), plots.RED) > 0


def test_a_resumed_run_replaces_its_picture(tmp_path):
    metrics, png = tmp_path / "m.jsonl", tmp_path / "run.png"
    write(metrics, range(1, 60))
    before = drawn(plot_run(metrics, png))
    truncate_after(metrics, 40)
    write(metrics, range(41, 120))
    assert (drawn(plot_run(metrics, png)) != before).any()


def test_a_long_run_is_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "_MOST_POINTS", 50)
    write(tmp_path / "m.jsonl", range(1, 500), bad=(100,))
    assert pixels(drawn(plot_run(tmp_path / "m.jsonl", tmp_path / "run.png")), plots.LIGHT) > 100


def test_smoothing_follows_a_fall_and_passes_over_what_is_not_finite():
    values = 2 + 6 * np.arange(1, 1001.0) ** -0.5
    rng = np.random.default_rng(0)
    noisy = values + rng.normal(0, 0.1, 1000)
    noisy[[0, 10, 500]] = math.nan, math.inf, math.nan
    smooth = smoothed(noisy)
    assert math.isnan(smooth[0])
    assert np.isfinite(smooth[1:]).all()
    assert np.abs(smooth - values)[20:].max() < 0.25
    assert np.std((smooth - values)[500:]) < 0.03
    np.testing.assert_allclose(smoothed(np.full(10, 3.0)), 3.0)
