import math

import pytest
import torch

from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initial_value, initialize_


def by_suffix(model):
    values = {}
    for name, p in model.named_parameters():
        values.setdefault(name.split("layers.", 1)[-1].lstrip("0123456789."), []).append(p.detach().flatten())
    return {k: torch.cat(v) for k, v in values.items()}


def test_values_depend_on_seed_and_name_alone(tiny):
    model = HybridModel(tiny)
    initialize_(model, seed=7)
    name = "layers.3.mixer.in_proj.weight"
    value = model.get_parameter(name)
    assert torch.equal(initial_value(name, tuple(value.shape), tiny, seed=7), value)
    assert not torch.equal(initial_value(name, tuple(value.shape), tiny, seed=8), value)
    assert not torch.equal(
        initial_value("layers.0.mixer.in_proj.weight", tuple(value.shape), tiny, seed=7), value
    )
    # Neither other blocks nor what was drawn before change it.
    torch.manual_seed(123)
    tiny.pattern = "*-MM"
    other = HybridModel(tiny)
    initialize_(other, seed=7)
    assert torch.equal(other.get_parameter(name), value)


def test_every_parameter_follows_its_rule(tiny):
    tiny.hidden_size, tiny.vocab_size, tiny.mamba_num_heads = 256, 512, 64
    model = HybridModel(tiny)
    for p in model.parameters():
        p.data.fill_(float("nan"))
    initialize_(model, seed=1)
    values = by_suffix(model)
    std = math.sqrt(0.8 / 256)
    normal = dict.fromkeys(("embeddings", "lm_head", "mixer.in_proj", "mixer.qkv_proj", "mixer.up_proj"), std)
    normal |= {f"mixer.{k}": std / math.sqrt(len(tiny.pattern)) for k in ("out_proj", "o_proj", "down_proj")}
    for name, expected in normal.items():
        v = values.pop(f"{name}.weight")
        assert abs(v.std() / expected - 1) < 0.03, name
        assert abs(v.mean()) < 0.03 * expected, name
        assert v.abs().max() > 3 * expected, f"{name} has a normal distribution's tails"
    for name in ("mixer.conv1d.weight", "mixer.conv1d.bias"):
        v = values.pop(name)
        assert v.abs().max() <= 0.5
        assert abs(v.std() - 1 / math.sqrt(12)) < 0.02, name
    dt = torch.nn.functional.softplus(values.pop("mixer.dt_bias"))
    assert dt.min() >= 1e-3 * 0.999
    assert dt.max() <= 1e-1 * 1.001
    assert abs(dt.log10().mean() + 2) < 0.15, "log-uniform"
    A = values.pop("mixer.A_log").exp()
    assert A.min() >= 1
    assert A.max() <= 16
    assert abs(A.mean() - 8.5) < 1
    for name in ("mixer.D", "norm.weight", "mixer.norm.weight", "norm_f.weight"):
        assert torch.equal(values.pop(name).unique(), torch.ones(1)), name
    assert not values, "parameters without a rule in this test"


def test_init_std_can_be_given(tiny):
    tiny.init_std = 0.5
    assert abs(initial_value("lm_head.weight", (97, 320), tiny, 0).std() - 0.5) < 0.02


def test_a_parameter_without_a_rule_is_named(tiny):
    with pytest.raises(KeyError, match=r"layers\.0\.mixer\.novel\.weight"):
        initial_value("layers.0.mixer.novel.weight", (4,), tiny, 0)
