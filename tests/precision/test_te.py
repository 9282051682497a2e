"""Our side of the Transformer Engine backend, against a stand-in that keeps its books: which layers enter its autocast,
with which recipe, when delayed scaling takes its maxima over, what a checkpoint holds. TE itself: test_te_gpu.py."""

import contextlib
import sys
import types

import pytest
import torch

from nvfp4_train.config.schema import PhaseConfig, PrecisionConfig, RuleConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision import te as our_te
from nvfp4_train.precision.backends import FORWARD_OPERANDS
from nvfp4_train.precision.gpu import Machine
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.runtime import PrecisionRuntime
from tests.precision import te_wheel

GPU = Machine("NVIDIA B200", (10, 0), (13, 0), None, "2.20.2", "2.20.2", "2.20.2")


class StandIn:
    """transformer_engine.pytorch as far as we call it, with the bookkeeping of its FP8GlobalStateManager."""

    def __init__(self):
        self.enabled, self.recipe, self.depth, self.updates, self.reason = False, None, 0, 0, ""
        manager = types.SimpleNamespace(
            is_fp8_enabled=lambda: self.enabled, get_fp8_recipe=lambda: self.recipe
        )
        self.quantization = types.SimpleNamespace(FP8GlobalStateManager=manager)
        self.calls = []
        outer = self

        class Layer:
            def __init__(self, in_features, out_features, bias, params_dtype, device):
                assert not bias
                assert device == "meta"
                self._parameters, self.fp8_meta = {}, {}

            def init_fp8_metadata(self, num_gemms):
                if type(outer.recipe).__name__ == "DelayedScaling":
                    for side, n in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                        values = {"scale": torch.ones(n), "amax_history": torch.zeros(1024, n)}
                        self.fp8_meta[side] = types.SimpleNamespace(**values)

            def __call__(self, x):
                assert outer.enabled
                outer.calls.append(outer.recipe)
                weight = self._parameters["weight"]
                if (
                    outer.recipe.backward_override is not None
                ):  # its dgrad multiplies dy with the weight as it is
                    assert weight.dtype == x.dtype
                return torch.nn.functional.linear(x, weight.to(x.dtype))

        self.Linear = Layer

    @contextlib.contextmanager
    def autocast(self, enabled, recipe):
        before, self.enabled, self.recipe = (self.enabled, self.recipe), enabled, recipe
        self.depth += 1
        yield
        self.depth -= 1
        self.enabled, self.recipe = before
        self.updates += self.depth == 0 and torch.is_grad_enabled()

    def is_fp8_available(self, return_reason):
        return not self.reason, self.reason

    is_nvfp4_available = is_fp8_block_scaling_available = is_fp8_available


@pytest.fixture
def te(monkeypatch):
    pytest.importorskip("pydantic", reason="Transformer Engine's recipes need pydantic")
    stand_in = StandIn()
    package, common = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.common")
    common.recipe = te_wheel.load("common.recipe")
    for module in (package, common):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(our_te, "load", lambda: stand_in)
    monkeypatch.setattr(our_te, "version", lambda name: "2.20.2")
    monkeypatch.setattr("nvfp4_train.precision.runtime.this_machine", lambda device: GPU)
    return stand_in


class Model(torch.nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.layers = torch.nn.ModuleList(Linear(32, 32) for _ in range(n))
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=0.1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def config(name="nvfp4", **keys):
    return PrecisionConfig(name=name, backend="te", first_blocks_bf16=1, last_blocks_bf16=1, **keys)


def step(model, runtime):
    with runtime.forward_pass():
        y = model(torch.randn(16, 32).bfloat16())
    y.sum().backward()


@te_wheel.needs_wheel
def test_quantized_layers_run_under_the_recipe_of_our_keys_and_the_others_stay_out(te):
    model = Model()
    runtime = PrecisionRuntime(model, config(hadamard=False, weight_blocks_2d=False), 4, 0)
    step(model, runtime)
    assert len(te.calls) == 2  # of four blocks the first and the last are in bf16
    recipe = te.calls[0]
    assert type(recipe).__name__ == "NVFP4BlockScaling"
    assert (recipe.disable_rht, recipe.disable_stochastic_rounding, recipe.disable_2d_quantization) == (
        True,
        False,
        True,
    )
    assert all(layer.weight.grad is not None for layer in model.layers)
    assert "GEMM te" in runtime.summary()
    assert "NVFP4BlockScaling, Transformer Engine 2.20.2" in runtime.summary()


@te_wheel.needs_wheel
def test_no_environment_variable_decides_what_our_keys_say(te, monkeypatch):
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "all")
    sys.modules["transformer_engine.common"].recipe = te_wheel.load(
        "common.recipe"
    )  # it reads them when imported
    recipe = our_te.TransformerEngine(config()).recipe
    assert not recipe.disable_rht
    assert recipe.nvfp4_4over6 == "none"


@te_wheel.needs_wheel
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_maxima_are_taken_over_once_a_training_pass(te, name):
    model = Model()
    runtime = PrecisionRuntime(model, config("fp8", te_recipe=name), 4, 0)
    te.updates = 0
    step(model, runtime)
    assert te.updates == 1
    with torch.no_grad():  # a validation, outside of `forward_pass`
        model(torch.randn(16, 32).bfloat16())
    assert te.updates == 1
    assert len(te.calls) == 4


@te_wheel.needs_wheel
def test_a_layer_whose_backward_is_in_bf16_has_the_recipe_that_does_that(te):
    model = Model()
    rule = RuleConfig(blocks="1", operands=["dgrad.*", "wgrad.*"], format="bf16")
    runtime = PrecisionRuntime(model, config(rules=[rule]), 4, 0)
    assert model.layers[1].plan.quantized == FORWARD_OPERANDS
    step(model, runtime)
    assert [recipe.backward_override for recipe in te.calls] == ["high_precision", None]


@te_wheel.needs_wheel
def test_a_phase_moves_layers_out_of_the_library(te):
    model = Model()
    phases = [PhaseConfig("main", 0.0), PhaseConfig("tail", 0.9)]
    runtime = PrecisionRuntime(
        model, config(phases=phases, rules=[RuleConfig(phase="tail", format="bf16")]), 4, 0
    )
    runtime.set_phase(0.95)
    step(model, runtime)
    assert te.calls == []


@te_wheel.needs_wheel
def test_delayed_scaling_has_state_to_save_and_the_others_none(te):
    model = Model()
    runtime = PrecisionRuntime(model, config("fp8", te_recipe="delayed"), 4, 0)
    state = runtime.state()
    assert list(state) == [f"layers.{i}" for i in range(4)]
    assert {name: tuple(value.shape) for name, value in state["layers.1"].items()} == {
        "scaling_fwd.scale": (3,),
        "scaling_fwd.amax_history": (1024, 3),
        "scaling_bwd.scale": (2,),
        "scaling_bwd.amax_history": (1024, 2),
    }
    state["layers.1"]["scaling_fwd.scale"].fill_(5)  # the tensors in use: a checkpoint is loaded into them
    assert model.layers[1].engine.layer.fp8_meta["scaling_fwd"].scale[0] == 5
    with runtime.keeping_state():  # a validation
        state["layers.1"]["scaling_fwd.scale"].fill_(7)
    assert state["layers.1"]["scaling_fwd.scale"][0] == 5
    assert PrecisionRuntime(Model(), config("fp8", te_recipe="block"), 4, 0).state() == {}
    assert [name for name, _ in model.named_parameters()] == [f"layers.{i}.weight" for i in range(4)]


@te_wheel.needs_wheel
def test_the_librarys_own_reason_refuses_before_a_layer_is_made(te, monkeypatch):
    te.reason = "Device compute capability 10.0 or higher required for NVFP4 execution."
    monkeypatch.setattr(te, "Linear", None)
    with pytest.raises(
        ConfigError, match=r"te can't run precision=nvfp4 here: Device compute capability 10.0"
    ):
        PrecisionRuntime(Model(), config(), 4, 0)


def test_what_is_missing_is_said_when_the_library_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigError, match=r"transformer_engine cannot be imported .*docs/operations\.md"):
        our_te.load()
