"""Gradients in few bits, without the network in between."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvfp4_kernels import CounterKey
from torch import Tensor

from nvfp4_train.distributed.reduce import Part, decode_sum, encode

FORMATS = ("fp32", "bf16", "fp8", "nvfp4")
SHAPE = (32, 64)


def part(format: str, dim: int, shape: tuple[int, ...] = SHAPE) -> Part:
    return Part("weight", shape, dim, format, number=7)


def key(step: int = 1, rank: int = 0) -> CounterKey:
    return CounterKey(seed=1234, step=step, microbatch=rank, tensor=7)


def gradient(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def deal(x: Tensor, dim: int, ranks: int) -> Tensor:
    """As FSDP2 lays out a gradient: [ranks, shard]."""
    return torch.stack([chunk.reshape(-1) for chunk in x.chunk(ranks, dim)])


def reduced(p: Part, gradients: list[Tensor], step: int = 1) -> Tensor:
    """The sum over the ranks, joined again."""
    ranks = len(gradients)
    sent = [encode(p, deal(x, p.dim, ranks), key(step, rank)) for rank, x in enumerate(gradients)]
    for bytes_ in sent:
        assert bytes_.shape == (ranks, p.bytes_a_rank(ranks))
    shards = [decode_sum(p, torch.stack([bytes_[rank] for bytes_ in sent])) for rank in range(ranks)]
    rows, columns = p.shape
    shape = (rows // ranks, columns) if p.dim == 0 else (rows, columns // ranks)
    return torch.cat([shard.view(shape) for shard in shards], p.dim)


@pytest.mark.parametrize("format", FORMATS)
@given(
    seed=st.integers(0, 1000), scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e20]), dim=st.sampled_from([0, 1])
)
def test_what_is_dealt_out_does_not_depend_on_the_number_of_ranks(format, seed, scale, dim):
    x = gradient(seed) * scale
    nothing = torch.zeros_like(x)
    one, two, four = (reduced(part(format, dim), [x, *[nothing] * (n - 1)]) for n in (1, 2, 4))
    assert torch.equal(one, two)
    assert torch.equal(one, four)


@pytest.mark.parametrize(
    ("format", "error"), [("fp32", 0), ("bf16", 2**-7), ("fp8", 2**-3), ("nvfp4", 1 / 3)]
)
def test_every_element_is_rounded_to_a_neighbour(format, error):
    x = gradient(1)
    difference = (reduced(part(format, 0), [x]) - x).abs()
    assert (difference <= error * x.abs().amax(1, keepdim=True)).all()
    if format in ("fp32", "bf16"):
        assert (difference <= error * x.abs()).all()


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
def test_the_average_over_many_steps_is_the_gradient(format):
    x = gradient(2)
    draws = torch.stack([reduced(part(format, 0), [x], step) for step in range(400)])
    error, spread = draws.mean(0) - x, draws.std(0) / math.sqrt(len(draws))
    # 8 random bits leave 1/512 of a step, and nvfp4 clips its block maxima by up to 1/17 (docs/numerics.md).
    inside = x.abs() < 0.9 * x.abs().view(32, 4, 16).amax(-1).repeat_interleave(16, 1)
    assert (error.abs() <= 5 * spread + 2e-3 * x.abs().amax())[inside].all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(format, value):
    x = gradient(3)
    x[5, 9] = value
    total = reduced(part(format, 0), [gradient(4), x])
    assert not total[5, 9].isfinite() or not total.isfinite().all()


@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_any_width_travels_in_bf16(format):
    x = gradient(5, (6, 10))
    torch.testing.assert_close(reduced(part(format, 0, (6, 10)), [x, x]), 2 * x, rtol=2**-6, atol=0)
