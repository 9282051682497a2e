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


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_batches_come_in_order_from_the_given_step(sampler, workers):
    with Loader(sampler, first_step=5, start=1, count=2, workers=workers) as loader:
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_any_number_of_ranks_and_workers_reads_the_same_global_batches(dataset, ranks, workers):
    """And goes on with them at any step, at another number of ranks."""
    sampler = Sampler(dataset, seq_len=16, global_batch_size=24, seed=1)
    mine = 24 // ranks
    for first in (0, 7):
        readers = [Loader(sampler, first, rank * mine, mine, workers=workers) for rank in range(ranks)]
        for step in range(first, first + 5):
            parts = [reader.next() for reader in readers]
            assert torch.equal(torch.cat([part.tokens for part in parts]), sampler.batch(step).tokens)
            assert torch.equal(torch.cat([part.targets for part in parts]), sampler.batch(step).targets)
        for reader in readers:
            reader.close()
    assert not loaders()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_while_reading_reaches_the_reader(sampler, monkeypatch, workers):
    real = sampler.batch

    def fail(step, *a):
        if step == 2:
            raise DataError("shard 7 is damaged")
        return real(step, *a)

    monkeypatch.setattr(sampler, "batch", fail)
    loader = Loader(sampler, first_step=0, workers=workers)
    assert len(list(itertools.islice(loader, 2))) == 2
    with pytest.raises(DataError, match="shard 7"):
        loader.next()
    assert not loaders()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_for_a_gpu_are_pinned(sampler):
    with Loader(sampler, first_step=0, pin_memory=True) as loader:
        batch = loader.next()
        assert batch.tokens.is_pinned()
        assert batch.targets.is_pinned()
        assert torch.equal(batch.to("cuda").tokens.cpu(), sampler.batch(0).tokens)


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
