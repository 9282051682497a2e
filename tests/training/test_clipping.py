import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvfp4_train.config.schema import ClippingConfig
from nvfp4_train.errors import CheckpointError, ConfigError
from nvfp4_train.training.clipping import build_clipper, global_norm

ONE = torch.tensor(1.0)
ZERO = torch.tensor(0.0)


def clipper(name="adaptive", **values):
    return build_clipper(ClippingConfig(name=name, **values), "cpu")


def feed(clip, *norms):
    """Coefficients of steps with these norms; a step whose norm is not finite is a skipped one."""
    return [clip.update(torch.tensor(norm), ONE if math.isfinite(norm) else ZERO).item() for norm in norms]


def host(clip):
    return {name: value.item() for name, value in clip.metrics().items()}


def test_global_norm_is_that_of_all_gradients_together():
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(300, 70), (70,), (5, 4, 3), ()]]
    for p in params[:3]:
        p.grad = torch.randn(p.shape, generator=generator)
    expected = torch.cat([p.grad.flatten() for p in params[:3]]).double().norm()
    norm = global_norm(params)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    params[1].grad[3] = math.inf
    assert not math.isfinite(global_norm(params).item())


def test_fixed_threshold_clips_to_the_baseline_and_never_moves():
    clip = clipper("fixed", baseline=2.0, raise_after=3)
    assert feed(clip, 4.0, 8.0, 1.0, 2.0, 0.0) == [0.5, 0.25, 1.0, 1.0, 1.0]
    feed(clip, *[9.0] * 20)
    assert clip.threshold.item() == 2.0


def test_hundred_clipped_steps_in_a_row_raise_the_threshold_by_five_percent():
    clip = clipper(baseline=2.0)
    start = torch.tensor(0.65 * 2.0).item()
    assert clip.threshold.item() == start
    feed(clip, *[5.0] * 99)
    assert clip.threshold.item() == start
    assert feed(clip, 5.0) == [pytest.approx(start / 5.0)]  # the raise is for the steps to come
    assert host(clip)["clip_threshold"] == start
    assert clip.threshold.item() == pytest.approx(start * 1.05)
    feed(clip, *[5.0] * 99)
    assert clip.threshold.item() == pytest.approx(start * 1.05)
    feed(clip, 5.0)
    assert clip.threshold.item() == pytest.approx(start * 1.05**2)


def test_an_unclipped_step_starts_the_count_anew_and_a_skipped_one_does_not():
    clip = clipper(raise_after=3)
    feed(clip, 9.0, 9.0, 0.1, 9.0, 9.0)
    assert clip.threshold.item() == pytest.approx(0.65)
    before = clip.state_dict()
    assert feed(clip, math.nan, math.inf) == [1.0, 1.0]
    assert all(torch.equal(value, before[name]) for name, value in clip.state_dict().items())
    feed(clip, 9.0)
    assert clip.threshold.item() == pytest.approx(0.65 * 1.05)


@given(
    st.lists(st.one_of(st.floats(0, 4, width=32), st.just(math.nan)), max_size=40),
    st.integers(1, 4),
    st.integers(1, 6),
)
@settings(deadline=None, max_examples=100)
def test_equals_the_rules_in_plain_python(norms, raise_after, average_steps):
    clip = clipper(raise_after=raise_after, raise_factor=1.5, average_steps=average_steps)
    threshold, in_a_row, average, steps = 0.65, 0, 0.0, 0
    for norm in norms:
        (coefficient,) = feed(clip, norm)
        if math.isnan(norm):
            assert coefficient == 1.0
            continue
        clipped = norm > clip.metrics()["clip_threshold"].item()
        assert clip.metrics()["clip_threshold"].item() == pytest.approx(threshold)
        assert coefficient == pytest.approx(threshold / norm if clipped else 1.0, rel=1e-5)
        steps += 1
        average += (norm - average) * max(1 / steps, 2 / (average_steps + 1))
        assert host(clip)["clip_average_ratio"] == pytest.approx(average / threshold, rel=1e-4, abs=1e-6)
        in_a_row = in_a_row + 1 if clipped else 0
        if in_a_row == raise_after:
            threshold, in_a_row = threshold * 1.5, 0
    assert clip.threshold.item() == pytest.approx(threshold)
    assert clip.clipped_in_a_row.item() == in_a_row
    assert clip.accepted_steps.item() == steps


def test_metrics_of_a_step_outlive_the_next():
    clip = clipper("fixed")
    feed(clip, 0.5)
    first = clip.metrics()
    feed(clip, 3.0)
    assert first["clip_ratio"].item() == 0.5
    assert first["clip_average_ratio"].item() == 0.5
    assert host(clip)["clip_ratio"] == 3.0
    assert host(clip)["clip_average_ratio"] == pytest.approx(1.75)  # the mean, while steps are few


@pytest.mark.parametrize("name", ["fixed", "adaptive"])
def test_warns_once_when_the_average_stays_off_and_its_advice_helps(name):
    clip = clipper(name, baseline=10.0, warn_after=20, average_steps=5)
    feed(clip, *[1.0] * 19)
    assert clip.warning(host(clip)) is None
    feed(clip, 1.0)
    text = clip.warning(host(clip))
    assert "20 steps" in text
    assert "clipping.baseline=" in text
    feed(clip, 1.0)
    assert clip.warning(host(clip)) is None

    advised = clipper(name, baseline=float(text.split("baseline=")[1].split(")")[0]), warn_after=20)
    feed(advised, *[1.0] * 50)
    assert advised.warning(host(advised)) is None
    assert host(advised)["clip_average_ratio"] == pytest.approx(0.8, rel=0.01)

    feed(clip, *[0.8 * clip.threshold.item()] * 30)  # back on target, then off again: a new warning
    assert clip.warning(host(clip)) is None
    feed(clip, *[0.1] * 40)
    assert clip.warning(host(clip)) is not None


def test_restored_state_goes_on_the_same():
    norms = [0.3, 2.0, 2.0, math.nan, 2.0, 1.0, 5.0, 5.0, 5.0, 0.2]
    whole, first, second = (clipper(raise_after=3) for _ in range(3))
    expected = feed(whole, *norms, *norms)
    feed(first, *norms)
    saved = first.state_dict()
    second.load_state_dict(saved)
    feed(first, *[7.0] * 10)  # neither the saved tensors nor the restored clipper follow
    assert feed(second, *norms) == expected[len(norms) :]
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in second.state_dict().items())
    assert host(second) == host(whole)


def test_incomplete_state_is_refused():
    state = clipper().state_dict()
    del state["average_norm"]
    with pytest.raises(CheckpointError, match="average_norm"):
        clipper().load_state_dict(state)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"name": "none"}, "clipping.name='none'"),
        ({"baseline": 0.0}, "clipping.baseline=0"),
        ({"initial_ratio": math.nan}, "clipping.initial_ratio=nan"),
        ({"raise_after": 0}, "clipping.raise_after=0"),
        ({"raise_factor": 0.5}, "clipping.raise_factor=0.5"),
        ({"tolerance": -1.0}, "clipping.tolerance=-1"),
        ({"average_steps": 0}, "clipping.average_steps=0"),
    ],
)
def test_impossible_values_are_named(values, key):
    with pytest.raises(ConfigError, match=key):
        clipper(**values)


def test_zclip_pulls_back_what_stands_out_and_follows_the_clipped_norms():
    clip = clipper("zclip", baseline=10.0, zclip_warmup=4)
    norms = [1.0, 1.2, 0.8, 1.4]
    assert feed(clip, *norms) == [1.0] * 4
    mean, deviation = torch.tensor(norms).mean(), torch.tensor(norms).std(unbiased=False)
    assert clip.mean.item() == pytest.approx(mean.item())
    assert clip.variance.sqrt().item() == pytest.approx(deviation.item())
    assert feed(clip, 1.2) == [1.0]
    m, s = clip.mean.item(), clip.variance.sqrt().item()
    z = (5.0 - m) / s
    limit = m + s * 2.5**2 / z
    assert feed(clip, 5.0) == [pytest.approx(limit / 5.0, rel=1e-4)]
    assert clip.mean.item() == pytest.approx(0.97 * m + 0.03 * limit, rel=1e-4)
    before = clip.state_dict()
    assert feed(clip, math.nan) == [1.0]
    assert all(torch.equal(value, before[name]) for name, value in clip.state_dict().items())
    assert feed(clip, 1e6)[0] * 1e6 < limit  # the further out, the harder


def test_adagc_clips_each_tensor_to_the_average_of_its_own_norms():
    clip = build_clipper(ClippingConfig(name="adagc", adagc_warmup=2), "cpu", tensors=3)
    params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]

    def step(*norms):
        for parameter, norm in zip(params, norms, strict=True):
            parameter.grad = torch.full((4,), norm / 2)
        norm = torch.linalg.vector_norm(torch.tensor(norms))
        coefficient = clip.clip(params, norm, torch.isfinite(norm).float())
        return [parameter.grad.norm().item() * coefficient.item() for parameter in params]

    assert step(0.6, 0.8, 0.0) == pytest.approx([0.6, 0.8, 0.0])
    assert step(3.0, 4.0, 0.0) == pytest.approx([0.6, 0.8, 0.0])  # warm-up: the global norm is clipped to 1
    assert step(3.0, 0.8, 0.5) == pytest.approx([0.63, 0.8, 0.5])  # then the tensors', the new one free
    assert clip.tensor_norms.tolist() == pytest.approx([0.98 * 0.6 + 0.02 * 0.63, 0.8, 0.5])
    before = clip.state_dict()
    assert math.isnan(step(math.nan, 0.8, 0.5)[0])
    assert all(torch.equal(value, before[name]) for name, value in clip.state_dict().items())
    other = build_clipper(ClippingConfig(name="adagc", adagc_warmup=2), "cpu", tensors=3)
    other.load_state_dict(before)
    assert torch.equal(other.tensor_norms, clip.tensor_norms)
    assert step(0.1, 0.1, 9.0) == pytest.approx([0.1, 0.1, 0.525])
