import pytest
import torch
from nvfp4_kernels import CounterKey, gemm, quantize, tensor_scale
from nvfp4_kernels.native.tensor import NativeTensor


@pytest.mark.parametrize("k", [64, 2048])
def test_fp32_output_stays_at_accumulation_level(k):
    a, b = torch.randn(48, k).bfloat16(), torch.randn(32, k).bfloat16()
    qa, qb = quantize(a), quantize(b, (16, 16) if b.shape[0] % 16 == 0 else (1, 16))
    exact = qa.operand(torch.float64) @ qb.operand(torch.float64).t()
    magnitude = qa.operand(torch.float64).abs() @ qb.operand(torch.float64).abs().t()
    alpha = tensor_scale(qa.amax) * tensor_scale(qb.amax)
    got = gemm(qa, qb, torch.float32).double()
    # |error| <= gamma_K * sum |a||b|, gamma_K = K u / (1 - K u), plus the one product with alpha (Higham, section 3.1)
    u = 2.0**-24
    bound = (k * u / (1 - k * u) + 2 * u) * magnitude * alpha.double()
    assert ((got - exact * alpha.double()).abs() <= bound).all()


def test_bf16_output_is_within_one_ulp():
    qa, qb = quantize(torch.randn(64, 512).bfloat16()), quantize(torch.randn(32, 512).bfloat16())
    reference = gemm(qa, qb, torch.float32)
    ulp = 2.0 ** (torch.floor(torch.log2(reference.abs().clamp(min=1e-30))) - 7)
    assert ((gemm(qa, qb).float() - reference).abs() <= ulp).all()


def test_a_plain_operand_has_scale_one():
    a, q = torch.randn(16, 32).bfloat16(), quantize(torch.randn(16, 32).bfloat16())
    expected = a.double() @ q.dequantize(torch.float64).t()
    assert torch.allclose(gemm(a, q, torch.float32).double(), expected, rtol=1e-5, atol=1e-5)


def test_stochastic_operands_multiply_too():
    x = torch.randn(32, 64).bfloat16()
    q = quantize(x, rounding="stochastic", key=CounterKey(1, 2, 3, 4))
    expected = q.dequantize() @ q.dequantize().t()
    assert torch.allclose(gemm(q, q, torch.float32), expected, rtol=1e-5, atol=1e-4)


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'tensorcore'"):
        gemm(torch.zeros(16, 16), torch.zeros(16, 16), backend="tensorcore")


def test_a_product_is_added_to_what_is_there():
    a, b = quantize(torch.randn(16, 32).bfloat16()), quantize(torch.randn(32, 32).bfloat16())
    there = torch.randn(16, 32)
    expected = there + gemm(a, b, torch.float32)
    assert gemm(a, b, torch.float32, accumulate=there) is there
    assert torch.equal(there, expected)


def test_operands_in_the_native_layout_give_the_same_product():
    a, b = quantize(torch.randn(16, 48).bfloat16()), quantize(torch.randn(32, 48).bfloat16())
    assert torch.equal(gemm(NativeTensor.of(a), NativeTensor.of(b)), gemm(a, b))


@pytest.mark.parametrize("backend", ["triton", "cublas"])
def test_a_native_backend_says_why_it_cannot_run(backend):
    q = quantize(torch.randn(16, 32).bfloat16())
    with pytest.raises(ValueError, match=f"the {backend} GEMM cannot run: .*Blackwell"):
        gemm(q, q, backend=backend)
    with pytest.raises(ValueError, match="two quantized operands"):
        gemm(q, torch.zeros(16, 32).bfloat16(), backend=backend)
