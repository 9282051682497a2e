"""The native layer with the emulated product in the tensor core's place: all else is what Blackwell runs."""

import pytest
import torch
from nvfp4_kernels.native import self_test
from torch import library

from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision import native, runtime
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.native import NativeLinear
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from tests.linear_steps import forward_and_gradients
from tests.precision.test_linear import Model

N_IN, N_OUT, TOKENS = 80, 48, 32
FULL = frozenset(OPERANDS)
PLANS = {
    "all": LinearPlan(FULL),
    "nearest, plain": LinearPlan(FULL, stochastic_gradients=False, hadamard=False, square_weights=False),
    "forward": LinearPlan(frozenset(o for o in OPERANDS if o.startswith("fprop"))),
    "backward": LinearPlan(frozenset(o for o in OPERANDS if not o.startswith("fprop"))),
    "without wgrad": LinearPlan(frozenset(o for o in OPERANDS if not o.startswith("wgrad"))),
}


def build(plan, native):
    linear = Linear(N_IN, N_OUT)
    torch.nn.init.normal_(linear.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    if native:
        linear.engine = NativeLinear("emulated")
    linear.set_plan(plan, torch.tensor([77, 5, 0, 3]))
    linear.prepare_weight()
    return linear


def run(linear, call=None):
    return forward_and_gradients(linear, TOKENS, call)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_it_computes_what_the_emulated_layer_computes(plan):
    for got, expected in zip(run(build(plan, True)), run(build(plan, False)), strict=True):
        assert torch.allclose(
            got.float(), expected.float(), rtol=2**-7, atol=1e-5
        )  # products of other layouts


def test_weights_are_quantized_anew_in_place_and_released():
    linear = build(PLANS["all"], True)
    before, codes = run(linear)[0], linear.engine.codes
    linear.weight.data.mul_(-1)
    linear.prepare_weight()
    assert linear.engine.codes is codes
    assert torch.equal(run(linear)[0], -before)
    linear.set_plan(LinearPlan(), linear.rng)
    assert linear.engine.codes is None
    assert torch.equal(run(linear)[1], run(build(LinearPlan(), False))[1] * -1)


def test_it_compiles_whole_and_adds_no_parameters():
    linear = build(PLANS["all"], True)
    assert [name for name, _ in linear.named_parameters()] == ["weight"]
    assert list(linear.state_dict()) == ["weight"]
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for got, expected in zip(run(linear, compiled), run(linear), strict=True):
        assert torch.equal(got, expected)


def test_the_operators_are_registered_right():
    linear = build(PLANS["all"], True)
    engine = linear.engine
    operands = engine.codes, engine.scales, engine.turned_codes, engine.turned_scales, engine.amax
    x = torch.randn(TOKENS, N_IN).bfloat16()
    spec = PLANS["all"].spec
    arguments = (x, None, linear.weight.detach(), *operands, linear.rng, spec, "emulated", True)
    library.opcheck(
        torch.ops.nvfp4_train.native_linear, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("hardware", [False, True])
def test_hardware_rounding_reaches_the_gradients_quantizer(hardware, monkeypatch):
    right, seen = native.quantize_rows_and_columns, []

    def watched(x, rows, columns, signs=None, hardware_rounding=False):
        seen.append((rows is not None and rows[1] is not None, hardware_rounding))
        return right(x, rows, columns, signs, hardware_rounding)

    monkeypatch.setattr(native, "quantize_rows_and_columns", watched)
    run(build(LinearPlan(FULL, hardware_rounding=hardware), True))
    assert seen == [(False, False), (True, hardware)]  # x to nearest, dy stochastic


def engaged(monkeypatch, backend, products=None, rounding=None):
    """A runtime on a machine that is told to be a B200, with what its self-test found; its products are emulated."""
    monkeypatch.setattr(runtime, "choose", lambda *_: ("triton", "auto: NVIDIA B200"))
    monkeypatch.setattr(runtime, "NativeLinear", lambda backend: NativeLinear("emulated"))
    monkeypatch.setattr(self_test, "problem", lambda backend, device: products)
    monkeypatch.setattr(self_test, "rounding_problem", lambda device: rounding)
    cfg = PrecisionConfig(name="nvfp4", backend=backend, hardware_rounding=True, last_blocks_bf16=0)
    return runtime.apply_recipe(Model(blocks=2), cfg, 2, 0)


def test_hardware_rounding_runs_where_the_self_test_proves_it_and_nowhere_else(monkeypatch):
    proved = engaged(monkeypatch, "auto")
    assert "native, stochastic rounding by cvt.rs; self-test passed" in proved.summary()
    assert all(linear.plan.hardware_rounding for linear in proved.linears.values())
    with pytest.raises(ConfigError, match=r"by our rule on this GPU \(at thresholds 3 .*leave it at false"):
        engaged(monkeypatch, "auto", rounding="at thresholds 3 of 4 bytes of codes differ")
    with pytest.raises(
        ConfigError, match="backend=triton fails its self-test"
    ):  # auto would emulate, without cvt.rs
        engaged(monkeypatch, "auto", products="3 of 4 results are wrong")
