"""The other formats and the published improvements in the linear layer: GEMMs written out with dequantized operands."""

import pytest
import torch
from nvfp4_kernels import BLOCK, FP8, MXFP4, CounterKey, quantize, quantize_blocks, quantize_four_over_six
from nvfp4_kernels.ms_eden import quantize_ms_eden, rotation_signs

from nvfp4_train.config.schema import PrecisionConfig, RuleConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision import apply_recipe
from nvfp4_train.precision.backends import plan_problem
from nvfp4_train.precision.recipe import LinearPlan, plan_for
from tests.precision.test_linear import SEED, STEP, Model, close, run, sample

ARMS = {
    "mxfp4": {},
    "fp8": {},
    "four_over_six": {"name": "nvfp4", "four_over_six": "all"},
    "ms_eden": {"name": "nvfp4", "backward": "ms_eden", "weight_blocks_2d": False},
    "both": {"name": "nvfp4", "backward": "ms_eden", "four_over_six": "all", "weight_blocks_2d": False},
}


def build(arm):
    model = Model(blocks=2)
    cfg = {"name": arm, "last_blocks_bf16": 0, **ARMS[arm]}
    runtime = apply_recipe(model, PrecisionConfig(**cfg), 2, SEED)
    runtime.begin_step(STEP)
    return model, runtime


def fp64(q):
    return q.dequantize(torch.float64)


@pytest.mark.parametrize("arm", ["mxfp4", "fp8"])
def test_block_formats_use_their_blocks_in_all_three_gemms(arm):
    model, _ = build(arm)
    linear, x, dy = model.linear(1), sample(), sample(features=48, seed=2)
    y, dx, dw = run(linear, x, dy)
    fmt, mx = (MXFP4, True) if arm == "mxfp4" else (FP8, False)
    keys = [CounterKey(SEED, STEP, 0, 1, role) if mx else None for role in (0, 1)]
    w = fp64(quantize_blocks(linear.weight.detach().bfloat16(), fmt, square=True))
    close(y, fp64(quantize_blocks(x, fmt)) @ w.t())
    close(dx, fp64(quantize_blocks(dy, fmt, key=keys[0])) @ w)
    left = fp64(quantize_blocks(dy, fmt, key=keys[1], transpose=True, rotate=mx))
    exact = left @ fp64(quantize_blocks(x, fmt, transpose=True, rotate=mx)).t()
    torch.testing.assert_close(dw.double(), exact, rtol=1e-5, atol=float(exact.abs().max()) * 1e-6)


def test_four_over_six_is_the_forwards_alone():
    model, _ = build("four_over_six")
    linear, x, dy = model.linear(1), sample(), sample(features=48, seed=2)
    y, dx, _ = run(linear, x, dy)
    w = linear.weight.detach().bfloat16()
    w = fp64(quantize_four_over_six(w, (BLOCK, BLOCK), w.abs().amax().float()))
    close(y, fp64(quantize_four_over_six(x, (1, BLOCK), x.abs().amax().float())) @ w.t())
    dy_rows = quantize(dy, rounding="stochastic", key=CounterKey(SEED, STEP, 0, 1))
    close(dx, fp64(dy_rows) @ w)


@pytest.mark.parametrize("arm", ["ms_eden", "both"])
def test_ms_eden_quantizes_again_what_the_forward_pass_quantized(arm):
    model, _ = build(arm)
    linear, x, dy = model.linear(1), sample(), sample(features=48, seed=2)
    y, dx, dw = run(linear, x, dy)
    w = linear.weight.detach().bfloat16()

    def forward(t):
        if arm == "both":
            return quantize_four_over_six(t, (1, BLOCK), t.abs().amax().float())
        return quantize(t)

    qx, qw = forward(x), forward(w)
    close(y, fp64(qx) @ fp64(qw).t())
    keys = [CounterKey(SEED, STEP, 0, 1, role) for role in range(4)]
    for got, grad, other, size, a, b in ((dx, dy, qw, 16, 0, 2), (dw, dy.t(), qx, 32, 1, 3)):
        signs = rotation_signs(keys[a], size, torch.device("cpu"))
        left = quantize_ms_eden(grad.contiguous(), signs, keys[a])
        right = quantize_ms_eden(other.operand().t().contiguous(), signs, keys[b])
        exact = fp64(left) @ fp64(right).t() * (other.amax / 2688).double()
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=float(exact.abs().max()) * 1e-5)
    plain = dy.double().t() @ fp64(qx)
    cosine = torch.nn.functional.cosine_similarity(dw.double().flatten(), plain.flatten(), dim=0)
    assert cosine > 0.97


@pytest.mark.parametrize("arm", ARMS)
def test_compiled_checkpointed_and_recorded_give_the_same_bits(arm):
    model, runtime = build(arm)
    linear, x, dy = model.linear(0), sample(), sample(features=48, seed=2)
    expected = run(linear, x, dy)
    calls = [
        torch.compile(linear.forward, fullgraph=True, backend="aot_eager"),
        lambda t: torch.utils.checkpoint.checkpoint(linear, t, use_reentrant=False),
        linear,
    ]
    for call in calls:
        leaf = x.clone().requires_grad_()
        linear.weight.grad = None
        with runtime.recording_health():
            y = call(leaf)
            y.backward(dy)
        for a, b in zip((y, leaf.grad, linear.weight.grad), expected, strict=True):
            assert torch.equal(a, b)
    health = {k: float(v) for k, v in runtime.health().items() if "layers.0." in k}
    assert len(health) == 9
    low = {"fp8": 25}.get(arm, 10)
    assert all(low < v < 45 for k, v in health.items() if k.endswith("sqnr_db")), health


@pytest.mark.parametrize("arm", ARMS)
def test_what_the_forward_pass_saves(arm):
    model, _ = build(arm)
    saved, x = [], sample(tokens=256).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.linear(0)(x)
    weights = {t.data_ptr() for t in model.linear(0).buffers()}
    saved_bytes = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in weights)
    assert saved_bytes <= (0.52 if arm == "fp8" else 0.30) * x.numel() * 2


def test_plans():
    cfg = PrecisionConfig(name="fp8")
    plan = plan_for(cfg, "layers.5.mixer.up_proj", 5, 62, "main")
    assert plan.format == "fp8"
    assert not plan.rotates_wgrad
    assert LinearPlan.from_spec(plan.spec) == plan
    assert not plan_for(cfg, "layers.0.mixer.up_proj", 0, 62, "main").quantized
    assert plan_for(cfg, "layers.59.mixer.up_proj", 59, 62, "main").quantized
    partly = PrecisionConfig(
        name="nvfp4", backward="ms_eden", rules=[RuleConfig(operands=["wgrad.grad"], format="bf16")]
    )
    with pytest.raises(ConfigError, match=r"ms_eden needs all six operands.*leave wgrad.grad of"):
        plan_for(partly, "layers.5.mixer.up_proj", 5, 62, "main")
    for key, value in (("four_over_six", "all"), ("backward", "ms_eden")):
        cfg = PrecisionConfig(name="nvfp4", backend="triton", **{key: value})
        plan = plan_for(cfg, "layers.5.mixer.up_proj", 5, 62, "main")
        assert "emulated alone" in plan_problem("triton", cfg, plan)
        assert plan_problem("emulated", cfg, plan) is None
