import math

import pytest

from nvfp4_train.config.schema import RecoveryConfig
from nvfp4_train.errors import RecoveryGaveUp
from nvfp4_train.training.divergence import QuantizationAlarm, SlowDivergence
from nvfp4_train.training.history import History
from nvfp4_train.training.recovery import Recovery, Trouble

LAYERS = ["layers.0.in", "layers.1.in", "layers.2.in"]


def recovery(name="auto", history=None, **values):
    return Recovery(RecoveryConfig(name=name, **values), history or History())


def record(step, loss=3.0, **values):
    usual = {"grad_norm": 1.0, "loss_sigmas": 0.0, "norm_sigmas": 0.0, "exceedances": 0, "exceedance_age": 0}
    return {"step": step, "loss": loss, "skipped": 0.0, "skipped_in_a_row": 0, **usual, **values}


def test_one_exceedance_is_an_event_and_k_of_n_are_trouble():
    ladder = recovery()
    events, trouble = ladder.look(
        [record(1), record(2, 3.5, loss_sigmas=4.0, exceedances=1, exceedance_age=1)]
    )
    assert trouble is None
    assert [(e["event"], e["step"], e["skipped"]) for e in events] == [("spike", 2, False)]
    assert "loss 3.5, 4.0 sigmas" in events[0]["reason"]
    bad = {"exceedances": 5, "exceedance_age": 7, "loss_sigmas": 9.0, "skipped": 1.0}
    _, trouble = ladder.look([record(10, 9.0, **bad), record(11, 9.0, **bad | {"exceedance_age": 8})])
    assert (trouble.onset, trouble.found, trouble.slow) == (4, 11, False)
    assert "5 of 10 steps" in trouble.reason


def test_other_modes_never_rewind_and_skipping_alone_ends_after_too_many():
    bad = {"exceedances": 9, "exceedance_age": 9, "skipped": 1.0, "skipped_in_a_row": 3}
    assert recovery("off").look([record(9, math.nan, **bad)])[1] is None
    assert recovery("skip_nonfinite").look([record(9, math.nan, **bad)])[1] is None
    with pytest.raises(RecoveryGaveUp, match="max_consecutive_skips=3"):
        recovery("skip_nonfinite", max_consecutive_skips=3).look([record(9, math.nan, **bad)])


def test_the_ladder_rewinds_then_carefully_and_further_then_gives_up():
    ladder = recovery(max_rollbacks=2)
    first = ladder.plan(Trouble("why", onset=150, found=155), [0, 100], [50], LAYERS)
    assert (first.back_to, first.skip, first.lr_factor, first.bf16) == (100, (139, 164), 1.0, ())
    ladder.history = ladder.history.with_(first)
    second = ladder.plan(Trouble("why", onset=160, found=166), [0, 100], [50], LAYERS)
    assert second.back_to == 50  # not the state that the first went to
    assert (second.lr_factor, second.bf16, second.careful_until) == (0.5, tuple(LAYERS), 366)
    # Step 150 sees the batch after those that the first rewind stepped over.
    assert second.skip == (first.skip[1] + 150 - 139, first.skip[1] + 176 - 139)
    ladder.history = ladder.history.with_(second)
    with pytest.raises(RecoveryGaveUp, match="2 rewinds have not helped"):
        ladder.plan(Trouble("why", onset=160, found=166), [0], [50], LAYERS)
    later = ladder.plan(Trouble("why", onset=9000, found=9005), [8900], [], LAYERS)  # forgotten by then
    assert (later.back_to, later.lr_factor) == (8900, 1.0)


def test_it_goes_back_before_the_onset_as_far_as_there_are_states():
    ladder = recovery()
    plan = ladder.plan(Trouble("why", onset=105, found=110), [95, 100], [80], LAYERS)
    assert (plan.back_to, plan.skip) == (80, (94, 119))  # the margin before the onset is stepped over too
    plan = ladder.plan(Trouble("why", onset=105, found=110), [100], [], LAYERS)
    assert (plan.back_to, plan.skip) == (100, (100, 119))
    plan = ladder.plan(Trouble("why", onset=105, found=110), [108], [], LAYERS)  # better than nothing
    assert plan.back_to == 108
    for states in ([], [110]):
        with pytest.raises(RecoveryGaveUp, match="no state of an earlier step"):
            ladder.plan(Trouble("why", onset=105, found=110), states, [], LAYERS)


def test_slow_divergence_is_careful_at_once_and_steps_over_nothing():
    ladder = recovery(slow_window=10, slow_rise=0.03)
    trouble = None
    for step in range(1, 200):
        loss = 3.0 if step < 80 else 3.0 * 1.002 ** (step - 80)
        trouble = trouble or ladder.look([record(step, loss)])[1]
    assert trouble.slow
    assert trouble.onset <= 81
    assert 90 < trouble.found < 130
    plan = ladder.plan(trouble, [50, 100], [], LAYERS)
    assert (plan.back_to, plan.skip, plan.lr_factor) == (50, None, 0.5)


VALID = "valid/heldout/loss"


def watching(training, **values):
    """After 40 steps at 2.0 and a validation there, 40 at `training`."""
    found = SlowDivergence(RecoveryConfig(name="auto", slow_window=5, **values))
    for step in range(1, 40):
        assert found.update(record(step, 9.0 if step % 3 else 2.0, skipped=step % 3)) is None
    assert found.update(record(40, 2.0) | {VALID: 2.0}) is None
    for step in range(41, 80):
        assert found.update(record(step, training)) is None
    return found


def test_a_rising_validation_is_slow_divergence_and_skipped_steps_are_not():
    found = watching(2.04)  # too little to be one alone
    assert found.update(record(80, 2.04) | {VALID: 2.2}) is None  # once is not enough
    rise = found.update(record(81, 2.04) | {VALID: 2.3})
    assert (rise.rewinds, rise.slow, rise.onset) == (True, True, 40)
    assert "2.0000 to 2.3000" in rise.what


def test_a_validation_that_rises_alone_is_told_once_and_not_rewound():
    ladder = recovery()
    ladder.divergence = watching(1.5)  # overfitting
    values = [2.2, 2.3, 2.4, 2.5]
    looks = [ladder.look([record(step, 1.5) | {VALID: value}]) for step, value in enumerate(values, start=80)]
    assert [trouble for _, trouble in looks] == [None] * 4
    (event,) = [event for events, _ in looks for event in events]
    assert (event["event"], event["step"]) == ("held_out_rise", 81)
    assert "overfitting" in event["reason"]
    _, trouble = ladder.look([record(90, 1.5) | {VALID: math.nan}])
    assert trouble.slow


def test_a_run_does_not_end_with_a_spike_that_there_was_no_time_to_confirm():
    for exceedances, loss, wanted in ((2, 2.2, True), (0, 2.2, False), (2, 2.0, False), (0, math.nan, True)):
        ladder = recovery()
        ladder.divergence = watching(1.9)
        last = record(80, 2.0, exceedances=exceedances, exceedance_age=exceedances) | {VALID: loss}
        events, trouble = ladder.look([last], last_step=80)
        assert bool(trouble) == wanted
        assert any(event["event"] == "held_out_rise" for event in events) == (loss == 2.2 and not wanted)
        if exceedances and trouble:
            assert (trouble.onset, trouble.found, trouble.slow) == (79, 80, False)


def test_other_text_is_compared_with_nothing_before_it():
    ladder = recovery(slow_window=5)
    ladder.divergence = watching(2.0)
    records = [record(step, 4.0) | ({VALID: 5.0} if step > 82 else {}) for step in range(81, 99)]
    assert ladder.look(records, changes=[81]) == ([], None)
    ladder.divergence = watching(2.0)
    assert ladder.look(records)[1].slow


def test_a_layer_whose_underflow_jumps_is_told_once_until_it_has_been_back():
    alarm = QuantizationAlarm(RecoveryConfig(name="auto"))

    def measure(underflow, sqnr=18.0):
        return alarm.update(
            {
                "step": 1,
                "health/a/dgrad/underflow": underflow,
                "health/a/dgrad/sqnr_db": sqnr,
                "health/b/dgrad/sqnr_db": 15.0,
            }
        )

    assert [measure(u) for u in (0.1, 0.12, 0.15)] == [[], [], []]
    assert measure(0.4, sqnr=3.0) == ["underflow of a (dgrad) has jumped from 0.107 to 0.400"]
    assert measure(0.4) == []
    assert alarm.worst == ["b", "a"]
    restored = QuantizationAlarm(RecoveryConfig(name="auto"))
    restored.load_state(alarm.state())
    alarm = restored
    assert measure(0.4) == []
    assert measure(0.1) == []
    assert len(measure(0.4)) == 1


def test_which_layers_run_in_bf16_while_careful():
    trouble = Trouble("why", onset=150, found=155, slow=True)
    assert recovery(careful_bf16="none").plan(trouble, [0], [], LAYERS).bf16 == ()
    ladder = recovery(careful_bf16="worst:1")
    ladder.look(
        [record(1) | {"health/layers.1.in/dgrad/sqnr_db": 2.0, "health/layers.0.in/dgrad/sqnr_db": 9.0}]
    )
    assert ladder.plan(trouble, [0], [], LAYERS).bf16 == ("layers.1.in",)


def test_restored_it_knows_the_same_and_no_less():
    ladder = recovery(slow_window=3)
    ladder.look([record(step, 3.0 + step) for step in range(1, 9)])
    plan = ladder.plan(Trouble("why", onset=8, found=9), [2], [], LAYERS)
    ladder.history = ladder.history.with_(plan)
    other = recovery(slow_window=3)
    other.load_state(ladder.state())
    assert other.state() == ladder.state()
    before = recovery(slow_window=3).state()  # of a checkpoint from before the rewind
    ladder.load_state(before)
    assert ladder.history.rewinds == (plan,)
