from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_train.config.schema import MixturePhaseConfig
from nvfp4_train.data.mixture import (
    Draw,
    Segment,
    before,
    from_json,
    planned,
    resumed,
    shares_of,
    to_json,
)

NAMES = "abcde"
weights = st.dictionaries(st.sampled_from(NAMES), st.floats(1e-4, 1e4) | st.just(0.0), min_size=1).filter(
    lambda w: any(w.values())
)


@st.composite
def segment_lists(draw) -> list[Segment]:
    gaps = draw(st.lists(st.integers(1, 40), max_size=4))
    starts = itertools.accumulate(gaps, initial=0)
    return [Segment(start, shares_of(draw(weights))) for start in starts]


@given(segments=segment_lists(), batch=st.integers(1, 9), seed=st.integers(0, 2**32), data=st.data())
def test_each_corpus_is_walked_through_without_gaps_and_any_part_is_found_alone(segments, batch, seed, data):
    draw = Draw(segments, batch, seed)
    n = batch * (segments[-1].start + 30)
    corpora, indices = draw.places(0, n)
    for corpus, name in enumerate(draw.names):
        mine = corpora == corpus
        assert (indices[mine] == np.arange(mine.sum())).all()
        for segment, stop in zip(segments, [*(s.start for s in segments[1:]), n], strict=True):
            if name not in segment.shares:
                assert not mine[segment.start * batch : stop * batch].any()
    start = data.draw(st.integers(0, n - 1))
    count = data.draw(st.integers(1, n - start))
    part = Draw(segments, batch, seed).places(start, count)
    assert (part[0] == corpora[start : start + count]).all()
    assert (part[1] == indices[start : start + count]).all()


def test_every_batch_and_the_whole_are_mixed_as_asked():
    shares = shares_of({"web": 70, "code": 20, "math": 9.9, "rare": 0.1})
    draw = Draw([Segment(0, shares)], 736, seed=1)
    corpora, _ = draw.places(0, 10**6)
    for corpus, name in enumerate(draw.names):
        mine = corpora == corpus
        assert abs(mine.mean() - shares[name]) < 1e-3 * 1e-2
        so_far = np.abs(np.cumsum(mine) - shares[name] * np.arange(1, 10**6 + 1))
        assert so_far.max() < 5  # sequences, whatever the number of steps
        # A row of the batch doesn't belong to one corpus: with micro-batches or ranks each would train on its own.
        rows = mine[: 736 * 1300].reshape(1300, 736).mean(0)
        assert (np.abs(rows - shares[name]) < 0.1).all()


def test_far_places_are_found_at_once():
    draw = Draw([Segment(0, shares_of({name: i + 1.0 for i, name in enumerate(NAMES)}))], 768, seed=3)
    corpora, indices = draw.places(10**15, 1000)
    for corpus in range(5):
        expected = (corpus + 1) / 15 * 10**15
        assert np.abs(indices[corpora == corpus].astype(float) - expected).max() < 1e3 + 10


def test_shares_are_those_of_the_weights():
    assert shares_of({"b": 30, "a": 70, "c": 0}) == shares_of({"a": 0.7, "b": 0.3}) == {"a": 0.7, "b": 0.3}
    assert list(shares_of({"b": 1, "a": 1})) == ["a", "b"]


def phases(*pairs: tuple[float, dict[str, float]]) -> list[MixturePhaseConfig]:
    return [MixturePhaseConfig(weights=weights, start=start) for start, weights in pairs]


A, B, C = {"a": 1.0}, {"a": 0.5, "b": 0.5}, {"b": 1.0}


def test_phases_begin_with_a_whole_step():
    plan = planned(phases((0.0, A), (0.7, B), (0.9, C)), max_tokens=1000, step_tokens=30)
    # 700 tokens lie in step 23 (690 to 720), which is drawn from as it began.
    assert plan == [Segment(0, A), Segment(24, B), Segment(30, C)]
    assert planned(phases((0.0, A), (0.5, A), (0.6, B)), 100, 10) == [Segment(0, A), Segment(6, B)]
    assert planned(phases((0.0, A), (0.01, B), (0.02, C)), 100, 50) == [Segment(0, A), Segment(1, C)]


def test_a_resumed_run_draws_as_an_unbroken_one():
    plan = planned(phases((0.0, A), (0.7, B), (0.9, C)), max_tokens=1000, step_tokens=30)
    for step in range(1, 40):
        saved = from_json(json.loads(json.dumps(to_json(before(plan, step)))))
        assert resumed(saved, plan, step) == plan


def test_a_change_takes_effect_at_the_resumed_step_and_the_past_stays():
    first = planned(phases((0.0, A), (0.5, B)), max_tokens=1000, step_tokens=10)
    changed = resumed(before(first, 20), planned(phases((0.0, C)), 1000, 10), 20)
    assert changed == [Segment(0, A), Segment(20, C)]
    # Killed before the next checkpoint, with a third mixture in mind: what was tried meanwhile left nothing.
    assert resumed(before(first, 20), planned(phases((0.0, B)), 1000, 10), 20) == [
        Segment(0, A),
        Segment(20, B),
    ]
    again = resumed(before(changed, 30), planned(phases((0.0, B)), 1000, 10), 30)
    assert again == [Segment(0, A), Segment(20, C), Segment(30, B)]
    # A larger budget moves the phases that are still to come, not those that were.
    longer = resumed(before(first, 60), planned(phases((0.0, A), (0.5, B)), 2000, 10), 60)
    assert longer == [Segment(0, A), Segment(50, B), Segment(60, A), Segment(100, B)]


@pytest.mark.parametrize("step", [1, 7, 50])
def test_the_draws_before_a_change_stay_and_no_sequence_is_drawn_twice(step):
    first = [Segment(0, shares_of({"a": 3, "b": 1}))]
    changed = resumed(first, [Segment(0, shares_of({"a": 1, "b": 1, "c": 2}))], step)
    old, new = Draw(first, 8, 1), Draw(changed, 8, 1)
    for name in "ab":
        before_change = old.places(0, 8 * step)
        after = new.places(0, 16 * step)
        was = before_change[1][before_change[0] == old.names.index(name)]
        now = after[1][after[0] == new.names.index(name)]
        assert (now[: len(was)] == was).all()
        assert (now == np.arange(len(now))).all()
