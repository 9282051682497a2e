"""The Triton kernels on a CUDA device: the reference's bits, no host sync, and GEMMs that round once."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_kernels import (
    SIGNS,
    CounterKey,
    amax,
    backend_report,
    expand_operand,
    gemm,
    quantize,
    quantize_rows_and_columns,
    tensor_scale,
)
from nvfp4_kernels.gemm import scale_product

from tests.kernels.test_quantize import check_stochastic_mean

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GOLDEN = np.load(Path(__file__).parents[1] / "data" / "nvfp4_te.npz")
NAMES = sorted({key.split("/")[0] for key in GOLDEN})
KINDS = {"1d": {}, "2d": {"block": (16, 16)}, "rht_col": {"transpose": True, "hadamard": SIGNS}}
FIELDS = ("codes", "scales", "amax", "cached_operand")


def same_bits(got, expected):
    assert (got is None) == (expected is None)
    if got is not None:
        got = got.cpu().contiguous()
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got.view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))


def same_quantized(got, expected):
    for field in FIELDS:
        same_bits(getattr(got, field), getattr(expected, field))


@pytest.mark.parametrize("name", NAMES)
def test_matches_transformer_engine_bit_for_bit(name):
    x = torch.from_numpy(GOLDEN[f"{name}/x"]).to(getattr(torch, name.split("_")[0])).cuda()
    for kind, options in KINDS.items():
        if f"{name}/{kind}/codes" not in GOLDEN:
            continue  # the transform takes bf16 only
        q = quantize(x, backend="triton", **options)
        for field, got in (("codes", q.codes), ("scales", q.scales.view(torch.uint8)), ("amax", q.amax)):
            expected = GOLDEN[f"{name}/{kind}/{field}"]
            np.testing.assert_array_equal(got.cpu().contiguous().numpy().reshape(expected.shape), expected)


@st.composite
def matrices(draw, dtype):
    """Matrices of many magnitudes: zeros, negative zeros, zero blocks, outliers, subnormals, grid points, ties."""
    rows = 16 * draw(st.integers(1, 4))
    # Each width is compiled for itself, and multiples of 256 need no masks.
    cols = 16 * draw(st.sampled_from([1, 5, 15, 16, 17, 23, 32, 48]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, cols, generator=g)
    if draw(st.booleans()):
        x = torch.round(x * 8) / 8  # ties, once the block's scale is a power of two
        x[:, ::16] = 6 * 2.0 ** draw(st.integers(-3, 3))
    x = x * 2.0 ** draw(st.integers(-140, 120))
    spread = draw(st.sampled_from([0.0, 1.0, 6.0, 40.0]))
    x = (x * torch.exp(spread * torch.randn(rows, 1, generator=g))).nan_to_num(0).clamp(-3e38, 3e38)
    x = torch.where(
        torch.rand(rows, cols, generator=g) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.3, 0.9, 1.0])),
        x * 0.0,
        x,
    )
    if draw(st.booleans()):
        x[: rows // 2] = 0
    return x.to(dtype)


VARIANTS = [
    (dtype, stochastic, signs, output)
    for dtype in (torch.bfloat16, torch.float32)
    for stochastic in (False, True)
    for signs in (None, SIGNS)
    for output in ("codes", "operand")
    if dtype == torch.bfloat16 or signs is None
]


@pytest.mark.parametrize(("dtype", "stochastic", "signs", "output"), VARIANTS)
def test_every_bit_is_the_references(dtype, stochastic, signs, output):
    compared = 0

    @settings(max_examples=120, deadline=None, database=None)
    @given(matrices(dtype), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.25, 1.0, 3.0]))
    def check(x, step, factor):
        nonlocal compared
        row_key = CounterKey(5, step, 1, 9, row_offset=step % 1000) if stochastic else None
        column_key = CounterKey(step, 5, 1, 9, role=1, col_offset=16 * (step % 7)) if stochastic else None
        both = amax(x, signs, backend="reference")
        on_device = amax(x.cuda(), signs)
        if not both.isfinite().all():  # sums that overflow: codes are unspecified
            assert torch.equal(on_device.isfinite().cpu(), both.isfinite())
            return
        same_bits(on_device, both)
        given_amax = [None, None] if factor == 0 else [both[0] * factor, both[1 if signs else 0] * factor]
        requests = ((given_amax[0], row_key, output), (given_amax[1], column_key, output))
        on_gpu = tuple((None if a is None else a.cuda(), *rest) for a, *rest in requests)
        expected = quantize_rows_and_columns(x, *requests, signs, backend="reference")
        got = quantize_rows_and_columns(x.cuda(), *on_gpu, signs, backend="triton")
        for a, b in zip(got, expected, strict=True):
            same_quantized(a, b)
            if output == "codes":
                same_bits(a.operand(), b.operand())
        if not (stochastic or signs):
            same_quantized(
                quantize(x.cuda(), (16, 16), output=output, backend="triton"),
                quantize(x, (16, 16), output=output, backend="reference"),
            )
        compared += bool(both[0] > 0)

    check()
    assert compared >= 84, "of which there are 12 variants: 1,000 cases that are neither zero nor overflow"


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("output", ["codes", "operand"])
def test_row_wise_takes_any_number_of_rows(rows, output):
    x = torch.randn(rows, 1040).bfloat16()
    same_quantized(quantize(x.cuda(), output=output), quantize(x, output=output, backend="reference"))
    same_bits(amax(x.cuda()), amax(x, backend="reference"))


def test_each_half_alone_equals_both_together():
    x = torch.randn(64, 2064).bfloat16()
    for transpose in (False, True):
        signs = SIGNS if transpose else None
        key = CounterKey(1, 2, 3, 4, role=int(transpose))
        for output in ("codes", "operand"):
            options = {"transpose": transpose, "hadamard": signs, "output": output}
            for extra in ({}, {"rounding": "stochastic", "key": key}):
                got = quantize(x.cuda(), backend="triton", **options, **extra)
                same_quantized(got, quantize(x, backend="reference", **options, **extra))


def test_memory_layouts_of_x_do_not_matter():
    base = torch.randn(97, 70).bfloat16()
    views = [
        base.t()[3:67, 5:85],
        base[1:65, 2:66],
        torch.randn(64 * 32 + 3).bfloat16()[3:].view(64, 32),
    ]
    for x in views:
        on_gpu = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)
        got = quantize_rows_and_columns(on_gpu, (None, None, "codes"), (None, None, "codes"), SIGNS)
        expected = quantize_rows_and_columns(
            x, (None, None, "codes"), (None, None, "codes"), SIGNS, "reference"
        )
        for a, b in zip(got, expected, strict=True):
            same_quantized(a, b)


def test_a_shard_draws_the_bits_of_its_place():
    x = torch.randn(64, 128).bfloat16().cuda()
    whole = quantize(x, rounding="stochastic", key=CounterKey(1, 2, 3, 4))
    key = CounterKey(1, 2, 3, 4, row_offset=16, col_offset=32)
    part = quantize(x[16:48, 32:96], rounding="stochastic", key=key, amax=whole.amax)
    same_bits(part.codes, whole.codes[16:48, 16:48].cpu())


def test_key_fields_in_device_memory():
    x = torch.randn(32, 64).bfloat16()
    fields = torch.tensor([2**32 - 5, 7, 2**31 + 3, 12], device="cuda")
    got = quantize(x.cuda(), rounding="stochastic", key=CounterKey(*fields))
    key = CounterKey(2**32 - 5, 7, 2**31 + 3, 12)
    same_quantized(got, quantize(x, rounding="stochastic", key=key, backend="reference"))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_amax_shows_what_conversion_hides(bad):
    for row, col in ((0, 0), (17, 5), (31, 47)):
        x = torch.randn(32, 48).bfloat16()
        x[row, col] = bad
        both = amax(x.cuda(), SIGNS).cpu()
        assert not torch.isfinite(both).any()
        assert torch.isnan(both[0]) == math.isnan(bad)
        r, c = quantize_rows_and_columns(x.cuda(), (None, None, "codes"), (None, None, "operand"), SIGNS)
        assert not torch.isfinite(torch.stack((r.amax, c.amax))).any()


def test_stochastic_mean_is_the_rules_expectation():
    check_stochastic_mean("cuda")


@pytest.mark.parametrize("k", [64, 2048, 20480])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_gemm_accumulates_in_fp32_and_rounds_once(k, layout):
    def place(t, transposed):
        return t.t().contiguous().t() if transposed else t

    a, b = torch.randn(144, k).cuda().bfloat16(), torch.randn(272, k).cuda().bfloat16()
    qa, qb = (
        quantize(place(a, layout[0] == "t"), output="operand"),
        quantize(b, (16, 16), output="operand"),
    )
    qb = qb if layout[1] == "t" else type(qb)(None, None, qb.amax, qb.block, place(qb.operand(), True))
    exact = qa.operand(torch.float64) @ qb.operand(torch.float64).t()
    magnitude = qa.operand(torch.float64).abs() @ qb.operand(torch.float64).abs().t()
    alpha = tensor_scale(qa.amax) * tensor_scale(qb.amax)
    assert torch.equal(scale_product([qa.amax, qb.amax]), alpha)
    got = gemm(qa, qb, torch.float32).double()
    u = 2.0**-24
    bound = (k * u / (1 - k * u) + 2 * u) * magnitude * alpha.double()
    assert ((got - exact * alpha.double()).abs() <= bound).all()
    ulp = 2.0 ** (torch.floor(torch.log2(got.abs().clamp(min=1e-30))) - 7)
    difference = (gemm(qa, qb).double() - got).abs()
    assert (difference <= ulp).all()
    # One rounding: but for sums that another order moves over a tie, the result is the nearest bf16.
    assert (difference > 0.502 * ulp).float().mean() < 1e-3


def test_gemm_with_a_plain_operand():
    a, q = torch.randn(16, 64).bfloat16().cuda(), quantize(torch.randn(32, 64).bfloat16().cuda())
    expected = a.double() @ q.dequantize(torch.float64).t()
    torch.testing.assert_close(gemm(a, q, torch.float32).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gemm(a, a, torch.float32).double(), a.double() @ a.double().t(), rtol=1e-5, atol=1e-5
    )


def test_nothing_waits_for_the_device():
    x = torch.randn(64, 128).bfloat16().cuda()
    fields = torch.tensor([1, 2, 3, 4], device="cuda")

    def work():
        both = amax(x, SIGNS)
        r, c = quantize_rows_and_columns(
            x,
            (both[0], CounterKey(*fields), "operand"),
            (both[1], CounterKey(*fields, role=1), "codes"),
            SIGNS,
        )
        return gemm(r, r), gemm(c, c, torch.float32)

    eager = work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    x.copy_(torch.randn_like(x))
    fields += 1
    graph.replay()
    for a, b, old in zip(captured, work(), eager, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, old)


def test_auto_says_and_takes_triton():
    assert backend_report("cuda").startswith("triton (Triton 3")
    x = torch.randn(16, 32).cuda()
    with pytest.raises(ValueError, match=r"bf16 and fp32 CUDA tensors, not torch.float64 on cuda"):
        quantize(x.double(), backend="triton")
    with pytest.raises(ValueError, match=r"columns in multiples of 16, got 24"):
        quantize(torch.zeros(16, 24).cuda())
    same_quantized(quantize(x.double()), quantize(x.double().cpu(), backend="reference"))


@pytest.mark.parametrize("transpose", [False, True])
def test_expansion_of_every_code_and_scale(transpose):
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = torch.arange(127, dtype=torch.uint8)[:, None]
    packed, scales = packed.repeat(16, 2), scales.repeat(16, 2)
    expected = expand_operand(packed, scales.view(torch.float8_e4m3fn))
    if transpose:
        packed, scales = packed.t().contiguous().t(), scales.t().contiguous().t()
    got = expand_operand(packed.cuda(), scales.cuda().view(torch.float8_e4m3fn))
    same_bits(got, expected)
