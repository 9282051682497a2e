"""Transformer Engine's own Python reference against ours: quantization bit by bit, and a layer's three GEMMs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_kernels import SIGNS, quantize
from nvfp4_kernels.swizzle import swizzle

from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from tests.precision import te_wheel

pytestmark = te_wheel.needs_wheel


@pytest.fixture(scope="module")
def te():
    return te_wheel.reference()


def quantizer(te, square=False, rotate=False):
    shape = (16, 16) if square else (1, 16)
    return te.NVFP4QuantizerRef(te.reference_utils.Fp4Formats.E2M1, quant_tile_shape=shape, with_rht=rotate)


def drawn(rows, cols, seed):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, cols, generator=draw) * torch.exp(torch.randn(rows, 1, generator=draw))
    ).bfloat16()


def same(ours, codes, scales, amax):
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.scales.view(torch.uint8), scales.contiguous().view(torch.uint8))
    assert ours.amax == amax


@settings(max_examples=15)
@given(rows=st.integers(1, 6), cols=st.integers(1, 6), seed=st.integers(0, 9))
def test_codes_scales_and_amax_are_theirs(te, rows, cols, seed):
    x = drawn(16 * rows, 16 * cols, seed)
    q = quantizer(te, rotate=True).quantize(x)
    same(quantize(x), q.data, q.scale, q.global_amax_row)
    same(quantize(x, transpose=True, hadamard=SIGNS), q.data_t, q.scale_t, q.global_amax_col)
    q = quantizer(te, square=True).quantize(x)
    same(quantize(x, (16, 16)), q.data, q.scale, q.global_amax_row)


@settings(max_examples=15)
@given(rows=st.integers(1, 300), blocks=st.integers(1, 20))
def test_they_read_our_swizzled_scales(te, rows, blocks):
    scales = torch.arange(rows * blocks).remainder(251).to(torch.uint8).view(rows, blocks)
    read = te.NVFP4QuantizerRef._recover_swizzled_scales(True, swizzle(scales), rows, 16 * blocks, 16)
    assert torch.equal(read, scales)


def test_the_three_products_of_a_layer_are_theirs(te):
    tokens, n_in, n_out = 64, 96, 128
    linear = Linear(n_in, n_out)
    linear.weight.data = drawn(n_out, n_in, 0).float() / 10
    linear.set_plan(LinearPlan(frozenset(OPERANDS), stochastic_gradients=False), torch.tensor([1, 2, 3, 4]))
    linear.prepare_weight()
    x, dy = drawn(tokens, n_in, 1).requires_grad_(), drawn(tokens, n_out, 2)
    y = linear(x)
    y.backward(dy)

    qx, qdy = (quantizer(te, rotate=True).quantize(t) for t in (x.detach(), dy))
    qw = quantizer(te, square=True).quantize(linear.weight.detach().bfloat16())

    def product(a, b, scale_a, scale_b, kind, left, right):
        return quantizer(te).qgemm(
            a, b, None, torch.float32, scale_a, scale_b, gemm_type=te.gemm.GEMMType[kind], qresult_x=left, qresult_w=right
        )  # fmt: skip

    theirs = (
        (y, product(qx.data, qw.data, qx.scale, qw.scale, "FPROP", qx, qw), 2**-8),
        (x.grad, product(qdy.data, qw.data_t, qdy.scale, qw.scale_t, "DGRAD", qdy, qw), 2**-8),
        (linear.weight.grad, product(qdy.data_t, qx.data_t, qdy.scale_t, qx.scale_t, "WGRAD", qdy, qx), 1e-6),
    )
    for ours, expected, tolerance in theirs:  # bf16 results round once, fp32 ones differ by the order of sums
        assert (
            (ours.float() - expected).abs() <= tolerance * expected.abs() + 1e-6 * expected.abs().max()
        ).all()
