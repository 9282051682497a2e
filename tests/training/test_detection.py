import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.config.schema import RecoveryConfig
from nvfp4_train.training.detection import SpikeDetector


def detector(name="auto", **values):
    return SpikeDetector(RecoveryConfig(name=name, **values), "cpu")


def feed(found, losses, norms=None):
    """Whether the update of each step is taken; a loss or norm that is not finite makes the step that."""
    norms = [1.0] * len(losses) if norms is None else norms
    return [
        bool(
            found.update(
                torch.tensor(loss),
                torch.tensor(norm),
                torch.tensor(float(math.isfinite(loss) and math.isfinite(norm))),
            )
        )
        for loss, norm in zip(losses, norms, strict=True)
    ]


def host(found):
    return {name: value.item() for name, value in found.metrics().items()}


def healthy(n=100, seed=0, level=3.0):
    return (level + 0.05 * torch.randn(n, generator=torch.Generator().manual_seed(seed))).tolist()


def test_nothing_stands_out_until_the_window_is_full():
    found = detector()
    assert all(feed(found, [3.0] * 50 + [30.0] + [3.0] * 48))
    assert host(found)["exceedances"] == 0
    assert feed(found, [math.nan]) == [False]  # but what is not finite is skipped from the first step on


def test_a_large_loss_or_norm_is_skipped_a_smaller_one_only_counted():
    for losses, norms in (([5.0, 3.0], [1.0, 1.0]), ([3.0, 3.0], [50.0, 1.0])):
        found = detector()
        feed(found, healthy())
        assert feed(found, losses, norms) == [False, True]
        assert host(found)["exceedances"] == 1
        assert host(found)["exceedance_age"] == 2
    found = detector()
    feed(found, healthy())
    assert feed(found, [3.22, 3.0], [1.0, 10.0]) == [True, True]
    assert host(found)["exceedances"] == 2
    assert host(found)["norm_sigmas"] == pytest.approx(math.log(10.0) / 0.2, rel=1e-3)


def test_the_rule_is_the_windows_average_and_deviation_with_a_floor():
    found = detector(window=10, loss_floor=0.01)
    losses = torch.linspace(2.0, 2.9, 10)
    feed(found, losses.tolist())
    feed(found, [3.0])
    assert host(found)["loss_sigmas"] == pytest.approx(
        ((3.0 - losses.mean()) / losses.std()).item(), rel=1e-4
    )
    flat = detector(window=10, loss_floor=0.01)
    feed(flat, [2.0] * 10)
    feed(flat, [2.05])
    assert host(flat)["loss_sigmas"] == pytest.approx(0.05 / 0.02, rel=1e-4)


def test_skipped_steps_leave_no_trace_in_the_windows_and_outliers_a_bounded_one():
    found = detector()
    feed(found, healthy())
    before = found.state_dict()
    feed(found, [9.0, math.nan, 3.0], [1.0, 1.0, math.inf])
    for name in ("losses", "norms", "accepted_steps"):
        assert torch.equal(found.state_dict()[name], before[name])
    limit = (found.losses.mean() + 3.0 * found.losses.std()).item()
    feed(found, [3.25])
    assert found.losses[-1].item() == pytest.approx(limit)
    assert feed(found, [9.0]) == [False]  # a second spike isn't hidden by the first


@pytest.mark.parametrize(
    ("name", "taken"), [("auto", [False, False]), ("skip_nonfinite", [True, False]), ("off", [True, True])]
)
def test_what_each_mode_refuses_while_all_see_the_same(name, taken):
    found, other = detector(name), detector()
    for each in (found, other):
        feed(each, healthy())
    assert feed(found, [9.0, math.nan]) == taken
    feed(other, [9.0, math.nan])
    assert host(found) == pytest.approx(host(other), nan_ok=True)


def test_restarted_it_compares_only_with_what_comes_then():
    found = detector(window=20)
    feed(found, healthy(40))
    found.restart()
    assert all(feed(found, healthy(20, level=6.0)))
    assert host(found)["exceedances"] == 0
    assert feed(found, [math.nan, 6.0, 9.0]) == [False, True, False]


def test_restored_it_goes_on_the_same():
    whole, first, second = detector(), detector(), detector()
    start, rest = healthy(130), [3.3, 9.0, *healthy(40, 1)]
    expected = feed(whole, start + rest)
    feed(first, start)
    second.load_state_dict(first.state_dict())
    feed(first, rest)
    assert feed(second, rest) == expected[len(start) :]
    assert host(second) == host(whole)


@given(st.lists(st.floats(0.5, 8.0, width=32), min_size=1, max_size=40), st.integers(2, 6), st.integers(1, 5))
@settings(max_examples=60)
def test_equals_the_rules_in_plain_python(losses, window, within):
    found = detector(window=window, confirm_within=within, loss_floor=0.01)
    kept, flags = [], []
    for loss in losses:
        (taken,) = feed(found, [loss])
        z = 0.0
        if len(kept) >= window:
            past = torch.tensor(kept[-window:])
            sigma = max(past.std().item(), 0.01 * past.mean().item())
            z = (loss - past.mean().item()) / sigma
            if min(abs(z - 3.0), abs(z - 20.0)) < 1e-3:
                return  # too close to a threshold to be told apart in float32
            loss = min(loss, past.mean().item() + 3.0 * sigma)
        flags = [*flags, z > 3.0][-within:]
        assert taken == (z <= 20.0)
        assert host(found)["loss_sigmas"] == pytest.approx(z, rel=1e-3, abs=1e-3)
        assert host(found)["exceedances"] == sum(flags)
        assert host(found)["exceedance_age"] == (len(flags) - flags.index(True) if any(flags) else 0)
        if z <= 20.0:
            kept.append(loss)
