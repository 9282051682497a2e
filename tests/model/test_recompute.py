"""Recomputation changes what is kept, and no bit of the result."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nvfp4_train.config.schema import ModelConfig, PrecisionConfig
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.model.recompute import apply_recompute
from nvfp4_train.precision import apply_recipe

CFG = ModelConfig(
    pattern="M-*-M-",
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    mamba_num_heads=2,
    mamba_head_dim=16,
    n_groups=1,
    ssm_state_size=15,
    chunk_size=16,
    vocab_size=97,
)


def build(precision: str) -> HybridModel:
    model = HybridModel(CFG)
    initialize_(model, 0)
    runtime = apply_recipe(model, PrecisionConfig(name=precision), len(CFG.pattern), 7)
    runtime.begin_step(3)
    runtime.begin_microbatch(1)
    return model


def step(model, backend=None):
    """Gradients by name, and the bytes that the forward pass left behind (weights aside)."""
    if backend is not None:
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(fullgraph=True, dynamic=False, backend=backend)
    gen = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(97, (2, 32), generator=gen) for _ in range(2))
    seq_idx = (torch.arange(32) > 10).int().expand(2, -1)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model.loss(tokens, targets, seq_idx)[0]
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, sum(s.nbytes() for s in kept.values())


@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
@pytest.mark.parametrize("mode", ["squared_relu", "block"])
def test_gradients_are_equal_bit_for_bit(precision, mode):
    """In NVFP4 gradients are rounded stochastically: their bits are the same ones."""
    expected, everything = step(build(precision))
    model = build(precision)
    apply_recompute(model, mode, 0.5)
    grads, kept = step(model)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    assert kept < everything


def test_the_product_after_the_squared_relu_is_not_taken_again():
    flops = {}
    for mode in ("none", "squared_relu"):
        model = build("bf16")
        apply_recompute(model, mode, 0.5)
        y = model.layers[1](torch.randn(1, 16, 32, dtype=torch.bfloat16, requires_grad=True))
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        flops[mode] = counter.get_total_flops()
    assert flops["squared_relu"] == flops["none"] == 4 * 2 * 16 * 32 * 64


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_a_memory_budget_is_kept_with_equal_gradients(budget):
    """Through the compiler's partitioner, without its code generation: the operations are those of eager mode."""
    backend = "aot_eager_decomp_partition"
    try:
        expected, everything = step(build("bf16"), backend)
        model = build("bf16")
        apply_recompute(model, "budget", budget)
        grads, kept = step(model, backend)
    finally:
        apply_recompute(HybridModel(CFG, "meta"), "none", 1.0)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    assert kept < everything if budget == 0.0 else kept == everything
