"""Transformer Engine for real: its FP8 recipes on a Hopper or newer GPU, its NVFP4 recipe on Blackwell."""

import pytest
import torch

from nvfp4_train.config.schema import PhaseConfig, PrecisionConfig, RuleConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision.backends import FORWARD_OPERANDS
from nvfp4_train.precision.gpu import this_machine
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.runtime import PrecisionRuntime
from tests.child import results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(this_machine().te_torch is None, reason="Transformer Engine is not installed"),
]
N = 256


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Linear(N, N, device="cuda") for _ in range(3))
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=N**-0.5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def build(recipe, **keys):
    cfg = PrecisionConfig(
        name="fp8", backend="te", te_recipe=recipe, first_blocks_bf16=0, last_blocks_bf16=1, **keys
    )
    model = Model()
    return model, PrecisionRuntime(model, cfg, 3, 0)


def step(model, runtime, seed):
    x = torch.randn(128, N, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()
    model.zero_grad()
    with runtime.forward_pass():
        y = model(x)
    y.float().square().mean().backward()
    return y.detach(), [layer.weight.grad.clone() for layer in model.layers]


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_an_fp8_step_is_near_a_bf16_step(recipe):
    model, runtime = build(recipe)
    for seed in range(3):  # delayed scaling learns its scales
        y, gradients = step(model, runtime, seed)
    assert gradients[0].dtype == torch.float32
    with runtime.all_bf16():
        expected, wanted = step(model, runtime, 2)
    for got, exact in zip([y, *gradients], [expected, *wanted], strict=True):
        # E4M3 errs by 2^-4 / sqrt(3) / 1.4 of a number (rms), so after two layers about e = 0.05 of a sum; that turns around
        # e / pi of ReLU's gates, which is sqrt(2 e / pi) = 0.18 of a gradient.
        assert (got.float() - exact.float()).norm() < 0.25 * exact.float().norm()


AFTER_CUDNN = """
import json
import torch
from nvfp4_train.precision.te import load
image, filters = torch.ones(1, 1, 9, 9, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda")
before = torch.nn.functional.conv2d(image, filters)
te = load()
te.Linear(16, 16)(torch.ones(16, 16, device="cuda"))
print(json.dumps([before.unique().tolist(), torch.nn.functional.conv2d(image, filters).unique().tolist()]))
"""


def test_the_library_loads_where_torch_has_used_cudnn_before():
    """In a process of its own: a library that was loaded stays, and what was loaded first is what matters."""
    assert results_of(AFTER_CUDNN) == [[9.0], [9.0]]


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_resumed_run_goes_on_with_the_same_bits(recipe):
    model, runtime = build(recipe)
    for seed in range(3):
        step(model, runtime, seed)
    saved = {name: {k: v.clone() for k, v in state.items()} for name, state in runtime.state().items()}
    assert bool(saved) == (recipe == "delayed")
    expected = step(model, runtime, 3)[0]
    other, resumed = build(recipe)
    for name, state in resumed.state().items():
        for key, value in state.items():
            value.copy_(saved[name][key])
    assert torch.equal(step(other, resumed, 3)[0], expected)


def test_a_validation_leaves_delayed_scaling_as_it_was():
    results = []
    for validates in (False, True):
        model, runtime = build("delayed")
        for seed in range(2):
            step(model, runtime, seed)
        if validates:
            with torch.no_grad(), runtime.keeping_state():
                model(torch.full((128, N), 100.0, dtype=torch.bfloat16, device="cuda"))
        results.append([step(model, runtime, seed)[0] for seed in (2, 3)])
    for without, beside in zip(*results, strict=True):
        assert torch.equal(without, beside)


PHASES = [PhaseConfig("main", 0.0), PhaseConfig("tail", 0.9)]


def error(got, exact):
    """Relative, of the norms."""
    return float((got.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("phase", ["main", "tail"])
def test_a_layer_whose_backward_is_in_bf16_has_bf16s_gradients(recipe, phase):
    """From the start, and after steps in which all of its operands were quantized."""
    rule = RuleConfig(operands=["dgrad.*", "wgrad.*"], phase=phase, format="bf16")
    model, runtime = build(recipe, phases=PHASES, rules=[rule])
    if phase == "tail":
        step(model, runtime, 0)
        assert runtime.set_phase(0.95)
    layer = model.layers[0]
    assert layer.plan.quantized == FORWARD_OPERANDS
    draw = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(128, N, generator=draw).bfloat16().cuda() for _ in range(2))

    def results():
        layer.weight.grad, leaf = None, x.clone().requires_grad_()
        with runtime.forward_pass():
            y = layer(leaf)
        y.backward(dy)
        return y.detach(), leaf.grad, layer.weight.grad.clone()

    y, dx, dw = results()
    with runtime.all_bf16():
        expected = results()
    # Two operands in E4M3 err by 0.04 of a product or so, results in bf16 by 2^-9.
    assert 0.01 < error(y, expected[0]) < 0.1
    assert error(dx, expected[1]) < 0.008
    assert error(dw, expected[2]) < 0.008


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_phase_takes_layers_out_of_the_library(recipe):
    rule = RuleConfig(phase="tail", format="bf16")
    model, runtime = build(recipe, phases=PHASES, rules=[rule])
    for seed in range(3):
        before = step(model, runtime, seed)[0]
    with runtime.all_bf16():
        expected, wanted = step(model, runtime, 2)
    assert not torch.equal(before, expected)
    assert runtime.set_phase(0.95)
    assert not any(layer.plan.quantized for layer in model.layers)
    y, gradients = step(model, runtime, 2)
    assert torch.equal(y, expected)
    for got, exact in zip(gradients, wanted, strict=True):
        assert torch.equal(got, exact)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0), reason="this GPU has NVFP4"
)
def test_nvfp4_is_refused_with_the_librarys_reason():
    with pytest.raises(ConfigError, match=r"Device compute capability 10.0 or higher required for NVFP4"):
        PrecisionRuntime(Model(), PrecisionConfig(name="nvfp4", backend="te"), 3, 0)
