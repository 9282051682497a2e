"""NVFP4 by cuBLAS as far as a CPU shows it: torch's own checks of shapes, types and scale sizes, on meta tensors; and the
meaning of the arguments, with a product by the documentation in the place of torch's."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_kernels import gemm, quantize
from nvfp4_kernels.format import E2M1_VALUES, unpack
from nvfp4_kernels.native.matmul_cublas import matmul
from nvfp4_kernels.native.tensor import NativeTensor
from nvfp4_kernels.swizzle import swizzled_bytes, unswizzle
from torch.nn import functional as F

sizes = st.integers(1, 40).map(lambda n: 16 * n)


def on_meta(rows, cols):
    """A NativeTensor without data, whose codes keep their stride."""
    codes = NativeTensor.empty(rows, cols, torch.tensor(1.0)).codes
    codes = torch.empty_strided(codes.shape, codes.stride(), dtype=torch.uint8, device="meta")
    scales = torch.empty(swizzled_bytes(rows, cols // 16), dtype=torch.float8_e4m3fn, device="meta")
    return NativeTensor(codes, scales, torch.empty((), device="meta"))


def product(a, b, dtype=torch.bfloat16, accumulate=False):
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device="meta")
    return matmul(a, b, torch.empty((), device="meta"), out, accumulate)


@settings(max_examples=25)
@given(m=sizes, n=sizes, k=sizes, dtype=st.sampled_from([torch.bfloat16, torch.float32]), added=st.booleans())
def test_torchs_own_checks_take_the_arguments(m, n, k, dtype, added):
    out = product(on_meta(m, k), on_meta(n, k), dtype, added)
    assert (out.shape, out.dtype) == ((m, n), dtype)


def test_torchs_own_checks_would_tell_a_wrong_layout():
    a, b = on_meta(144, 336), on_meta(272, 336)
    plain = torch.empty(144, 21, dtype=torch.float8_e4m3fn, device="meta")
    for wrong in (
        replace(a, scales=plain),  # not padded to tiles of 128 x 4
        replace(a, scales=a.scales[:-16]),
        replace(a, scales=a.scales.view(torch.uint8)),
    ):
        with pytest.raises(RuntimeError, match="scale_a must have 6144"):
            product(wrong, b)
    with pytest.raises(RuntimeError):
        product(a, on_meta(272, 400))


def as_documented(
    a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype
):  # fmt: skip
    """F.scaled_mm of two NVFP4 operands: codes times their 1x16 scales, summed, times both tensor scales."""
    assert recipe_a == recipe_b == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    assert swizzle_a == swizzle_b == [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    left, right = (
        torch.tensor(E2M1_VALUES, dtype=torch.float64)[unpack(codes.view(torch.uint8)).long()]
        * unswizzle(scales[0], codes.shape[0], -(-codes.shape[1] // 8)).double().repeat_interleave(16, 1)
        for codes, scales in ((a, scale_a), (b.t(), scale_b))
    )
    return (left @ right.t() * scale_a[1].double() * scale_b[1].double()).to(output_dtype)


@pytest.mark.parametrize("k", [16, 208, 256])
def test_the_arguments_mean_the_emulated_product(k, monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", as_documented)
    a, b = (quantize(torch.randn(rows, k).bfloat16() * size) for rows, size in ((144, 3), (48, 0.1)))
    alpha = (a.amax / 2688) * (b.amax / 2688)
    expected = gemm(a, b, torch.float32)
    there = torch.randn(144, 48)
    for accumulate in (False, True):
        out = there.clone()
        got = matmul(NativeTensor.of(a), NativeTensor.of(b), alpha, out, accumulate)
        assert got is out  # in place
        assert torch.allclose(out, expected + there if accumulate else expected, rtol=1e-5, atol=1e-5)


def test_it_is_refused_where_it_cannot_run():
    a = quantize(torch.randn(16, 32).bfloat16())
    with pytest.raises(ValueError, match="cublas GEMM cannot run: FP4 tensor cores are in Blackwell GPUs"):
        gemm(a, a, backend="cublas")
    with pytest.raises(ValueError, match="cublas GEMM multiplies two quantized operands"):
        gemm(a, torch.randn(16, 32).bfloat16(), backend="cublas")
