"""Sizes of the experiments: closed forms against the model itself and published numbers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nvfp4_train.config.load import compose_config, option_names
from nvfp4_train.model.flops import block_parameters, flops_per_token, linear_layers, parameter_count
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.precision.linear import Linear

# Parameters in billions and training GFLOP a token at 8192 tokens. The released models' are published (12B: exactly,
# and 1.45e24 FLOPs for 20T tokens); the others are these formulas' own.
SIZES = {
    "quickstart": (0.002596976, 0.02561),
    "125m_hybrid": (0.132586880, 0.752),
    "350m_hybrid": (0.344331776, 2.101),
    "1b_hybrid": (0.987539520, 5.440),
    "8b_hybrid": (8.100852736, 46.71),
    "12b_hybrid": (12.310001152, 72.10),
    "56b_hybrid": (56.324350464, 340.24),
}


def test_every_experiment_is_listed():
    assert set(SIZES) == set(option_names("experiment"))


@pytest.mark.parametrize("experiment", SIZES)
def test_size(experiment):
    cfg = compose_config([f"+experiment={experiment}", "data.source=unused"]).model
    billions, gflop = SIZES[experiment]
    assert parameter_count(cfg) == round(billions * 1e9)
    assert flops_per_token(cfg, 8192) / 1e9 == pytest.approx(gflop, rel=1e-3)

    model = HybridModel(cfg, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == parameter_count(cfg)
    for letter, block in zip(cfg.pattern, model.layers, strict=True):
        assert sum(p.numel() for p in block.parameters()) == block_parameters(letter, cfg)
    linears = [(n, tuple(m.weight.shape)) for n, m in model.named_modules() if isinstance(m, Linear)]
    assert [(layer.name, (layer.out_features, layer.in_features)) for layer in linear_layers(cfg)] == linears


def test_flops_follow_the_matrix_products(tiny):
    """PyTorch's own count of the products, but for the masked half of attention."""
    tiny.pattern = "*-*"
    model = HybridModel(tiny, "meta")
    seq_len = 16
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, seq_len, dtype=torch.int64, device="meta"))
    attention = (
        2 * 2 * 2 * seq_len**2 * tiny.num_attention_heads * tiny.head_dim
    )  # two blocks, q k^T and weights v
    assert 3 * (counter.get_total_flops() - attention / 2) == flops_per_token(tiny, seq_len) * seq_len
