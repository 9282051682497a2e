from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from nvfp4_train.data.loader import Loader
from nvfp4_train.data.sampler import Sampler
from nvfp4_train.errors import DataError


@pytest.fixture
def sampler(dataset):
    return Sampler(dataset, seq_len=16, global_batch_size=4, seed=1)


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data loader"]


def test_batches_come_in_order_from_the_given_step(sampler):
    with Loader(sampler, first_step=5, start=1, count=2) as loader:
        for step, batch in zip(range(5, 25), loader, strict=False):
            assert torch.equal(batch.tokens, sampler.batch(step, 1, 2).tokens)
    assert not loaders()


def test_reading_ahead_is_bounded_and_stops_when_closed(sampler, monkeypatch):
    steps = []
    real = sampler.batch
    monkeypatch.setattr(sampler, "batch", lambda step, *a: steps.append(step) or real(step, *a))
    loader = Loader(sampler, first_step=0, ahead=3)
    deadline = time.monotonic() + 5
    while len(steps) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert steps == [0, 1, 2, 3]  # three wait, one is in the thread's hand
    loader.close()
    loader.close()
    assert not loaders()
    with pytest.raises(ValueError, match="closed"):
        loader.next()


def test_an_error_while_reading_reaches_the_reader(sampler, monkeypatch):
    real = sampler.batch

    def fail(step, *a):
        if step == 2:
            raise DataError("shard 7 is damaged")
        return real(step, *a)

    monkeypatch.setattr(sampler, "batch", fail)
    loader = Loader(sampler, first_step=0)
    assert len(list(itertools.islice(loader, 2))) == 2
    with pytest.raises(DataError, match="shard 7"):
        loader.next()
    assert not loaders()


def test_waiting_is_measured(sampler, monkeypatch):
    real = sampler.batch
    monkeypatch.setattr(sampler, "batch", lambda *a: time.sleep(0.1) or real(*a))
    with Loader(sampler, first_step=0, ahead=1) as loader:
        loader.next()
        slow = loader.waited
        time.sleep(0.5)  # the step computes, the next batch gets ready
        loader.next()
        assert slow > 0.05
        assert loader.waited - slow < 0.05
