import pytest
import torch
from torch.nn import functional as F

from nvfp4_train.model.conv import CausalConv1d, causal_conv1d


def make(batch, length, channels, k, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((batch, length, channels), (channels, 1, k), (channels,))
    return [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]


def library(x, weight, bias):
    """The same by F.conv1d, in which channels come before tokens."""
    k = weight.shape[-1]
    return F.conv1d(F.pad(x.transpose(1, 2), (k - 1, 0)), weight, bias, groups=len(bias)).transpose(1, 2)


def assert_same(got, want, leaves):
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    grads = [torch.autograd.grad((y * weights).sum(), leaves) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize(("length", "k"), [(11, 4), (2, 4), (1, 4), (7, 1), (7, 2)])
def test_equals_the_library_convolution(length, k):
    leaves = make(2, length, 5, k)
    assert_same(causal_conv1d(*leaves), library(*leaves), leaves)


@pytest.mark.parametrize("lengths", [(5, 6), (1, 1, 1, 8), (11,), (3, 1, 7), (10, 1)])
def test_documents_do_not_reach_into_each_other(lengths):
    leaves = make(1, sum(lengths), 5, 4)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    alone = torch.cat([library(part, *leaves[1:]) for part in leaves[0].split(lengths, dim=1)], dim=1)
    assert_same(causal_conv1d(*leaves, seq_idx.int()), alone, leaves)


def test_bf16_input_is_summed_in_fp32():
    x, weight, bias = (t.detach() for t in make(2, 9, 4, 4))
    y = causal_conv1d(x.bfloat16(), weight.float(), bias.float())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), library(x.bfloat16().double(), weight, bias), rtol=1e-5, atol=1e-5)


def test_steps_equal_the_whole():
    conv = CausalConv1d(5, 4)
    x, conv.weight.data, conv.bias.data = (t.detach() for t in make(2, 6, 5, 4))
    state = torch.zeros(2, 3, 5, dtype=torch.float64)
    steps = torch.stack([conv.step(x[:, i], state) for i in range(6)], dim=1)
    torch.testing.assert_close(steps, causal_conv1d(x, conv.weight, conv.bias), rtol=1e-13, atol=1e-13)
