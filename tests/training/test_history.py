import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_train.errors import CheckpointError
from nvfp4_train.training.history import JOURNAL, History, Rewind, forget_journal, read_journal


def rewind(onset=50, found=55, back_to=40, skip=(44, 60), careful_until=40, **values):
    return Rewind("loss 9", onset, found, back_to, skip, careful_until, **values)


windows = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=5)


@given(windows, st.integers(1, 60))
def test_a_step_sees_the_batch_that_counting_past_the_windows_gives(skips, step):
    skips = [(first, first + more) for first, more in skips]
    history = History(tuple(rewind(skip=skip) for skip in skips))
    left = [b for b in range(200) if not any(first <= b <= last for first, last in skips)]
    assert history.batch(step) == left[step - 1]


@given(windows)
def test_steps_before_a_window_keep_their_batches_when_it_is_added(skips):
    history = History()
    for back_to, margin in skips:
        first = history.batch(back_to + 1)
        longer = history.with_(rewind(back_to=back_to, skip=(first, history.batch(back_to + 1 + margin))))
        assert [longer.batch(s) for s in range(1, back_to + 1)] == [
            history.batch(s) for s in range(1, back_to + 1)
        ]
        assert longer.batch(back_to + 1) == history.batch(back_to + 2 + margin)
        history = longer


def test_careful_steps_begin_at_the_rewind_and_end_and_the_newest_rewind_counts():
    history = History((rewind(careful_until=80, lr_factor=0.5, bf16=("a", "b")),))
    assert [history.lr_factor(step) for step in (40, 41, 80, 81)] == [1.0, 0.5, 0.5, 1.0]
    assert history.bf16(41) == ("a", "b")
    assert history.bf16(81) == ()
    history = history.with_(rewind(back_to=60, careful_until=60))
    assert [history.lr_factor(step) for step in (60, 61)] == [0.5, 1.0]


def test_attempts_count_the_rewinds_of_one_stretch_of_trouble():
    history = History(
        (
            rewind(found=100),
            rewind(found=2000),
            rewind(found=2400),
        )
    )
    assert history.attempts(2500, forget_after=1000) == 2
    assert history.attempts(3401, forget_after=1000) == 0
    assert history.attempts(2500, forget_after=5000) == 3


def test_states_of_a_way_that_was_left():
    history = History(
        (
            rewind(back_to=40),
            rewind(back_to=20),
        )
    )
    assert history.abandoned(41, known=0)
    assert history.abandoned(30, known=1)  # it knows of the first rewind, the second left it
    assert not history.abandoned(20, known=0)
    assert not history.abandoned(99, known=2)
    assert history.came_by(45)
    assert not history.came_by(20)


def test_the_journal_comes_back_as_it_was_written(tmp_path):
    assert read_journal(tmp_path).rewinds == ()
    history = History(
        (
            rewind(bf16=("x",)),
            rewind(skip=None),
        )
    )
    history.write(tmp_path)
    assert read_journal(tmp_path).rewinds == history.rewinds
    assert History.from_state(json.loads(json.dumps(history.state()))).rewinds == history.rewinds
    assert forget_journal(tmp_path).rewinds == read_journal(tmp_path).rewinds == ()


@pytest.mark.parametrize("text", ["{", "{}", '{"format": "other"}', "[]"])
def test_a_damaged_journal_is_named(tmp_path, text):
    (tmp_path / JOURNAL).write_text(text)
    with pytest.raises(CheckpointError, match=JOURNAL):
        read_journal(tmp_path)
    (tmp_path / JOURNAL).write_text('{"format": "nvfp4_train.recovery", "format_version": 99}')
    with pytest.raises(CheckpointError, match="update the program"):
        read_journal(tmp_path)
