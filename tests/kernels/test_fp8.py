"""FP8 in the layout of Hopper's block-scaled products: a layout written out here, torch's own checks, fp64 products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_kernels import FP8, quantize_blocks
from nvfp4_kernels.native import fp8
from torch.nn import functional as F

sizes = st.integers(1, 20).map(lambda n: 16 * n)


def written_out(q, square):
    """(codes, scales) of a plain tensor in the product's layout, element by element of the scales."""
    (rows, cols), blocks = q.shape, -(-q.shape[1] // 128)
    codes = torch.zeros(rows, blocks * 128, dtype=torch.uint8)
    codes[:, :cols] = q.codes.view(torch.uint8)
    value = (q.scales.double() - 127).exp2().float()
    if not square:
        return codes, torch.stack([value[:, k] for k in range(blocks)], dim=1)
    scales = torch.zeros(-(-blocks // 4) * 4, -(-rows // 128))
    for n in range(scales.shape[1]):
        scales[:blocks, n] = value[n]
    return codes, scales


@settings(max_examples=25)
@given(rows=sizes, cols=sizes)
def test_the_layout_and_that_nothing_is_lost(rows, cols):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols)).bfloat16()
    along, across = fp8.quantize_rows_and_columns(x, True, True)
    square, turned = fp8.quantize_square(x)
    turned_x = x.t().contiguous()
    for q, source in ((along, x), (across, turned_x), (square, x), (turned, turned_x)):
        plain = quantize_blocks(source, FP8, square=q.square)
        codes, scales = written_out(plain, q.square)
        assert torch.equal(q.codes.view(torch.uint8), codes)
        assert torch.equal(q.scales, scales)
        assert q.scales.t().is_contiguous()
        padded = q.plain().operand()
        assert torch.equal(padded[:, : plain.shape[1]], plain.operand())
        assert not padded[:, plain.shape[1] :].any()
    alone, none = fp8.quantize_rows_and_columns(x, True, False)
    assert none is None
    assert torch.equal(alone.scales, along.scales)


@pytest.mark.parametrize(("m", "n", "k"), [(16, 128, 128), (144, 256, 384), (32, 640, 1280)])
@pytest.mark.parametrize("square", [True, False])
def test_torchs_own_checks_take_the_arguments(m, n, k, square):
    a = fp8.quantize_rows_and_columns(torch.randn(m, k), True, False)[0]
    b = torch.randn(n, k)
    b = fp8.quantize_square(b)[0] if square else fp8.quantize_rows_and_columns(b, True, False)[0]
    on_meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in fp8.arguments(a, b)]
    for dtype in (torch.bfloat16, torch.float32):
        out = F.scaled_mm(*on_meta, output_dtype=dtype)
        assert (out.shape, out.dtype) == ((m, n), dtype)


@pytest.mark.parametrize("square", [True, False])
def test_the_emulated_product_of_the_same_arguments(square):
    x, w = torch.randn(48, 208).bfloat16(), torch.randn(272, 208).bfloat16()
    a = fp8.quantize_rows_and_columns(x, True, False)[0]
    b = fp8.quantize_square(w)[0] if square else fp8.quantize_rows_and_columns(w, True, False)[0]
    left, right = (
        quantize_blocks(t, FP8, square=s).dequantize(torch.float64) for t, s in ((x, False), (w, square))
    )
    got = fp8.multiply(a, b, torch.float32, "emulated").double()
    magnitude = left.abs() @ right.abs().t()
    assert ((got - left @ right.t()).abs() <= 256 * 2.0**-24 * magnitude).all()


def test_a_block_that_is_not_finite_reaches_the_product():
    x = torch.randn(16, 256)
    x[3, 200] = float("inf")
    a = fp8.quantize_rows_and_columns(x, True, False)[0]
    assert a.plain().scales[3].tolist() == [a.plain().scales[3, 0], 255]
    product = fp8.multiply(a, fp8.quantize_square(torch.randn(32, 256))[0], torch.float32, "emulated")
    assert product[3].isnan().all()
    assert product[[0, 1, 2, 4]].isfinite().all()


def test_refusals_say_why():
    a, b = (
        fp8.quantize_rows_and_columns(torch.randn(16, 128), True, False)[0],
        fp8.quantize_square(torch.randn(32, 128))[0],
    )
    with pytest.raises(ValueError, match=r"cublas GEMM cannot run: .*Hopper's, not a CPU's"):
        fp8.multiply(a, b, torch.bfloat16)
    with pytest.raises(ValueError, match="left operand of an FP8 product"):
        fp8.multiply(b, b, torch.bfloat16)
    with pytest.raises(ValueError, match="FP8 needs columns in multiples of 16, got 24"):
        fp8.quantize_rows_and_columns(torch.randn(16, 24), True, False)
