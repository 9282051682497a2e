import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.config.schema import ScheduleConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.training.schedule import build_schedule

BASE = 3e-4


def config(name="staged", warmup_tokens=1e9, **values):
    return ScheduleConfig(name=name, warmup_tokens=warmup_tokens, **values)


@st.composite
def schedules(draw):
    share = st.floats(0.01, 0.99)
    max_tokens = draw(st.floats(1e3, 2e13))
    name = draw(st.sampled_from(["staged", "wsd", "cosine"]))
    floor = draw(share)
    cfg = config(
        name,
        warmup_tokens=max_tokens * draw(st.sampled_from([0.0, 0.01, 0.3, 0.9])),
        boost=draw(st.floats(1.0, 1.5)),
        decay_factor=draw(share),
        decay_every=max_tokens * draw(st.floats(0.001, 3.0)),
        floor=floor,
        anneal_start=draw(share),
        final_lr=draw(st.floats(0.0, floor)),
        decay_shape=draw(st.sampled_from(["linear", "cosine", "minus_sqrt"])),
    )
    return cfg, build_schedule(cfg, BASE, max_tokens), max_tokens


@given(schedules(), st.lists(st.floats(0.0, 1.1), min_size=2, max_size=30))
@settings(deadline=None, max_examples=200)
def test_rises_in_warmup_then_never_and_stays_in_bounds(case, points):
    cfg, schedule, max_tokens = case
    peak = BASE * (cfg.boost if cfg.name == "staged" else 1.0)
    final = peak * cfg.final_lr
    tokens = sorted(point * max_tokens for point in points)
    rates = [schedule.lr(t) for t in tokens]
    for (t0, r0), (t1, r1) in itertools.pairwise(zip(tokens, rates, strict=True)):
        if t1 <= cfg.warmup_tokens:
            assert r1 >= r0
        elif t0 >= cfg.warmup_tokens:
            assert r1 <= r0 * (1 + 1e-12)
    for t, rate in zip(tokens, rates, strict=True):
        assert 0.0 <= rate <= peak * (1 + 1e-12)
        if t >= cfg.warmup_tokens:
            assert rate >= final * (1 - 1e-12)
    assert schedule.lr(0.0) > 0.0
    assert schedule.lr(max_tokens) == pytest.approx(final)


@given(schedules())
@settings(deadline=None, max_examples=200)
def test_continuous_but_for_the_stage_steps(case):
    cfg, schedule, max_tokens = case
    gap = 1e-9 * max_tokens
    anneal = cfg.warmup_tokens if cfg.name == "cosine" else cfg.anneal_start * max_tokens
    for corner in (cfg.warmup_tokens, max(anneal, cfg.warmup_tokens), max_tokens):
        if corner == 0.0:
            continue
        before, after = schedule.lr(corner - gap), schedule.lr(corner + gap)
        stages = [math.floor((t - cfg.warmup_tokens) / cfg.decay_every) for t in (corner - gap, corner + gap)]
        if cfg.name == "staged" and 0 <= stages[0] < stages[1]:
            continue  # a stage step falls on the corner
        assert after == pytest.approx(before, abs=1e-3 * BASE)


def test_staged_takes_the_rates_of_the_recipe():
    schedule = build_schedule(config(decay_every=50e9), BASE, 1e12)
    peak = 1.35 * BASE
    assert schedule.lr(0) == pytest.approx(0.01 * peak)
    assert schedule.lr(0.5e9) == pytest.approx(0.505 * peak)
    assert schedule.lr(1e9) == pytest.approx(peak)
    assert schedule.lr(51e9 - 1) == pytest.approx(peak)
    assert schedule.lr(51e9) == pytest.approx(0.85 * peak)
    assert schedule.lr(101e9) == pytest.approx(0.85**2 * peak)
    reached = 0.85**15 * peak  # 15 whole stages between 1 B and 800 B tokens
    assert schedule.lr(800e9) == pytest.approx(reached)
    assert schedule.lr(900e9) == pytest.approx((reached + 0.01 * peak) / 2)
    assert schedule.lr(1e12) == pytest.approx(0.01 * peak)


@pytest.mark.parametrize(
    ("shape", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("minus_sqrt", 1 - math.sqrt(0.5))]
)
def test_wsd_is_constant_then_decays_by_its_shape(shape, halfway):
    schedule = build_schedule(config("wsd", decay_shape=shape), BASE, 1e12)
    assert schedule.lr(2e9) == schedule.lr(0.8e12 - 1) == BASE  # no boost
    assert schedule.lr(0.9e12) == pytest.approx(BASE * (0.01 + 0.99 * halfway))
    assert schedule.lr(1e12) == pytest.approx(0.01 * BASE)


def test_cosine_spans_the_run_after_warmup():
    schedule = build_schedule(config("cosine", warmup_tokens=2e9, final_lr=0.1), BASE, 10e9)
    assert schedule.lr(2e9) == pytest.approx(BASE)
    assert schedule.lr(6e9) == pytest.approx(BASE * 0.55)
    assert schedule.lr(4e9) == pytest.approx(BASE * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))


@pytest.mark.parametrize("name", ["staged", "wsd", "cosine"])
def test_batch_size_keeps_the_curve_and_the_last_step_is_near_final(name):
    max_tokens = 1e9
    schedule = build_schedule(config(name, warmup_tokens=2e7, decay_every=1e8), BASE, max_tokens)

    def area(steps):
        size = max_tokens / steps
        return sum(schedule.lr(step * size) * size for step in range(steps))

    assert area(1000) == pytest.approx(area(4000), rel=0.01)
    peak = schedule.peak
    assert 0 <= schedule.lr(max_tokens * 0.999) - schedule.final < 0.01 * peak


def test_milestones_say_where_the_floor_is_or_that_it_is_never_reached():
    long = {m.name: m for m in build_schedule(config(), BASE, 10e12).milestones()}
    # 0.85^28 is still above 1 %, 0.85^29 below.
    assert long["floor"].tokens == 1e9 + 29 * 50e9
    assert long["floor"].lr == pytest.approx(0.01 * 1.35 * BASE)
    schedule = build_schedule(config(), BASE, 10e12)
    assert schedule.lr(long["floor"].tokens) == long["floor"].lr < schedule.lr(long["floor"].tokens - 1)
    assert long["peak"] == ("peak", 1e9, 1.35 * BASE)
    assert long["anneal"].tokens == 8e12
    assert long["end"].tokens == 10e12
    short = {m.name: m for m in build_schedule(config(), BASE, 1e12).milestones()}
    assert short["floor"].tokens is None
    assert "floor" not in {m.name for m in build_schedule(config("wsd"), BASE, 1e12).milestones()}


@pytest.mark.parametrize(
    "values",
    [
        {"warmup_tokens": 0.0},
        {"warmup_tokens": 95.0},  # past the start of annealing
        {"anneal_start": 0.0},
        {"anneal_start": 1.0},
        {"floor": 0.0, "final_lr": 0.0},
        {"decay_factor": 1.0},
        {"decay_every": 1e-9},
        {"decay_every": 1e18},
    ],
)
@pytest.mark.parametrize("name", ["staged", "wsd", "cosine"])
def test_degenerate_lengths_give_finite_rates(name, values):
    schedule = build_schedule(config(name, **{"warmup_tokens": 1.0} | values), BASE, 100.0)
    rates = [schedule.lr(tokens) for tokens in (0, 0.5, 1, 50, 80, 95, 99, 100, 1e30)]
    assert all(math.isfinite(rate) and 0.0 <= rate <= schedule.peak for rate in rates)
    assert rates[0] > 0.0
    assert rates[-1] == schedule.final
    assert all(m.tokens is None or 0 <= m.tokens <= 100 for m in schedule.milestones())


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"name": "stagd"}, "schedule.name='stagd'"),
        ({"name": "wsd", "decay_shape": "exp"}, "schedule.decay_shape='exp'"),
        ({"warmup_tokens": 1e12}, "schedule.warmup_tokens=1e+12"),
        ({"warmup_tokens": -1.0}, "schedule.warmup_tokens=-1"),
        ({"anneal_start": 80.0}, "schedule.anneal_start=80"),
        ({"final_lr": -0.1}, "schedule.final_lr=-0.1"),
        ({"final_lr": 0.5, "decay_every": 1e9}, "schedule.final_lr=0.5"),
        ({"decay_every": 0.0}, "schedule.decay_every=0"),
        ({"decay_factor": 0.0}, "schedule.decay_factor=0"),
        ({"boost": 0.0}, "schedule.boost=0"),
        ({"floor": float("nan")}, "schedule.floor=nan"),
    ],
)
def test_impossible_values_are_named(values, key):
    with pytest.raises(ConfigError, match=key.replace("+", r"\+").replace(".", r"\.")):
        build_schedule(config(**values), BASE, 1e12)


@pytest.mark.parametrize(
    ("lr", "tokens", "key"), [(0.0, 1e12, "optimizer.lr"), (BASE, 0.0, "training.max_tokens")]
)
def test_impossible_rate_or_budget_is_named(lr, tokens, key):
    with pytest.raises(ConfigError, match=key):
        build_schedule(config(), lr, tokens)


def staged_by_definition(cfg: ScheduleConfig, max_tokens: int, tokens: int) -> float:
    """DESIGN's words for the staged recipe, in exact fractions but for the cosine."""
    peak = Fraction(BASE) * Fraction(cfg.boost)
    warmup, anneal = (
        int(cfg.warmup_tokens),
        max(Fraction(cfg.anneal_start) * max_tokens, int(cfg.warmup_tokens)),
    )
    final = Fraction(cfg.final_lr) * peak

    def stage(t) -> Fraction:
        k = (t - warmup) // int(cfg.decay_every)
        return max(peak * Fraction(cfg.decay_factor) ** int(k), Fraction(cfg.floor) * peak)

    if tokens < warmup:
        return float(peak * (Fraction(1, 100) + Fraction(99, 100) * Fraction(tokens, warmup)))
    if tokens >= max_tokens:
        return float(final)
    if tokens < anneal:
        return float(stage(tokens))
    progress = (tokens - anneal) / (max_tokens - anneal)
    return float(final) + float(stage(anneal) - final) * (1 + math.cos(math.pi * progress)) / 2


@st.composite
def runs(draw):
    """A staged run, and what happens in it: launches with a batch size each, some of which rewind."""
    max_tokens = draw(st.integers(2_000, 10**13))
    unit = max_tokens // 1000
    cfg = config(
        warmup_tokens=draw(st.integers(0, 300)) * unit,
        boost=draw(st.sampled_from([1.2, 1.35, 1.5])),
        decay_every=draw(st.integers(1, 400)) * unit,
        anneal_start=draw(st.sampled_from([0.5, 0.8, 0.9])),
    )
    launches = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12))
    return cfg, max_tokens, draw(st.lists(launches, min_size=1, max_size=6))


@given(runs())
@settings(max_examples=150)
def test_staged_is_its_definition_token_by_token_through_resumes_batch_sizes_and_rewinds(case):
    cfg, max_tokens, launches = case
    tokens = 0
    for size, steps, back in launches:
        schedule = build_schedule(cfg, BASE, max_tokens)  # each launch makes it anew, from the tokens alone
        batch = size * max(1, max_tokens // 1000)
        before = {}
        for _ in range(steps):
            before[tokens] = schedule.lr(tokens)
            assert before[tokens] == pytest.approx(staged_by_definition(cfg, max_tokens, tokens), rel=1e-9)
            tokens += batch
        for _ in range(min(back, steps)):  # a rewind takes the tokens back, and with them the rate
            tokens -= batch
            assert schedule.lr(tokens) == before[tokens]
    for corner in (cfg.warmup_tokens, cfg.warmup_tokens + cfg.decay_every, max_tokens):
        for tokens in (int(corner) - 1, int(corner), int(corner) + 1):
            if tokens >= 0:
                wanted = staged_by_definition(cfg, max_tokens, tokens)
                assert schedule.lr(tokens) == pytest.approx(wanted, rel=1e-9)
