"""The native FP8 layer with the emulated product in the tensor core's place: all else is what Hopper runs."""

import pytest
import torch
from nvfp4_kernels.native import fp8, self_test
from torch import library
from torch.utils.checkpoint import checkpoint

from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision import runtime as runtime_module
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.native_fp8 import Fp8Linear
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from tests.linear_steps import forward_and_gradients
from tests.precision.test_linear import Model

N_IN, N_OUT, TOKENS = 208, 144, 160  # no whole number of blocks of 128


def part(*gemms):
    return frozenset(o for o in OPERANDS if o.split(".")[0] in gemms)


PLANS = {
    "all": LinearPlan(frozenset(OPERANDS), format="fp8"),
    "weights in 1x128": LinearPlan(frozenset(OPERANDS), format="fp8", square_weights=False),
    "forward": LinearPlan(part("fprop"), format="fp8"),
    "backward": LinearPlan(part("dgrad", "wgrad"), format="fp8"),
    "without wgrad": LinearPlan(part("fprop", "dgrad"), format="fp8"),
}


def build(plan=PLANS["all"], native=True):
    linear = Linear(N_IN, N_OUT)
    torch.nn.init.normal_(linear.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    if native:
        linear.engine = Fp8Linear("emulated")
    linear.set_plan(plan, torch.tensor([77, 5, 0, 0]))
    linear.prepare_weight()
    return linear


def run(linear, call=None, tokens=TOKENS):
    return forward_and_gradients(linear, tokens, call)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_it_computes_what_the_emulated_layer_computes(plan):
    for got, expected in zip(run(build(plan)), run(build(plan, native=False)), strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=1e-5)  # sums in another order


def test_any_number_of_tokens_can_be_predicted():
    linear, x = build(), torch.randn(21, N_IN).bfloat16()
    with torch.no_grad():
        whole = linear(x)
        assert torch.equal(linear(x[:16]), whole[:16])
        assert torch.allclose(build(native=False)(x).float(), whole.float(), rtol=2**-7, atol=1e-5)


def test_weights_are_quantized_anew_in_place_and_released():
    linear = build()
    before, codes = run(linear)[0], linear.engine.codes
    linear.weight.data.mul_(-1)
    linear.prepare_weight()
    assert linear.engine.codes is codes
    assert torch.equal(run(linear)[0], -before)
    linear.set_plan(LinearPlan(), linear.rng)
    assert linear.engine.codes is None
    assert torch.equal(run(linear)[1], run(build(LinearPlan(), native=False))[1] * -1)


def test_compiled_and_recomputed_give_the_same_bits():
    linear = build()
    assert [name for name, _ in linear.named_parameters()] == ["weight"]
    assert list(linear.state_dict()) == ["weight"]
    expected = run(linear)
    calls = (
        torch.compile(linear, fullgraph=True, backend="aot_eager"),
        lambda x: checkpoint(linear, x, use_reentrant=False),
    )
    for call in calls:
        for got, e in zip(run(linear, call), expected, strict=True):
            assert torch.equal(got, e)


def test_the_forward_pass_saves_codes():
    saved, linear = [], build()
    x = torch.randn(1024, N_IN).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x)
    kept = {t.data_ptr() for t in (*linear.buffers(), linear.weight)}
    assert sum(t.nbytes for t in saved if t.data_ptr() not in kept) <= 0.52 * x.nbytes


def test_the_operators_are_registered_right():
    linear = build()
    x = torch.randn(TOKENS, N_IN).bfloat16()
    arguments = (x, linear.weight.detach(), *linear.engine.held(), linear.rng, linear.plan.spec, "emulated")
    for training in (True, False):
        library.opcheck(
            torch.ops.nvfp4_train.fp8_linear,
            (*arguments, training),
            test_utils=("test_schema", "test_faketensor"),
        )


def engaged(monkeypatch, backend="auto"):
    """A runtime on a machine that is told to be a Hopper; its products are emulated."""
    monkeypatch.setattr(runtime_module, "choose", lambda *_: ("cublas", "auto: NVIDIA H200"))
    monkeypatch.setattr(runtime_module, "Fp8Linear", lambda backend: Fp8Linear("emulated"))
    model = Model(blocks=2)
    cfg = PrecisionConfig(name="fp8", backend=backend, last_blocks_bf16=0)
    return model, runtime_module.apply_recipe(model, cfg, 2, 0)


def test_the_log_says_what_runs_and_health_is_recorded(monkeypatch):
    monkeypatch.setattr(
        self_test, "fp8_problem", lambda device: None if device.type == "cpu" else "elsewhere"
    )
    model, runtime = engaged(monkeypatch)
    assert "fp8: 2 of 2 linear layers" in runtime.summary()
    assert "GEMM cublas (codes and scales on tensor cores by cuBLAS; auto: NVIDIA H200)" in runtime.summary()
    x = torch.randn(64, model.linear(0).in_features).bfloat16().requires_grad_()
    with runtime.recording_health():
        model.linear(0)(x).float().square().sum().backward()
    native = {k: float(v) for k, v in runtime.health().items() if "layers.0." in k}
    emulated = Model(blocks=2)
    other = runtime_module.PrecisionRuntime(emulated, runtime.cfg, 2, 0)
    for linear in other.linears.values():
        linear.engine = None
        linear.prepare_weight()
    with other.recording_health():
        emulated.linear(0)(x).float().square().sum().backward()
    assert len(native) == 9
    for key, value in other.health().items():
        if "layers.0." in key:
            assert native[key] == pytest.approx(float(value), rel=1e-3)


def test_a_failed_self_test_is_said_and_stops_what_was_asked_for(monkeypatch):
    monkeypatch.setattr(self_test, "fp8_problem", lambda device: "3 of 4 results are wrong")
    _, runtime = engaged(monkeypatch)
    assert all(linear.engine is None for linear in runtime.linears.values())
    assert "auto: cublas fails its self-test on this GPU (3 of 4 results are wrong)" in runtime.summary()
    with pytest.raises(ConfigError, match=r"backend=cublas fails its self-test .*backend=emulated"):
        engaged(monkeypatch, "cublas")


def test_the_self_test_passes_what_is_right_and_tells_what_is_wrong(monkeypatch):
    cpu = torch.device("cpu")
    assert "not a CPU's" in self_test.fp8_problem(cpu)
    assert self_test.fp8_problem(cpu, "emulated") is None
    right = fp8.multiply
    monkeypatch.setattr(fp8, "multiply", lambda *given: right(*given) + 1)
    assert "results to torch.bfloat16" in self_test.fp8_problem(cpu, "emulated")
