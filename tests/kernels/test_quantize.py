import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_kernels import (
    SIGNS,
    CounterKey,
    amax,
    hadamard16,
    quantize,
    quantize_rows_and_columns,
    reference,
    tensor_scale,
)
from nvfp4_kernels.cpu import ops as cpu
from nvfp4_kernels.format import E2M1_VALUES, pack, unpack

needs_compiler = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler on this machine")
KEY = CounterKey(seed=11, step=3, microbatch=1, tensor=2)


def same_bits(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        )


def same_quantized(a, b):
    """Equal bits; where the transform overflowed, amax says so on both sides and codes are unspecified."""
    assert torch.isfinite(a.amax) == torch.isfinite(b.amax)
    if torch.isfinite(a.amax):
        for field in ("codes", "scales", "amax", "cached_operand"):
            same_bits(getattr(a, field), getattr(b, field))


@st.composite
def matrices(draw):
    """Matrices of many magnitudes: zeros, negative zeros, zero blocks, outliers, subnormals."""
    rows, cols = 16 * draw(st.integers(1, 6)), 16 * draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, cols, generator=g) * 2.0 ** draw(st.integers(-140, 120))
    spread = draw(st.sampled_from([0.0, 1.0, 6.0]))
    x = (x * torch.exp(spread * torch.randn(rows, 1, generator=g))).clamp(-3e38, 3e38)
    x = torch.where(torch.rand(rows, cols, generator=g) < draw(st.sampled_from([0.0, 0.3, 1.0])), x * 0.0, x)
    if draw(st.booleans()):
        x[: rows // 2] = 0
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(
    matrices(), st.booleans(), st.booleans(), st.sampled_from(["codes", "operand"]), st.integers(0, 2**32 - 1)
)
def test_cpu_kernels_equal_the_reference(x, stochastic, transform, output, step):
    signs = SIGNS if transform and x.dtype == torch.bfloat16 else None
    row_key = CounterKey(5, step, 1, 9, row_offset=step % 1000) if stochastic else None
    column_key = CounterKey(5, step, 1, 9, role=1, col_offset=16 * (step % 7)) if stochastic else None
    rows, columns = (None, row_key, output), (None, column_key, output)
    expected = quantize_rows_and_columns(x, rows, columns, signs, backend="reference")
    got = quantize_rows_and_columns(x, rows, columns, signs, backend="cpu")
    for a, b in zip(expected, got, strict=True):
        same_quantized(a, b)
    same_quantized(
        quantize(x, (16, 16), output=output, backend="reference"),
        quantize(x, (16, 16), output=output, backend="cpu"),
    )
    expected, got = amax(x, signs, backend="reference"), amax(x, signs, backend="cpu")
    assert torch.equal(torch.isfinite(expected), torch.isfinite(got))
    same_bits(expected[torch.isfinite(expected)], got[torch.isfinite(got)])


@needs_compiler
def test_overflow_in_the_transform_of_finite_values_shows_in_amax():
    x = torch.full((16, 16), 3e38).bfloat16()
    assert torch.isfinite(amax(x, backend="cpu")).all()
    for backend in ("reference", "cpu"):
        assert torch.isfinite(amax(x, SIGNS, backend=backend)).tolist() == [True, False]


@needs_compiler
def test_compiled_operand_equals_expanded_codes():
    x = torch.randn(64, 48).bfloat16()
    codes = quantize(x, transpose=True, hadamard=SIGNS, backend="cpu")
    operand = quantize(x, transpose=True, hadamard=SIGNS, backend="cpu", output="operand")
    values = torch.tensor(E2M1_VALUES)[unpack(codes.codes.contiguous()).int()]
    expected = values * codes.scales.float().repeat_interleave(16, dim=1)
    same_bits(codes.operand(), operand.operand())
    assert torch.equal(operand.operand(torch.float32), expected)
    assert operand.operand().t().is_contiguous(), "column operands lie with channels contiguous"


def test_operand_is_exact_in_bf16():
    products = (
        torch.tensor(E2M1_VALUES)[:, None]
        * torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    )
    assert torch.equal(products.bfloat16().float(), products)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_amax_shows_what_conversion_hides(bad, backend):
    if backend == "cpu" and not cpu.available():
        pytest.skip("no C++ compiler on this machine")
    x = torch.randn(32, 32).bfloat16()
    x[17, 5] = bad
    both = amax(x, SIGNS, backend=backend)
    assert not torch.isfinite(both).any()
    r, c = quantize_rows_and_columns(x, (None, None, "codes"), (None, None, "codes"), SIGNS, backend)
    assert not torch.isfinite(torch.stack((r.amax, c.amax))).any()


def test_rounding_to_nearest_takes_the_even_code_on_ties():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.tensor(E2M1_VALUES)[reference.round_nearest(ties).int()]
    assert values.tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_sign_of_zero():
    y = torch.tensor([-0.0, 0.0, -0.1, 0.1])
    assert reference.round_nearest(y).tolist() == [0, 0, 8, 0]


@settings(max_examples=60, deadline=None)
@given(st.floats(-6, 6, width=32))
def test_stochastic_rounding_hits_a_neighbour_with_the_rules_mean(value):
    y = torch.full((256,), value)
    q = torch.tensor(E2M1_VALUES)[reference.round_stochastic(y, torch.arange(256)).int()]
    grid = torch.tensor(sorted(set(E2M1_VALUES)))
    below, above = grid[grid <= value + 1e-9].max(), grid[grid >= value - 1e-9].min()
    assert set(q.tolist()) <= {below.item(), above.item()}
    # All 256 bytes once: the mean is the rule's exact expectation, at most step/256 from the input.
    assert abs(q.mean().item() - value) <= (above - below).item() / 256 + 1e-6


def check_stochastic_mean(device):
    """Of 4,096 draws: within 5 standard errors of the rule's exact expectation, itself within step/256 of the input."""
    x = (torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1).bfloat16()
    n, on_device, g = 4096, x.to(device), amax(x)[0]
    step = torch.zeros((), dtype=torch.int64, device=device)
    total, squares = torch.zeros(2, 16, 64, dtype=torch.float64, device=device)
    for _ in range(n):
        q = quantize(on_device, rounding="stochastic", key=CounterKey(3, step, 0, 0), amax=g.to(device))
        value = q.dequantize(torch.float64)
        total += value
        squares += value * value
        step += 1
    scales = quantize(x, backend="reference").scales
    y = reference.scale_elements(x.float(), scales, g)
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    codes = [reference.round_stochastic(y, torch.full_like(y, b, dtype=torch.int64)) for b in range(256)]
    unit = scales.double().repeat_interleave(16, 1) * tensor_scale(g).double()
    expectation = grid[torch.stack(codes).int()].mean(0)
    mean = (total / n).cpu() / unit
    error = ((squares.cpu() / n / unit**2 - mean**2).clamp(min=0) / n).sqrt()
    assert ((mean - expectation).abs() <= 5 * error + 1e-6).all()
    exact = x.double() / unit
    inside = exact.abs() <= 6  # beyond, a block's maximum is cut: a known bias (docs/numerics.md)
    steps = torch.where(exact.abs() < 2, 0.5, torch.where(exact.abs() < 4, 1.0, 2.0))
    assert ((expectation - exact).abs() <= steps / 256 + 1e-6)[inside].all()
    drawn = error > 1e-6
    worst = ((mean - expectation).abs() / error)[drawn].max()
    print(f"{drawn.sum()} elements drawn, worst mean {worst:.2f} standard errors off; {inside.sum()} inside")


def test_stochastic_mean_is_the_rules_expectation():
    check_stochastic_mean("cpu")


def test_dequantize_is_close_and_square_blocks_transpose_exactly():
    x = torch.randn(64, 96).bfloat16()
    q = quantize(x, (16, 16))
    relative = (q.dequantize() - x.float()).square().mean() / x.float().square().mean()
    assert 0.010 < relative < 0.015  # nvfp4.md: 0.0124 for N(0, 1)
    assert torch.equal(q.transposed().operand(), q.operand().t())
    assert quantize(x.t().contiguous(), (16, 16)).codes.shape == (96, 32)
    assert torch.equal(quantize(x.t().contiguous(), (16, 16)).operand(), q.operand().t())
    with pytest.raises(ValueError, match="1x16 blocks must be quantized again"):
        quantize(x).transposed()


def test_hadamard_is_orthogonal_and_refuses_other_dtypes():
    eye = torch.eye(16).bfloat16()
    h = hadamard16(eye).float()
    assert torch.equal(h @ h.t(), torch.eye(16))
    with pytest.raises(ValueError, match=r"bfloat16, not torch.float32"):
        hadamard16(torch.eye(16))


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda v: len(v) % 2 == 0))
def test_pack_round_trip(codes):
    t = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(unpack(pack(t)), t)
    assert pack(t)[0] == codes[0] | codes[1] << 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.zeros(16, 24)), r"columns in multiples of 16, got 24"),
        (lambda: quantize(torch.zeros(24, 16), (16, 16)), r"rows in multiples of 16, got 24"),
        (lambda: quantize(torch.zeros(24, 16), transpose=True), r"rows in multiples of 16, got 24"),
        (lambda: quantize(torch.zeros(16)), "expected a matrix"),
        (lambda: quantize(torch.zeros(16, 16), rounding="stochastic"), "needs a CounterKey"),
        (lambda: quantize(torch.zeros(16, 16), key=KEY), "nearest rounding takes none"),
        (lambda: quantize(torch.zeros(16, 16), (1, 32)), r"not \(1, 32\)"),
        (lambda: quantize(torch.zeros(16, 16), hadamard=SIGNS), "transposed"),
        (lambda: quantize(torch.zeros(16, 16), backend="tpu"), "unknown quantize backend 'tpu'"),
        (lambda: quantize(torch.zeros(16, 16, dtype=torch.float64), backend="cpu"), "cannot run"),
    ],
)
def test_refusals_say_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_need_not_be_a_multiple_of_16_row_wise():
    x = torch.randn(5, 32).bfloat16()
    assert quantize(x).codes.shape == (5, 16)
    same_quantized(quantize(x, backend="reference"), quantize(x))


@needs_compiler
def test_loading_the_kernels_does_not_turn_subnormals_off():
    quantize(torch.randn(16, 16))
    assert (torch.tensor([1e-40]) * torch.tensor([0.5])).item() > 0
