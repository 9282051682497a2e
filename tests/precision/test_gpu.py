"""The quantized linear on a CUDA device: compiled, checkpointed, captured, without data."""

import pytest
import torch
from nvfp4_kernels import SIGNS, CounterKey, quantize
from torch.utils.checkpoint import checkpoint

from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from tests.linear_steps import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PLAN = LinearPlan(frozenset(OPERANDS))
N_IN, N_OUT, TOKENS = 128, 256, 64


ARMS = {
    "mxfp4": LinearPlan(frozenset(OPERANDS), format="mxfp4"),
    "fp8": LinearPlan(frozenset(OPERANDS), format="fp8"),
    "four_over_six": LinearPlan(frozenset(OPERANDS), four_over_six="all"),
    "ms_eden": LinearPlan(frozenset(OPERANDS), backward="ms_eden"),
}


def build(plan=PLAN, device="cuda"):
    linear = Linear(N_IN, N_OUT, device=device)
    weight = torch.randn(N_OUT, N_IN, generator=torch.Generator().manual_seed(0))
    linear.weight.data.copy_(0.1 * weight)
    linear.set_plan(plan, torch.tensor([77, 5, 0, 3], device=device))
    linear.prepare_weight()
    return linear


def sample(cols, seed):
    return torch.randn(TOKENS, cols, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def block(linear, x):
    return torch.relu(linear(x * 1.5)) + 1.0


def run(call, linear):
    x, dy = sample(N_IN, 1).requires_grad_(), sample(N_OUT, 2)
    linear.weight.grad = None
    y = call(linear, x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


def test_the_device_computes_what_the_cpu_computes():
    linear = build()
    x, dy = sample(N_IN, 1), sample(N_OUT, 2)
    y, dx, dw = run(lambda layer, x: layer(x), linear)
    w = quantize(linear.weight.detach().bfloat16().cpu(), (16, 16)).dequantize(torch.float64)
    rows = quantize(dy.cpu(), rounding="stochastic", key=CounterKey(77, 5, 0, 3)).dequantize(torch.float64)
    options = {"transpose": True, "hadamard": SIGNS}
    key = CounterKey(77, 5, 0, 3, role=1)
    columns = quantize(dy.cpu(), rounding="stochastic", key=key, **options).dequantize(torch.float64)
    exact = (
        (y, quantize(x.cpu()).dequantize(torch.float64) @ w.t()),
        (dx, rows @ w),
        (dw, columns @ quantize(x.cpu(), **options).dequantize(torch.float64).t()),
    )
    for got, expected in exact:
        tolerance = expected.abs() * 2**-8 + expected.abs().max() * 1e-5
        assert ((got.double().cpu() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("arm", ARMS)
def test_the_other_arms_compute_what_the_cpu_computes(arm):
    """Codes are the same (tests/kernels/test_gpu_arms.py): only the order of the products' sums differs."""
    results = []
    for device in ("cuda", "cpu"):
        linear = build(ARMS[arm], device)
        x, dy = sample(N_IN, 1).to(device).requires_grad_(), sample(N_OUT, 2).to(device)
        y = linear(x)
        y.backward(dy)
        results.append([t.detach().double().cpu() for t in (y, x.grad, linear.weight.grad)])
    for got, expected in zip(*results, strict=True):
        assert ((got - expected).abs() <= expected.abs() * 2**-7 + expected.abs().max() * 1e-5).all()
        assert (got - expected).norm() <= 2**-8 * expected.norm()


def test_compiled_without_graph_breaks_and_with_the_same_bits():
    linear = build()
    eager = run(block, linear)
    compiled = torch.compile(block, fullgraph=True)
    for a, b in zip(run(compiled, linear), eager, strict=True):
        assert torch.equal(a, b)
    linear.rng[1] = 6  # another step: new bits, the same code
    with torch._dynamo.config.patch(error_on_recompile=True):
        changed = run(compiled, linear)
    assert torch.equal(changed[0], eager[0])
    assert not torch.equal(changed[1], eager[1])
    assert all(torch.equal(a, b) for a, b in zip(changed, run(block, linear), strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing_draws_the_same_bits(compiled):
    linear = build()

    def recomputed(linear, x):
        return checkpoint(block, linear, x, use_reentrant=False)

    call = torch.compile(recomputed, fullgraph=True) if compiled else recomputed
    for a, b in zip(run(call, linear), run(block, linear), strict=True):
        assert torch.equal(a, b)


def test_a_captured_step_replays_with_the_counters_of_its_step():
    linear = build()
    x, dy = sample(N_IN, 1).requires_grad_(), sample(N_OUT, 2)

    def step():
        y = block(linear, x)
        return y, *torch.autograd.grad(y, (x, linear.weight), dy)

    graph, results = captured(step)
    for number in (5, 6):
        linear.rng[1] = number
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


def test_forward_keeps_at_most_three_tenths_of_bf16_for_backward():
    tokens, linear = 4096, build()
    x = torch.randn(tokens, N_IN, device="cuda").bfloat16().requires_grad_()
    linear(x).sum().backward()
    torch.cuda.synchronize()
    x.grad = linear.weight.grad = None
    before = torch.cuda.memory_allocated()
    y = linear(x)
    saved = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    assert saved <= 0.30 * x.numel() * x.element_size()
