import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nvfp4_train.config.schema import ClippingConfig, OptimizerConfig, RecoveryConfig
from nvfp4_train.training.clipping import build_clipper
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.finite import SkipCounter
from nvfp4_train.training.history import History
from nvfp4_train.training.optimizer import apply_update, build_optimizer
from nvfp4_train.training.recovery import Recovery
from nvfp4_train.training.snapshots import Snapshots, restore
from nvfp4_train.training.state import TrainState


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    cfg = RecoveryConfig(name="auto", window=4)
    return TrainState(
        model,
        build_optimizer(model, OptimizerConfig(lr=0.1)),
        build_clipper(ClippingConfig(name="adaptive"), "cpu"),
        SpikeDetector(cfg, "cpu"),
        SkipCounter("cpu"),
        Recovery(cfg, History()),
        seed=1,
        data=SimpleNamespace(hash="x", record=lambda step: step),
    )


def step(state):
    loss = state.model(torch.randn(5, 4)).square().mean()
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in state.model.parameters()])
    accepted = state.detector.update(loss.detach(), norm, torch.tensor(1.0))
    state.skips.update(accepted)
    apply_update(state.optimizer, 0.1, state.clipper.clip(state.model.parameters(), norm, accepted), accepted)
    state.optimizer.zero_grad()
    state.step += 1
    state.tokens += 20
    state.recovery.divergence.update({"step": state.step, "loss": loss.item(), "skipped": 0.0})
    return loss.item()


def test_after_a_restore_the_same_steps_follow(state):
    snapshots = Snapshots(2)
    [step(state) for _ in range(6)]
    snapshots.take(state)
    values = copy.deepcopy(state.values())
    expected = [step(state) for _ in range(5)]
    restore(state, snapshots.newest(6))
    assert (state.step, state.tokens) == (6, 120)
    assert state.values() == values
    assert [step(state) for _ in range(5)] == expected  # weights, moments, detector and random numbers


def test_the_newest_are_kept_and_those_of_a_way_that_was_left_forgotten(state):
    snapshots = Snapshots(2)
    for _ in range(3):
        step(state)
        snapshots.take(state)
    assert snapshots.steps() == [2, 3]
    assert snapshots.newest(2).step == 2
    assert snapshots.newest(1) is None
    third = copy.deepcopy(snapshots.newest(3).tensors)
    snapshots.forget_after(2)
    assert snapshots.steps() == [2]
    step(state)
    snapshots.take(state)
    assert snapshots.steps() == [2, 4]
    assert not torch.equal(third["model"]["0.weight"], snapshots.newest(4).tensors["model"]["0.weight"])
