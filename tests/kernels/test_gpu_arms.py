"""The other arms on a CUDA device: MXFP4, FP8 (also native), four over six, MS-EDEN and the producers against the reference;
products that are added to what is there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_kernels import (
    FP8,
    MXFP4,
    SIGNS,
    CounterKey,
    amax,
    gemm,
    producers,
    quantize,
    quantize_blocks,
    quantize_four_over_six,
    tensor_scale,
)
from nvfp4_kernels.blockscaled import expand_columns
from nvfp4_kernels.ms_eden import quantize_ms_eden, rotation_signs, rotation_size
from nvfp4_kernels.native import fp8

from tests.fp8_bound import bound

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def same_bits(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    as_bytes = [t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (got, expected)]
    assert torch.equal(*as_bytes)


@st.composite
def matrices(draw):
    """Many magnitudes, zeros, negative zeros, ragged last blocks; rows a multiple of 32."""
    rows, cols = 32 * draw(st.integers(1, 9)), 16 * draw(st.integers(1, 20))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, cols, generator=g) * 2.0 ** draw(st.integers(-60, 60))
    x = x * torch.exp(draw(st.sampled_from([0.0, 1.0, 6.0])) * torch.randn(rows, 1, generator=g))
    x = torch.where(torch.rand(rows, cols, generator=g) < draw(st.sampled_from([0.0, 0.3, 1.0])), x * 0.0, x)
    return x.to(draw(st.sampled_from([torch.bfloat16, torch.float32])))


def drawn(check, *more, examples=100):
    settings(max_examples=examples, deadline=None, database=None, derandomize=True)(
        given(matrices(), *more)(check)
    )()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("fmt", [MXFP4, FP8], ids=lambda f: f.name)
def test_block_formats_are_the_references(fmt, stochastic):
    if stochastic and fmt is FP8:
        pytest.skip("FP8 is rounded to nearest")

    def check(x, output, step):
        key = CounterKey(5, step, 1, 9, role=1, row_offset=48, col_offset=32) if stochastic else None
        rotate = fmt is MXFP4 and x.dtype == torch.bfloat16
        kinds = [
            {"key": key},
            {"key": key, "transpose": True},
            {"key": key, "transpose": True, "rotate": rotate},
        ]
        for options in kinds if stochastic else [*kinds, {"square": True}]:
            expected = quantize_blocks(x, fmt, output=output, backend="reference", **options)
            got = quantize_blocks(x.to(DEVICE), fmt, output=output, backend="triton", **options)
            if output != "codes":
                same_bits(got.cached_operand, expected.cached_operand)
                continue
            same_bits(got.codes, expected.codes)
            same_bits(got.scales, expected.scales)
            if options.get("transpose"):
                operand = expand_columns(got.codes.view(torch.uint8), got.scales, fmt, torch.bfloat16)
                same_bits(operand, expected.operand())

    drawn(check, st.sampled_from(["codes", "operand", "operand_fp32"]), st.integers(0, 2**32 - 1))


def test_the_native_fp8_layout_is_the_references():
    def check(x):
        pairs = zip(
            (
                *fp8.quantize_rows_and_columns(x.to(DEVICE), True, True, "triton"),
                *fp8.quantize_square(x.to(DEVICE), "triton"),
            ),
            (*fp8.quantize_rows_and_columns(x, True, True, "portable"), *fp8.quantize_square(x, "portable")),
            strict=True,
        )
        for got, expected in pairs:
            same_bits(got.codes, expected.codes)
            same_bits(got.scales, expected.scales)

    drawn(check)


hopper = pytest.mark.skipif(
    fp8.problem(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None,
    reason="no block-scaled FP8 products here",
)
SHAPES = [(128, 128, 128), (144, 272, 336), (272, 400, 208), (4096, 384, 1280), (16, 16, 16)]


@hopper
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_native_fp8_products_are_exact_where_sums_are(m, n, k, square):
    """Small integers times powers of two: sums of a block need 11 bits, so any order and 14 bits give every bit."""
    g = torch.Generator().manual_seed(m + n + k)
    x, w = (torch.randint(-3, 4, (size, k), generator=g).float() for size in (m, n))
    x = x * 2.0 ** torch.randint(-2, 3, (m, -(-k // 128)), generator=g).repeat_interleave(128, 1)[:, :k]
    a = fp8.quantize_rows_and_columns(x.to(DEVICE), True, False)[0]
    w = w.to(DEVICE)
    b = fp8.quantize_square(w)[0] if square else fp8.quantize_rows_and_columns(w, True, False)[0]
    exact = x.double() @ w.cpu().double().t()
    same_bits(fp8.multiply(a, b, torch.float32), exact.float())
    same_bits(fp8.multiply(a, b, torch.bfloat16), exact.bfloat16())


@hopper
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_native_fp8_products_stay_within_the_bound_of_14_bit_sums(m, n, k, square):
    g = torch.Generator().manual_seed(m + n + k)
    x, w = (torch.randn(size, k, generator=g).bfloat16() for size in (m, n))
    a = fp8.quantize_rows_and_columns(x.to(DEVICE), True, False)[0]
    w = w.to(DEVICE)
    b = fp8.quantize_square(w)[0] if square else fp8.quantize_rows_and_columns(w, True, False)[0]
    emulated = fp8.multiply(a, b, torch.float32, "emulated").double()
    limit = bound(a.plain(), b.plain())
    error = (fp8.multiply(a, b, torch.float32).double() - emulated).abs()
    assert (error <= limit).all()
    assert (
        (fp8.multiply(a, b, torch.bfloat16).double() - emulated)
        .abs()
        .le(limit + emulated.abs() * 2.0**-8)
        .all()
    )


def same_quantized(got, expected):
    for field in ("codes", "scales", "amax"):
        same_bits(getattr(got, field), getattr(expected, field))


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_four_over_six_is_the_same_on_the_device(block):
    def check(x):
        value = x.abs().amax().float()
        expected = quantize_four_over_six(x, block, value)
        same_quantized(quantize_four_over_six(x.to(DEVICE), block, value.to(DEVICE)), expected)

    drawn(check)


def test_ms_eden_is_the_same_on_the_device():
    def check(x, step):
        x, key = x.bfloat16(), CounterKey(7, step, 1, 3)
        size = rotation_size(x.shape[1])
        expected = quantize_ms_eden(x, rotation_signs(key, size, x.device), key)
        there = x.to(DEVICE)
        same_quantized(quantize_ms_eden(there, rotation_signs(key, size, there.device), key), expected)

    drawn(check, st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "cols", "groups"), [(16, 528, 1), (144, 2048, 8), (2048, 5120, 1), (20, 64, 4)]
)
def test_producers(rows, cols, groups, gated):
    signs = SIGNS if rows % 16 == 0 else None
    x = (torch.randn(rows, cols) * torch.exp(torch.randn(rows, 1))).to(
        torch.float32 if gated else torch.bfloat16
    )
    gate = torch.randn(rows, cols).bfloat16() if gated else None
    weight = torch.rand(cols)
    there = [None if t is None else t.to(DEVICE) for t in (x, gate, weight)]
    y, scale, both = producers.rms_norm(*there, 1e-5, groups, signs)
    expected = producers.rms_norm(x, gate, weight, 1e-5, groups, signs)
    torch.testing.assert_close(y.cpu(), expected[0], rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(scale.cpu(), expected[1], rtol=1e-5, atol=0)
    same_bits(both, amax(y.cpu(), signs, backend="reference"))
    value = x.bfloat16()
    for got, e in zip(
        producers.squared_relu(value.to(DEVICE), signs), producers.squared_relu(value, signs), strict=True
    ):
        same_bits(got, e)


@pytest.mark.parametrize("k", [64, 2048, 20480])
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_is_added_to_what_is_there_in_fp32(k, turned):
    """fl(fl(alpha s) + c): gamma_K and two more roundings of the product, one of the sum (Higham, section 3.1)."""
    a, b = (torch.randn(size, k).bfloat16().to(DEVICE) for size in (144, 272))
    if turned:
        a = a.t().contiguous().t()
    qa, qb = quantize(a, output="operand"), quantize(b, output="operand")
    there = torch.randn(144, 272, device=DEVICE)
    alpha = (tensor_scale(qa.amax) * tensor_scale(qb.amax)).double()
    exact = there.double() + qa.operand(torch.float64) @ qb.operand(torch.float64).t() * alpha
    magnitude = qa.operand(torch.float64).abs() @ qb.operand(torch.float64).abs().t() * alpha
    out = there.clone()
    assert gemm(qa, qb, torch.float32, accumulate=out) is out
    u = 2.0**-24
    bound = (k * u / (1 - k * u) + 4 * u) * magnitude + 2 * u * there.abs()
    assert ((out.double() - exact).abs() <= bound).all()
    apart = there + gemm(qa, qb, torch.float32)
    assert ((out - apart).abs() <= 2 * bound).all()
