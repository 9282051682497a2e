"""The chunked scan against the recurrence, in fp64: outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.model.ssd import ssd_chunked, ssd_recurrence


def inputs(batch, length, groups, heads_a_group, p, n, seed, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    heads = groups * heads_a_group

    def normal(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    tensors = {
        "x": normal(batch, length, heads, p),
        "dt": torch.nn.functional.softplus(2 * normal(batch, length, heads) - 2),
        "A": -torch.empty(heads, dtype=torch.float64).uniform_(1, 16, generator=gen),
        "B": normal(batch, length, groups, n),
        "C": normal(batch, length, groups, n),
        "D": normal(heads),
    }
    return {k: v.to(dtype).requires_grad_() for k, v in tensors.items()}


def assert_equals_recurrence(t, chunk_size, seq_idx=None):
    chunked = ssd_chunked(**t, chunk_size=chunk_size, seq_idx=seq_idx)
    expected = ssd_recurrence(**t, seq_idx=seq_idx)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=expected.dtype)
    pairs = {"y": (chunked, expected)}
    gradients = [torch.autograd.grad((y * weights).sum(), list(t.values())) for y in (chunked, expected)]
    pairs |= {f"d{name}": pair for name, *pair in zip(t, *gradients, strict=True)}
    for name, (got, want) in pairs.items():
        error = (got - want).abs().max() / want.abs().max().clamp(min=1)
        assert error < 1e-12, f"{name}: {error}"


@st.composite
def documents(draw, length):
    """Document numbers of one row: non-decreasing from 0, one-token documents included."""
    starts = draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))
    return torch.tensor([0, *starts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chunked_equals_recurrence(data):
    batch = data.draw(st.integers(1, 2))
    length = data.draw(st.integers(1, 37))
    groups, heads_a_group = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)]))
    t = inputs(
        batch,
        length,
        groups,
        heads_a_group,
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
        length,
    )
    seq_idx = None
    if data.draw(st.booleans()):
        seq_idx = torch.stack([data.draw(documents(length)) for _ in range(batch)])
    assert_equals_recurrence(t, data.draw(st.sampled_from([1, 2, 4, 7, 8, 16, 64])), seq_idx)


@pytest.mark.parametrize(
    "seq_idx", [[0] * 8 + [1] * 8, list(range(16)), [0] * 7 + [1] + [2] * 8, [0] * 9 + [1] * 7]
)
def test_documents_that_end_at_or_beside_a_chunk(seq_idx):
    t = inputs(1, 16, 2, 2, 3, 4, seed=5)
    assert_equals_recurrence(t, chunk_size=8, seq_idx=torch.tensor([seq_idx], dtype=torch.int32))


def test_decays_that_underflow_leave_no_nan():
    t = inputs(1, 64, 1, 2, 4, 4, seed=3, dtype=torch.float32)
    t["dt"] = (t["dt"].detach() + 20).requires_grad_()
    seq_idx = torch.arange(64)[None] // 11
    ssd_chunked(**t, chunk_size=16, seq_idx=seq_idx).square().sum().backward()
    assert all(torch.isfinite(v.grad).all() for v in t.values())


def test_many_chunks_keep_their_digits():
    """The decay between far chunks comes from short sums, not from differences of one long running sum."""
    assert_equals_recurrence(inputs(1, 256, 1, 1, 2, 2, seed=9), chunk_size=2)


def test_bf16_inputs_stay_close_and_the_sum_is_fp32():
    exact = inputs(2, 100, 2, 2, 8, 8, seed=1)
    t = {k: v.detach().to(torch.bfloat16 if k in "xBC" else torch.float32) for k, v in exact.items()}
    y = ssd_chunked(**t, chunk_size=32)
    expected = ssd_recurrence(**{k: v.double() for k, v in t.items()})
    assert y.dtype == torch.float32
    assert (y - expected).square().mean() < 4e-5 * expected.square().mean()
