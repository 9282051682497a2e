import pytest
import torch

from nvfp4_train.model.norm import GatedRMSNorm, RMSNorm


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def direct(y, weight, eps):
    return torch.stack([row / (row.square().sum() / len(row) + eps).sqrt() for row in y]) * weight


def test_rms_norm_is_its_formula():
    norm = RMSNorm(12, eps=1e-3).double()
    norm.weight.data = normal(12, seed=1)
    x = normal(5, 12)
    torch.testing.assert_close(norm(x), direct(x, norm.weight, 1e-3), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gate_comes_first_and_each_group_is_normed_alone(groups):
    norm = GatedRMSNorm(12, groups, eps=1e-3).double()
    norm.weight.data = normal(12, seed=1)
    y, z = normal(5, 12, seed=2), normal(5, 12, seed=3)
    gated = y * z / (1 + (-z).exp())
    size = 12 // groups
    parts = [slice(i, i + size) for i in range(0, 12, size)]
    expected = torch.cat([direct(gated[:, p], norm.weight[p], 1e-3) for p in parts], dim=1)
    torch.testing.assert_close(norm(y, z), expected, rtol=1e-13, atol=1e-13)


def test_bf16_is_rounded_once_at_the_end():
    norm = RMSNorm(64, eps=1e-5)
    norm.weight.data = normal(64, seed=1, dtype=torch.float32)
    x = normal(7, 64, dtype=torch.bfloat16)
    exact = direct(x.double(), norm.weight.double(), 1e-5)
    assert norm(x).dtype == torch.bfloat16
    assert ((norm(x).double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()
