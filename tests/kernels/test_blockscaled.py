"""MXFP4 and blockwise FP8: the definition, and the compiled kernels' bits against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_kernels import FP8, MXFP4, CounterKey, quantization_sums, quantize_blocks
from nvfp4_kernels.blockscaled import expand_columns
from nvfp4_kernels.cpu import ops as cpu

from tests.kernels.test_quantize import matrices

FORMATS = [MXFP4, FP8]
KEY = CounterKey(5, 2**32 - 1, 1, 9, role=1, row_offset=48, col_offset=32)


def same(got, expected):
    for field in ("codes", "scales", "cached_operand"):
        a, b = getattr(got, field), getattr(expected, field)
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.skipif(not cpu.available(), reason="no C++ compiler on this machine")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_compiled_kernels_equal_the_reference(fmt):
    @settings(max_examples=80, deadline=None, database=None)
    @given(matrices(), st.sampled_from(["codes", "operand", "operand_fp32"]), st.booleans(), st.booleans())
    def check(x, output, stochastic, large):
        x = x.repeat(3, 3) if large else x  # several blocks of 128, the last ragged
        key = KEY if stochastic and fmt is MXFP4 else None
        for options in ({"key": key}, {"key": key, "transpose": True}, {"square": True}):
            options["output"] = output
            rotate = options.get("transpose") and x.dtype == torch.bfloat16 and x.shape[0] % 32 == 0
            options["rotate"] = bool(rotate and fmt is MXFP4)
            expected = quantize_blocks(x, fmt, backend="reference", **options)
            got = quantize_blocks(x, fmt, backend="cpu", **options)
            same(got, expected)
            if output == "codes" and options.get("transpose"):
                codes = got.codes.view(torch.uint8)
                for dtype in (torch.bfloat16, torch.float32):
                    operand = expand_columns(codes, got.scales, fmt, dtype)
                    assert torch.equal(operand, expected.operand(dtype))

    check()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_scales_are_the_smallest_powers_of_two_that_clip_nothing(fmt):
    amax = torch.cat([torch.tensor([1.0, 1.5, 1.75, 6.0, 448.0]) * 2.0**k for k in range(-100, 100, 7)])
    amax = torch.cat((amax, torch.nextafter(amax, amax * 2), torch.nextafter(amax, amax * 0)))
    x = torch.zeros(len(amax), 16)
    x[:, 3] = amax
    scale = (quantize_blocks(x, fmt, backend="reference").scales[:, 0].int() - 127).double().exp2()
    assert (scale * fmt.largest >= amax).all()
    assert (scale / 2 * fmt.largest < amax).all()
    assert quantization_sums(x, quantize_blocks(x, fmt))[-1] == 0, "nothing is beyond its block's range"


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_values_on_the_grid_survive_and_errors_stay_within_half_a_step(fmt):
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[None].repeat(16, 1)[:, :112]
    x = torch.tensor([[0, 0.5, 1, -1.5, 2, -3, 4, 6] * 4] * 16) if fmt is MXFP4 else grid
    assert torch.equal(quantize_blocks(x * 2.0**-20, fmt).dequantize(), x * 2.0**-20)
    x = torch.randn(64, 288).bfloat16()
    error = (quantize_blocks(x, fmt).dequantize() - x.float()).abs()
    step = 2.0 ** (x.float().abs().log2().floor() - (1 if fmt is MXFP4 else 3))
    smallest = quantize_blocks(x, fmt).limit() / fmt.largest * (0.5 if fmt is MXFP4 else 2.0**-9)
    assert (error <= torch.maximum(step, smallest) / 2).all()


def test_orientations_agree_and_ragged_blocks_have_their_own_scales():
    x = torch.randn(144, 208).bfloat16()
    for fmt in FORMATS:
        rows = quantize_blocks(x.t().contiguous(), fmt)
        columns = quantize_blocks(x, fmt, transpose=True)
        assert torch.equal(rows.operand(), columns.operand())
        square = quantize_blocks(x, fmt, square=True)
        assert torch.equal(square.transposed().operand(), quantize_blocks(x.t(), fmt, square=True).operand())
        assert rows.scales.shape == (208, -(-144 // fmt.block))
    alone = quantize_blocks(x[128:, 128:].contiguous(), FP8, square=True)
    assert torch.equal(alone.operand(), quantize_blocks(x, FP8, square=True).operand()[128:, 128:])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_block_that_is_not_finite_is_all_nan(fmt, backend):
    if backend == "cpu" and not cpu.available():
        pytest.skip("no C++ compiler on this machine")
    for bad in (float("nan"), float("inf")):
        x = torch.randn(32, 256).bfloat16()
        x[3, 5] = bad
        operand = quantize_blocks(x, fmt, output="operand", backend=backend).operand()
        assert operand[3, : fmt.block].isnan().all()
        assert operand[3, fmt.block :].isfinite().all()
        assert operand[:3].isfinite().all()


def test_stochastic_mxfp4_is_unbiased_up_to_the_256th_of_a_step():
    x = (torch.randn(16, 32) * 2).bfloat16()
    n, total = 512, torch.zeros(16, 32, dtype=torch.float64)
    for step in range(n):
        total += quantize_blocks(x, MXFP4, key=CounterKey(3, step, 0, 0)).dequantize(torch.float64)
    scale = quantize_blocks(x, MXFP4).limit() / 6
    error = (
        total / n - x.double()
    ).abs() / scale  # the scale is rounded up: the block maximum is not clipped
    assert error.max() < 2 / 256 + 5 * 1.0 / n**0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_blocks(torch.zeros(16, 24), FP8), "FP8 needs columns in multiples of 16, got 24"),
        (lambda: quantize_blocks(torch.zeros(24, 16), MXFP4, square=True), "rows in multiples of 16, got 24"),
        (lambda: quantize_blocks(torch.zeros(16, 16), FP8, key=KEY), "only MXFP4 in blocks of 1x32"),
        (lambda: quantize_blocks(torch.zeros(16, 16), FP8, square=True, transpose=True), "as they are"),
        (
            lambda: quantize_blocks(torch.zeros(48, 16).bfloat16(), MXFP4, transpose=True, rotate=True),
            "rows in multiples of 32",
        ),
    ],
)
def test_refusals_say_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
