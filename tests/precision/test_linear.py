"""The quantized linear against its GEMMs written out with dequantized operands."""

import pytest
import torch
from nvfp4_kernels import BLOCK, SIGNS, CounterKey, hadamard16, quantize
from torch import nn

from nvfp4_train.config.schema import PhaseConfig, PrecisionConfig, RuleConfig
from nvfp4_train.precision import Linear, apply_recipe

SEED, STEP = 77, 5


class Model(nn.Module):
    """Three blocks of one linear, named like the hybrid model's."""

    def __init__(self, n_in=64, n_out=48, blocks=3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mixer": nn.ModuleDict({"up_proj": Linear(n_in, n_out)})}) for _ in range(blocks)
        )
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p, std=0.1, generator=generator)

    def linear(self, i):
        return self.layers[i]["mixer"]["up_proj"]


def build(blocks=3, **cfg):
    model = Model(blocks=blocks)
    cfg = {"last_blocks_bf16": 0, **cfg}
    runtime = apply_recipe(model, PrecisionConfig(name="nvfp4", **cfg), blocks, SEED)
    runtime.begin_step(STEP)
    return model, runtime


def sample(tokens=32, features=64, seed=1):
    return torch.randn(tokens, features, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(linear, x, dy):
    x = x.clone().requires_grad_()
    linear.weight.grad = None
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


def close(got, exact):
    """bf16 result of fp32 sums: half an ulp of the result, plus accumulation error that is far below it."""
    tolerance = exact.abs() * 2**-8 + exact.abs().max() * 1e-5
    assert ((got.double() - exact).abs() <= tolerance).all(), ((got.double() - exact).abs() - tolerance).max()


def test_three_gemms_use_the_recipes_operands():
    model, _ = build()
    linear, x, dy = model.linear(1), sample(), sample(features=48, seed=2)
    y, dx, dw = run(linear, x, dy)

    w = quantize(linear.weight.detach().bfloat16(), (BLOCK, BLOCK)).dequantize(torch.float64)
    close(y, quantize(x).dequantize(torch.float64) @ w.t())

    row_key = CounterKey(SEED, STEP, 0, tensor=1, role=0)
    dy_rows = quantize(dy, rounding="stochastic", key=row_key).dequantize(torch.float64)
    close(dx, dy_rows @ w)

    column_key = CounterKey(SEED, STEP, 0, tensor=1, role=1)
    dy_columns = quantize(dy, transpose=True, hadamard=SIGNS, rounding="stochastic", key=column_key)
    x_columns = quantize(x, transpose=True, hadamard=SIGNS)
    exact = dy_columns.dequantize(torch.float64) @ x_columns.dequantize(torch.float64).t()
    assert dw.dtype == torch.float32
    torch.testing.assert_close(dw.double(), exact, rtol=1e-5, atol=float(exact.abs().max()) * 1e-6)


def test_a_plan_without_wgrad_input_keeps_x_and_does_not_rotate():
    model, _ = build(rules=[RuleConfig(operands=["wgrad.input"], format="bf16")])
    x, dy = sample(), sample(features=48, seed=2)
    _, _, dw = run(model.linear(0), x, dy)
    dy_columns = quantize(dy, transpose=True, rounding="stochastic", key=CounterKey(SEED, STEP, 0, 0, role=1))
    exact = dy_columns.dequantize(torch.float64) @ x.double()
    torch.testing.assert_close(dw.double(), exact, rtol=1e-5, atol=float(exact.abs().max()) * 1e-6)


@pytest.mark.parametrize(
    "operand", ["fprop.input", "fprop.weight", "dgrad.grad", "dgrad.weight", "wgrad.grad"]
)
def test_any_operand_can_stay_in_bf16(operand):
    model, _ = build(rules=[RuleConfig(operands=[operand], format="bf16")])
    full, _ = build()
    results = run(model.linear(0), sample(), sample(features=48, seed=2))
    others = run(full.linear(0), sample(), sample(features=48, seed=2))
    gemm = {"fprop": 0, "dgrad": 1, "wgrad": 2}[operand.split(".")[0]]
    for i, (a, b) in enumerate(zip(results, others, strict=True)):
        assert torch.equal(a, b) == (i != gemm), f"GEMM {i}"
        assert torch.nn.functional.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) > 0.98


def test_backward_keeps_only_codes():
    model, _ = build()
    saved, x = [], sample(tokens=256).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.linear(0)(x)
    weights = {t.data_ptr() for t in model.linear(0).buffers()}
    assert {t.data_ptr() for t in saved} & weights, "the hook sees what the operator saves"
    saved_bytes = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in weights)
    assert saved_bytes <= 0.30 * x.numel() * 2  # 4.5 bits of 16, and the amax


def test_same_bits_again_and_other_bits_at_other_places():
    model, runtime = build()
    x, dy = sample(), sample(features=48, seed=2)
    first = run(model.linear(0), x, dy)
    for a, b in zip(first, run(model.linear(0), x, dy), strict=True):
        assert torch.equal(a, b)
    model.linear(1).weight.data.copy_(model.linear(0).weight.data)
    runtime.prepare_weights()
    assert not torch.equal(run(model.linear(1), x, dy)[1], first[1]), "another tensor draws other bits"
    runtime.begin_microbatch(1)
    assert not torch.equal(run(model.linear(0), x, dy)[1], first[1]), "another micro-batch draws other bits"
    runtime.begin_step(STEP + 1)
    assert not torch.equal(run(model.linear(0), x, dy)[1], first[1]), "another step draws other bits"


def test_compiled_equals_eager_without_graph_breaks():
    model, _ = build()
    compiled = torch.compile(model.linear(0).forward, fullgraph=True, backend="aot_eager")
    x, dy = sample(), sample(features=48, seed=2)
    expected = run(model.linear(0), x, dy)
    leaf = x.clone().requires_grad_()
    model.linear(0).weight.grad = None
    y = compiled(leaf)
    y.backward(dy)
    for a, b in zip((y, leaf.grad, model.linear(0).weight.grad), expected, strict=True):
        assert torch.equal(a, b)


def test_checkpointed_recomputation_gives_the_same_gradients():
    model, _ = build()
    x, dy = sample(), sample(features=48, seed=2)
    expected = run(model.linear(0), x, dy)
    leaf = x.clone().requires_grad_()
    model.linear(0).weight.grad = None
    torch.utils.checkpoint.checkpoint(model.linear(0), leaf, use_reentrant=False).backward(dy)
    assert torch.equal(leaf.grad, expected[1])
    assert torch.equal(model.linear(0).weight.grad, expected[2])


def test_weights_are_prepared_once_and_seen_after_preparation():
    model, runtime = build()
    x = sample()
    before = model.linear(0)(x)
    with torch.no_grad():
        model.linear(0).weight.mul_(2)
    assert torch.equal(model.linear(0)(x), before)
    runtime.prepare_weights()
    assert torch.equal(model.linear(0)(x), before * 2)


def test_phases_change_the_plan_and_all_bf16_is_undone():
    model, runtime = build(
        phases=[PhaseConfig("main", 0.0), PhaseConfig("tail", 0.5)],
        rules=[RuleConfig(phase="tail", format="bf16")],
    )
    x = sample()
    main = model.linear(0)(x)
    exact = torch.nn.functional.linear(x, model.linear(0).weight.bfloat16())
    with runtime.all_bf16():
        assert torch.equal(model.linear(0)(x), exact)
    assert torch.equal(model.linear(0)(x), main)
    assert not torch.equal(main, exact)
    assert not runtime.set_phase(0.49)
    assert runtime.set_phase(0.5)
    assert torch.equal(model.linear(0)(x), exact)
    assert runtime.set_phase(0.0), "a rewind goes back a phase"
    assert torch.equal(model.linear(0)(x), main)


@pytest.mark.parametrize("where", ["x", "dy", "weight"])
def test_non_finite_values_are_not_masked(where):
    model, runtime = build()
    x, dy = sample(), sample(features=48, seed=2)
    if where == "x":
        x[3, 5] = float("nan")
    elif where == "dy":
        dy[3, 5] = float("nan")
    else:
        model.linear(0).weight.data[3, 5] = float("nan")
        runtime.prepare_weights()
    y, dx, dw = run(model.linear(0), x, dy)
    assert not torch.isfinite(y).all() or where == "dy"
    assert not (torch.isfinite(dx).all() and torch.isfinite(dw).all())


def test_one_dimensional_weight_blocks_quantize_each_orientation():
    model, _ = build(weight_blocks_2d=False)
    linear, x, dy = model.linear(0), sample(), sample(features=48, seed=2)
    y, dx, _ = run(linear, x, dy)
    w = linear.weight.detach().bfloat16()
    close(y, quantize(x).dequantize(torch.float64) @ quantize(w).dequantize(torch.float64).t())
    dy_rows = quantize(dy, rounding="stochastic", key=CounterKey(SEED, STEP, 0, 0, role=0))
    close(dx, dy_rows.dequantize(torch.float64) @ quantize(w, transpose=True).dequantize(torch.float64).t())


def test_inference_takes_any_number_of_rows():
    model, _ = build()
    with torch.no_grad():
        assert model.linear(0)(sample(tokens=3)).shape == (3, 48)


def test_hadamard_cancels_in_the_product():
    x, dy = sample(), sample(features=48, seed=2)
    rotated = hadamard16(dy.t().contiguous()).double() @ hadamard16(x.t().contiguous()).double().t()
    exact = dy.double().t() @ x.double()
    assert (rotated - exact).abs().max() < 0.02 * exact.abs().max()
