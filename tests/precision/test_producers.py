"""The seam between what makes a linear's input and the linear: same results with and without it."""

import pytest
import torch
from nvfp4_kernels import SIGNS, amax, producers

from nvfp4_train.config.load import compose_config
from nvfp4_train.model.hybrid import Block
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.producers import Activation, rms_norm, squared_relu
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from tests.tiny import TINY_MODEL

PLAN = LinearPlan(frozenset(OPERANDS))


def prepare(module, fused):
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=generator)
    for i, linear in enumerate(m for m in module.modules() if isinstance(m, Linear)):
        linear.set_plan(PLAN, torch.tensor([7, 1, 0, i]))
        linear.prepare_weight()
        linear.fused_producers = fused
    return module


def test_the_gated_norms_operator_where_nothing_is_measured():
    cfg = compose_config([*TINY_MODEL, "+experiment=quickstart"]).model
    results = []
    for fused, compiled in ((False, False), (True, False), (True, True)):
        block = prepare(Block("M", cfg), fused=False)
        block.mixer.norm.fused = fused
        results.append(step(block, compiled))
    assert torch.equal(results[0][0], results[1][0])
    for a, b, c in zip(*results, strict=True):
        assert (a.float() - b.float()).abs().max() <= 0.05 * a.float().abs().max()
        assert torch.equal(b, c)


def step(block, compiled=False):
    x = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    call = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    y = call(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
    return [y, x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("letter", ["M", "*", "-"])
def test_a_block_computes_the_same_whoever_measures(letter):
    cfg = compose_config([*TINY_MODEL, "+experiment=quickstart"]).model
    plain = step(prepare(Block(letter, cfg), fused=False))
    fused = step(prepare(Block(letter, cfg), fused=True))
    compiled = step(prepare(Block(letter, cfg), fused=True), compiled=True)
    assert torch.equal(plain[0], fused[0])
    for a, b, c in zip(plain, fused, compiled, strict=True):
        # Gradients take other paths through norms: equal to the rounding of bf16, of sums of stochastic codes.
        scale = a.float().abs().max()
        assert (a.float() - b.float()).abs().max() <= 0.05 * scale
        assert torch.equal(b, c)


def test_gradients_of_the_norms_are_autograds():
    linear = prepare(Linear(64, 16), fused=True)
    x, z = (torch.randn(16, 64).bfloat16().requires_grad_() for _ in range(2))
    w, dy = torch.rand(64, requires_grad=True), torch.randn(16, 64).bfloat16()
    for gate, groups in ((None, 1), (z, 4)):
        inputs = [t for t in (x, gate, w) if t is not None]
        fused = rms_norm(x, w, 1e-5, into=linear, gate=gate, groups=groups)
        plain = rms_norm(x, w, 1e-5, gate=gate, groups=groups)
        assert torch.equal(fused.value, plain)
        assert torch.equal(fused.amax, amax(plain, SIGNS))
        got, expected = (torch.autograd.grad(y, inputs, dy) for y in (fused.value, plain))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        unmeasured = rms_norm(x, w, 1e-5, gate=gate, groups=groups, fused=True)
        assert torch.equal(unmeasured, plain)
        for a, b in zip(torch.autograd.grad(unmeasured, inputs, dy), got, strict=True):
            assert torch.equal(a, b)
    fused, plain = squared_relu(x, into=linear), squared_relu(x)
    got, expected = (torch.autograd.grad(y, x, dy)[0] for y in (fused.value, plain))
    assert torch.equal(got, expected)


def test_only_what_is_needed_is_measured():
    linear = prepare(Linear(64, 16), fused=True)
    x = torch.randn(32, 64).bfloat16()
    assert torch.equal(squared_relu(x, into=linear).amax, amax(torch.relu(x).square(), SIGNS))
    with torch.no_grad():  # any number of tokens, no transform
        assert squared_relu(x[:5], into=linear).amax[1] == 0
    linear.set_plan(LinearPlan(frozenset({"fprop.weight"})), linear.rng)
    linear.fused_producers = True
    assert not isinstance(squared_relu(x, into=linear), Activation)
    assert not producers.fused(torch.device("cpu"))


@pytest.mark.parametrize(("groups", "by_kernel"), [(4, True), (8, False)])
def test_the_norms_kernel_is_left_out_where_it_would_lose_channels(groups, by_kernel, monkeypatch):
    called = []
    monkeypatch.setattr(producers.gpu, "supports", lambda x: True)
    monkeypatch.setattr(producers.gpu, "rms_norm", lambda *arguments: called.append(True))
    producers.rms_norm(torch.ones(16, 48).bfloat16(), None, torch.ones(48), 1e-5, groups, measured=False)
    assert bool(called) == by_kernel
