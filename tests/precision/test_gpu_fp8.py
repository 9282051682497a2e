"""The native FP8 layer on Hopper: against the emulated one, compiled, recomputed, captured, and in training."""

import contextlib
import io
import sys

import pytest
import torch
from nvfp4_kernels import FP8, quantize_blocks
from nvfp4_kernels.native import fp8, self_test
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nvfp4_train import cli, pretrain
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.native_fp8 import Fp8Linear
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from nvfp4_train.training.metrics import read_metrics
from tests.fp8_bound import bound
from tests.linear_steps import captured
from tests.text import data_words
from tests.tiny import TINY

CUDA = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(fp8.problem(CUDA) is not None, reason="no block-scaled FP8 products here"),
]
PLAN = LinearPlan(frozenset(OPERANDS), format="fp8")
SHAPES = [(256, 128, 384), (144, 272, 336), (4096, 2048, 1280)]  # tokens, inputs, outputs; ragged ones too


def build(n_in=208, n_out=272, plan=PLAN, native=True):
    linear = Linear(n_in, n_out, device="cuda")
    torch.nn.init.normal_(linear.weight, std=n_in**-0.5, generator=torch.Generator("cuda").manual_seed(0))
    if native:
        linear.engine = Fp8Linear("cublas")
    linear.set_plan(plan, torch.tensor([77, 5, 0, 3], device="cuda"))
    linear.prepare_weight()
    return linear


def sample(rows, cols, seed):
    draw = torch.Generator().manual_seed(seed)
    return (
        (torch.randn(rows, cols, generator=draw) * torch.exp(torch.randn(rows, 1, generator=draw)))
        .bfloat16()
        .cuda()
    )


def run(linear, call=None, tokens=160):
    x, dy = sample(tokens, linear.in_features, 1).requires_grad_(), sample(tokens, linear.out_features, 2)
    linear.weight.grad = None
    y = (linear if call is None else call)(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


def test_the_self_test_passes():
    assert self_test.fp8_problem(CUDA) is None


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("tokens", "n_in", "n_out"), SHAPES)
def test_it_is_within_the_bound_of_14_bit_sums_of_the_emulated_layer(tokens, n_in, n_out, square):
    """The same codes, so that only the sums differ; where the result is bf16, two more roundings."""
    plan = LinearPlan(frozenset(OPERANDS), square_weights=square, format="fp8")
    linear = build(n_in, n_out, plan)
    x, dy, w = sample(tokens, n_in, 1), sample(tokens, n_out, 2), linear.weight.detach().bfloat16()
    turn = {"transpose": True}
    pairs = (
        (quantize_blocks(x, FP8), quantize_blocks(w, FP8, square)),
        (quantize_blocks(dy, FP8), quantize_blocks(w.t().contiguous(), FP8, square)),
        (quantize_blocks(dy, FP8, **turn), quantize_blocks(x, FP8, **turn)),
    )
    emulated = run(build(n_in, n_out, plan, native=False), tokens=tokens)
    for got, e, pair in zip(run(linear, tokens=tokens), emulated, pairs, strict=True):
        assert got.dtype == e.dtype
        limit = bound(*pair)
        rounding = 1.01 * (limit * 2.0**-9 + e.double().abs() * 2.0**-8) if e.dtype == torch.bfloat16 else 0.0
        assert ((got.double() - e.double()).abs() <= limit + rounding).all()
        assert (got.double() - e.double()).norm() <= 0.01 * e.double().norm()


def block(linear, x):
    return torch.relu(linear(x * 1.5)) + 1.0


def test_compiled_recomputed_and_captured_give_the_same_bits():
    linear = build()
    expected = run(linear, lambda x: block(linear, x))

    def recomputed(x):
        return checkpoint(block, linear, x, use_reentrant=False)

    calls = (lambda x: torch.compile(block, fullgraph=True)(linear, x), recomputed)
    for call in (*calls, torch.compile(recomputed, fullgraph=True)):
        for got, e in zip(run(linear, call), expected, strict=True):
            assert torch.equal(got, e)
    x, dy = sample(160, 208, 1).requires_grad_(), sample(160, 272, 2)

    def step():
        y = block(linear, x)
        return y, *torch.autograd.grad(y, (x, linear.weight), dy)

    graph, results = captured(step)
    graph.replay()
    assert all(torch.equal(got, e) for got, e in zip(results, expected, strict=True))


def test_any_number_of_tokens_can_be_predicted():
    linear, x = build(), sample(21, 208, 1)
    with torch.no_grad():
        got, whole = linear(x), linear(F.pad(x, (0, 0, 0, 11)))
    assert got.shape == (21, 272)
    torch.testing.assert_close(got, whole[:21], rtol=2**-7, atol=1e-3)  # cuBLAS may choose another kernel


def test_forward_keeps_codes_for_backward():
    linear, tokens = build(), 4096
    run(linear, tokens=tokens)
    x = sample(tokens, 208, 1).requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = linear(x)
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    assert saved <= 0.55 * x.nbytes


def test_training_goes_on_as_with_emulated_products(tmp_path, monkeypatch):
    losses = {}
    for backend, said in (("auto", "GEMM cublas"), ("emulated", "GEMM emulated")):
        run_dir, words = tmp_path / backend, [*TINY, *data_words(tmp_path), "precision=fp8", "device=cuda"]
        words += [
            f"run_dir={run_dir}",
            f"precision.backend={backend}",
            "training.max_tokens=1536",
            "model.pattern=-*--",
        ]
        monkeypatch.setattr(sys, "argv", ["pretrain", *words])
        console = io.StringIO()
        with contextlib.redirect_stdout(console):
            assert cli.exit_code(pretrain.main) == 0
        assert said in console.getvalue()
        losses[backend] = [m["loss"] for m in read_metrics(run_dir / "metrics.jsonl") if "loss" in m]
    assert len(losses["auto"]) == len(losses["emulated"]) == 6
    assert losses["auto"][-1] < losses["auto"][0]
    for got, expected in zip(losses["auto"], losses["emulated"], strict=True):
        assert got == pytest.approx(expected, rel=5e-3)
