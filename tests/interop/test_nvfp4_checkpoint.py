"""The NVFP4 checkpoint, read back by compressed-tensors: training's codes and scales, and nothing rounded again."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import yaml
from nvfp4_kernels import amax, quantize, quantize_four_over_six

from nvfp4_train import export
from nvfp4_train.errors import ConfigError
from nvfp4_train.interop.export import quantized_weight
from nvfp4_train.interop.nemotron_h import tensor_keys
from nvfp4_train.interop.tensor_files import TensorFolder
from nvfp4_train.precision import LinearPlan
from nvfp4_train.training.inference import load_run

compressed_tensors = pytest.importorskip(
    "compressed_tensors", reason="it reads the file back (the dev extra)"
)
transformers = pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402


@pytest.fixture(scope="module")
def quantized(tiny_run):
    """The linear layers whose weight training's forward pass has in NVFP4: {name: module}."""
    linears = tiny_run.precision.linears
    return {name: m for name, m in linears.items() if "fprop.weight" in m.plan.quantized}


def parts(tiny_run, quantized):
    for name, linear in quantized.items():
        for key, rows in tensor_keys(f"{name}.weight", tiny_run.cfg.model):
            yield key.removesuffix(".weight"), linear, rows


def test_codes_and_scales_are_trainings_byte_for_byte(tiny_run, exported, quantized):
    assert 0 < len(quantized) < len(tiny_run.precision.linears)
    files = TensorFolder(exported["nvfp4"])
    for key, linear, rows in parts(tiny_run, quantized):
        reference = quantize(linear.weight.bfloat16(), (16, 16), backend="reference")
        packed, scale = files.read(f"{key}.weight_packed"), files.read(f"{key}.weight_scale")
        assert torch.equal(packed, reference.codes[rows])
        assert torch.equal(scale.view(torch.uint8), reference.scales[rows].view(torch.uint8))
        assert torch.equal(linear.weight_amax, reference.amax)


def test_compressed_tensors_reads_what_the_forward_pass_multiplies_with(tiny_run, exported, quantized):
    files = TensorFolder(exported["nvfp4"])
    config = json.loads((exported["nvfp4"] / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for key, linear, rows in parts(tiny_run, quantized):
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        assert set(names) == set(compressor.compression_param_names(scheme)) - {"input_global_scale"}
        state = {name: files.read(f"{key}.{name}") for name in names}
        unscaled = compressor.decompress(state | {"weight_global_scale": torch.ones(1)}, scheme)["weight"]
        assert torch.equal(unscaled.bfloat16(), linear.fprop_weight[rows])  # the operand, exact
        weight = compressor.decompress(state, scheme)["weight"]
        training = linear.fprop_weight[rows].float() * (linear.weight_amax / torch.tensor(2688.0))
        assert torch.equal(weight.bfloat16(), training.bfloat16())


@pytest.mark.parametrize("square", [True, False])
def test_four_over_six_is_exported_as_trained(tiny_run, tmp_path, square):
    """In 1x16 blocks some maxima are mapped to 4; in both the tensor scale is another."""
    shutil.copytree(tiny_run.path, tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    config["precision"] |= {"four_over_six": "weights", "weight_blocks_2d": square}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    export.main([f"run={tmp_path / 'run'}", f"out={tmp_path / 'out'}", "format=nvfp4"])
    files = TensorFolder(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    trained = load_run(tmp_path / "run", "cpu", pytest.fail)
    linears = {n: m for n, m in trained.precision.linears.items() if "fprop.weight" in m.plan.quantized}
    assert linears
    for key, linear, rows in parts(tiny_run, linears):
        w = linear.weight.bfloat16()
        reference = quantize_four_over_six(w, (16, 16) if square else (1, 16), amax(w)[0])
        state = {
            n: files.read(f"{key}.{n}") for n in ("weight_packed", "weight_scale", "weight_global_scale")
        }
        assert torch.equal(state["weight_packed"], reference.codes[rows])
        assert torch.equal(state["weight_scale"].view(torch.uint8), reference.scales[rows].view(torch.uint8))
        assert torch.equal(state["weight_global_scale"], torch.full((1,), 2688.0) / linear.weight_amax)
        unscaled = compressor.decompress(state | {"weight_global_scale": torch.ones(1)}, scheme)["weight"]
        assert torch.equal(unscaled.bfloat16(), linear.fprop_weight[rows])  # what training multiplies with
        weight = compressor.decompress(state, scheme)["weight"].float()
        training = linear.fprop_weight[rows].float() * (linear.weight_amax / torch.tensor(2688.0))
        torch.testing.assert_close(weight, training, rtol=2**-7, atol=0)
        assert (weight - w[rows].float()).norm() < 0.2 * w[rows].float().norm()


def test_q_k_and_v_share_their_tensor_scale(exported):
    files = TensorFolder(exported["nvfp4"])
    (layer,) = {re.match(r".*layers\.\d+", key)[0] for key in files.keys() if ".q_proj." in key}  # noqa: SIM118
    q, k, v = (files.read(f"{layer}.mixer.{letter}_proj.weight_global_scale") for letter in "qkv")
    assert torch.equal(q, k)
    assert torch.equal(q, v)


def test_transformers_loads_it_with_the_other_layers_in_bf16(tiny_run, exported, quantized):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported["nvfp4"], dtype=torch.bfloat16)
    compressed = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    expected = {key.replace("backbone.", "model.") for key, _, _ in parts(tiny_run, quantized)}
    assert compressed == expected
    tokens = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(0))
    ours = load_run(exported["nvfp4"], "cpu", pytest.fail)
    with torch.no_grad():
        theirs, here = model(tokens).logits.float(), ours.model(tokens)
        exact = tiny_run.model(tokens)
    assert (theirs - here).norm() < 0.02 * here.norm()  # bf16's rounding
    assert (exact - here).norm() < 0.3 * here.norm()  # activations in NVFP4 as well


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("value", [0.0, 1e-8, 1.0, 3e4])
def test_any_range_of_weights(square, value):
    weight = value * torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    q = quantized_weight(weight, LinearPlan(frozenset({"fprop.weight"}), square_weights=square))
    assert q.codes.shape == (32, 24)
    assert (q.dequantize() - weight).abs().max() <= 0.2 * value * 4


def test_without_nvfp4_there_is_nothing_to_write(exported, tmp_path):
    with pytest.raises(ConfigError, match="has no weight in NVFP4"):
        export.main([f"run={exported['bf16']}", f"out={tmp_path / 'out'}", "format=nvfp4"])
