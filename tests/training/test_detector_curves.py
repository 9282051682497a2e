"""The detector on recorded curves, with recovery's defaults; scripts/detector_curves.py makes the whole table."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "detector_curves.py"))


@pytest.fixture(scope="module")
def curve():
    return SCRIPT["read"](ROOT / "tests" / "data" / "healthy_curves.npz")["nvfp4_hybrid_3"]


def test_a_healthy_run_is_left_alone(curve):
    part = type(curve)(curve.loss[:4000], curve.norm[:4000])
    found = SCRIPT["detect"](part)
    assert found.skipped == []
    assert found.trouble is None
    assert found.exceedances > 0  # three sigma are exceeded now and then, and only written down


@pytest.mark.parametrize("spike", SCRIPT["SPIKES"][:-1], ids=lambda spike: spike.name)
def test_an_injected_spike_is_found_in_time(curve, spike):
    found = SCRIPT["detect"](SCRIPT["injected"](curve, spike, 5000, before=200, after=100))
    delay = SCRIPT["_delay"](spike, found, 200)
    assert delay is not None
    assert delay <= (0 if spike.wants == "skip" else 29)
