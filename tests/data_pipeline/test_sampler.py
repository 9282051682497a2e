from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.permutation import permute
from nvfp4_train.data.sampler import Sampler
from nvfp4_train.errors import DataError


def sampler(dataset, **changes) -> Sampler:
    return Sampler(dataset, **{"seq_len": 32, "global_batch_size": 6, "seed": 7, **changes})


def same(a, b) -> bool:
    return all(
        (x is None and y is None) or torch.equal(x, y)
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


def order(n: int, seed: int, epoch: int) -> list[int]:
    return permute(np.arange(n, dtype=np.uint64), n, seed, np.full(n, epoch, np.uint64)).tolist()


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
def test_every_index_appears_once(n, seed, epoch):
    assert sorted(order(n, seed, epoch)) == list(range(n))


def test_the_order_is_the_same_in_every_version():
    """A run that is resumed must go on in its own order, so these numbers never change."""
    assert order(1000, seed=7, epoch=0)[:6] == [299, 141, 451, 677, 364, 122]
    index, epoch = np.arange(4, dtype=np.uint64), np.full(4, 3, np.uint64)
    assert permute(index, 10**10, 1234, epoch).tolist() == [5962415731, 1328216927, 8800282779, 9547134791]


def test_orders_look_random_and_differ_by_seed_and_epoch():
    n = 1000
    orders = np.array([order(n, seed, epoch) for seed in range(20) for epoch in range(20)])
    assert len({tuple(o) for o in orders.tolist()}) == 400
    # Each index goes to each tenth of the range equally often: chi-square of 9 degrees of freedom, 1000 draws of it.
    counts = np.stack([(orders // 100 == tenth).sum(0) for tenth in range(10)])
    chi_square = ((counts - 40) ** 2 / 40).sum(0)
    assert abs(chi_square.mean() - 9) < 0.6
    steps = np.corrcoef(orders[:, :-1].ravel(), orders[:, 1:].ravel())[0, 1]  # neighbours are unrelated
    assert abs(steps) < 0.01


def test_sizes_may_differ_from_index_to_index():
    """Corpora of any sizes share one call."""
    sizes = np.array([1, 2, 3, 1000, 4, 5, 16, 17, 10**13] * 20, dtype=np.uint64)
    index, epoch = np.arange(180, dtype=np.uint64) % sizes, np.arange(180, dtype=np.uint64) // 7
    together = permute(index, sizes, 5, epoch)
    for i in range(180):
        assert together[i] == permute(index[i : i + 1], int(sizes[i]), 5, epoch[i : i + 1])[0]


def test_a_huge_range_costs_nothing():
    n = 10**13 + 7
    index = np.arange(n - 64, n, dtype=np.uint64)
    values = permute(index, n, 1, np.zeros(64, np.uint64))
    assert len(set(values.tolist())) == 64
    assert (values < n).all()
    assert np.median(values.astype(float)) > n / 10


def test_every_sequence_comes_once_an_epoch_in_another_order(dataset):
    s = sampler(dataset)
    (n,) = s.n_sequences.values()
    assert n == dataset.n_tokens("train") // 32 > 100
    steps = -(-3 * n // 6)
    _, epoch, number = (np.concatenate(parts) for parts in zip(*map(s.sequences, range(steps)), strict=True))
    assert (epoch == np.arange(6 * steps) // n).all()
    epochs = [number[e * n : (e + 1) * n].tolist() for e in range(3)]
    assert all(sorted(numbers) == list(range(n)) for numbers in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_is_a_pure_function_of_its_step(dataset):
    steps = [5, 0, 10**9, 5, 3]
    first = {step: sampler(dataset).batch(step) for step in steps}
    again = sampler(dataset)
    for step in reversed(steps):
        assert same(again.batch(step), first[step])
    assert not same(sampler(dataset, seed=8).batch(5), first[5])
    assert not same(first[0], first[3])


@settings(max_examples=40, deadline=None)
@given(
    step=st.integers(0, 10**6),
    cuts=st.sets(st.integers(1, 5)),
    reset=st.booleans(),
    seq_len=st.sampled_from([1, 16, 33]),
)
def test_any_split_of_the_global_batch_gives_it(dataset, step, cuts, reset, seq_len):
    s = sampler(dataset, reset_state_at_documents=reset, seq_len=seq_len)
    whole = s.batch(step)
    for start, stop in itertools.pairwise([0, *sorted(cuts), 6]):
        part = s.batch(step, start, stop - start)
        assert same(part, whole.rows(start, stop))


def test_one_epoch_of_targets_is_the_text_and_inputs_are_one_behind(dataset):
    s = sampler(dataset, global_batch_size=1)
    stream = dataset.tokens("train", 0, dataset.n_tokens("train"))
    seen = np.zeros(len(stream), dtype=int)
    (n,) = s.n_sequences.values()
    for step in range(n):
        k = s.sequences(step)[2].item()
        batch = s.batch(step)
        assert batch.tokens.shape == batch.targets.shape == (1, 32)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.mask is None
        assert batch.seq_idx is None
        assert batch.targets[0].tolist() == stream[k * 32 : (k + 1) * 32].tolist()
        before = dataset.tokenizer.eos_id if k == 0 else stream[k * 32 - 1]
        assert batch.tokens[0].tolist() == [before, *stream[k * 32 : (k + 1) * 32 - 1].tolist()]
        seen[k * 32 : (k + 1) * 32] += 1
    assert (seen[: n * 32] == 1).all()
    assert len(stream) - n * 32 < 32


def test_seq_idx_steps_at_the_eos_before_a_document(dataset):
    s = sampler(dataset, reset_state_at_documents=True, seq_len=256)
    found = 0
    for step in range(10):
        batch = s.batch(step)
        assert batch.seq_idx.dtype == torch.int32
        for tokens, seq_idx in zip(batch.tokens.tolist(), batch.seq_idx.tolist(), strict=True):
            expected = list(itertools.accumulate(int(t == dataset.tokenizer.eos_id) for t in tokens[1:]))
            assert seq_idx == [0, *expected]
            found += expected[-1]
    assert found > 10


def test_a_part_shorter_than_a_sequence_is_refused(dataset):
    with pytest.raises(DataError, match=r"less than one sequence of training.seq_len=1000000"):
        sampler(dataset, seq_len=1_000_000)


def test_sequences_outside_the_global_batch_are_refused(dataset):
    for start, count in [(0, 7), (6, 1), (-1, 2)]:
        with pytest.raises(ValueError, match="not in the global batch"):
            sampler(dataset).batch(0, start, count)
