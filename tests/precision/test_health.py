"""Quantization health: sums against their definitions, and recording inside training."""

import pytest
import torch
from nvfp4_kernels import BLOCK, SIGNS, CounterKey, hadamard16, quantization_sums, quantize

from tests.precision.test_linear import SEED, STEP, build, run, sample


def test_sums_say_what_happened_to_the_elements():
    x = torch.zeros(2, 32).bfloat16()
    x[0, :3] = torch.tensor(
        [6.375, 0.125, -0.5]
    )  # scaled by 1 the first is clipped to 6 and the second is lost
    x[1, 16] = 2688  # its block's scale is 448 and the tensor scale 1
    q = quantize(x)
    assert q.scales.float()[0, 0] == 1
    signal, noise, elements, nonzero, underflow, saturation = quantization_sums(x, q).tolist()
    assert signal == pytest.approx(x.double().square().sum().item())
    assert noise == 0.375**2 + 0.125**2
    assert (elements, nonzero, underflow, saturation) == (64, 4, 1, 1)


def test_large_matrices_are_summed_in_parts(monkeypatch):
    x = torch.randn(48, 64).bfloat16()
    q = quantize(x, rounding="stochastic", key=CounterKey(1, 2, 3, 4))
    whole = quantization_sums(x, q)
    monkeypatch.setattr("nvfp4_kernels.health._SLICE", 5 * 64)
    torch.testing.assert_close(quantization_sums(x, q), whole, rtol=1e-6, atol=0)


def test_a_recorded_step_reports_each_gemm_of_each_layer_and_changes_nothing():
    model, runtime = build(blocks=2)
    x, dy = sample(), sample(features=48, seed=2)
    assert runtime.health() == {}
    plain = run(model.linear(1), x, dy)
    with runtime.recording_health():
        recorded = run(model.linear(1), x, dy)
    run(model.linear(0), x, dy)  # outside: not recorded
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    health = runtime.health()
    stem = "health/layers.{}.mixer.up_proj/{}/{}"
    assert all(v.isnan() for k, v in health.items() if "layers.0." in k)
    w = model.linear(1).weight.detach().bfloat16()
    keys = [CounterKey(SEED, STEP, 0, 1, role) for role in (0, 1)]
    stochastic = {"rounding": "stochastic"}
    pairs = {
        "forward": [(x, quantize(x)), (w, quantize(w, (BLOCK, BLOCK)))],
        "dgrad": [(dy, quantize(dy, key=keys[0], **stochastic)), (w, quantize(w, (BLOCK, BLOCK)))],
        "wgrad": [
            (m, quantize(m, **options))
            for m, options in (
                (hadamard16(dy.t().contiguous(), SIGNS), {"key": keys[1], **stochastic}),
                (hadamard16(x.t().contiguous(), SIGNS), {}),
            )
        ],
    }
    for gemm, operands in pairs.items():
        signal, noise, elements, nonzero, underflow, saturation = torch.stack(
            [quantization_sums(*pair) for pair in operands]
        ).unbind(1)
        expected = {
            "sqnr_db": -10 * torch.log10((noise / signal).sum()),
            "underflow": underflow.sum() / nonzero.sum(),
            "saturation": saturation.sum() / elements.sum(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(health[stem.format(1, gemm, name)], value, msg=f"{gemm} {name}")
    assert 12 < health[stem.format(1, "wgrad", "sqnr_db")] < 20
