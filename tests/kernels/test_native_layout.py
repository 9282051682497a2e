"""The native GEMM's layout: its scales against two definitions of others, torch's own and Transformer Engine's."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvfp4_kernels import SIGNS, CounterKey, amax, quantize, quantize_rows_and_columns
from nvfp4_kernels.native import quantize as native
from nvfp4_kernels.native import self_test
from nvfp4_kernels.native.tensor import NativeTensor, transposed_square
from nvfp4_kernels.swizzle import swizzle, swizzled_bytes, unswizzle


def torchs_own():
    """`to_blocked` of torch.testing._internal.common_quantized, from its source: the module itself imports much more."""
    file = Path(importlib.util.find_spec("torch").origin).parent / "testing/_internal/common_quantized.py"
    wanted = {"ceil_div", "to_blocked"}
    body = [n for n in ast.parse(file.read_text()).body if getattr(n, "name", None) in wanted]
    names = {"torch": torch}
    exec(compile(ast.Module(body, []), str(file), "exec"), names)
    return names["to_blocked"]


to_blocked = torchs_own()
shapes = given(rows=st.integers(1, 400), blocks=st.integers(1, 40))


def drawn(rows, blocks):
    generator = torch.Generator().manual_seed(rows * 1000 + blocks)
    return torch.randint(0, 256, (rows, blocks), dtype=torch.uint8, generator=generator)


@shapes
def test_it_is_torchs_blocked_layout(rows, blocks):
    assert torch.equal(swizzle(drawn(rows, blocks)), to_blocked(drawn(rows, blocks)))


@shapes
def test_it_is_transformer_engines(rows, blocks):
    """view(M/128, 4, 32, K/64, 4).permute(0, 3, 2, 1, 4) of the scales padded with zeros to (128, 4)."""
    m, k = -(-rows // 128) * 128, -(-blocks // 4) * 4
    padded = torch.nn.functional.pad(drawn(rows, blocks), (0, k - blocks, 0, m - rows))
    expected = padded.view(m // 128, 4, 32, k // 4, 4).permute(0, 3, 2, 1, 4)
    assert torch.equal(swizzle(drawn(rows, blocks)), expected.flatten())


@shapes
def test_nothing_is_lost_and_the_padding_is_zero(rows, blocks):
    scales = drawn(rows, blocks)
    flat = swizzle(scales)
    assert len(flat) == swizzled_bytes(rows, blocks)
    assert torch.equal(unswizzle(flat, rows, blocks), scales)
    assert flat.int().sum() == scales.int().sum()


def test_a_transposed_square_is_the_same_numbers():
    q = quantize(torch.randn(48, 80).bfloat16(), (16, 16))
    assert torch.equal(transposed_square(q).operand(), q.operand().t())


def test_a_native_tensor_is_the_same_numbers_with_aligned_rows():
    q = quantize(torch.randn(40, 48).bfloat16())
    native = NativeTensor.of(q)
    assert native.shape == q.shape == (40, 48)
    assert native.codes.stride(0) % 16 == 0
    assert torch.equal(native.plain().operand(), q.operand())


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_native_quantizers_reference_is_the_portable_one(stochastic):
    x = torch.randn(48, 80).bfloat16()
    values = amax(x, SIGNS)
    keys = (CounterKey(1, 2, 3, 4), CounterKey(1, 2, 3, 4, role=1)) if stochastic else (None, None)
    got = native.quantize_rows_and_columns(x, (values[0], keys[0]), (values[1], keys[1]), SIGNS)
    expected = quantize_rows_and_columns(
        x, (values[0], keys[0], "codes"), (values[1], keys[1], "codes"), SIGNS
    )
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g.codes, e.codes)
        assert torch.equal(g.scales.view(torch.uint8), swizzle(e.scales).view(torch.uint8))
    rows, columns = native.quantize_square(x, values[0])
    assert torch.equal(columns.plain().operand(), rows.plain().operand().t())


def test_the_self_test_passes_what_is_right_and_tells_what_is_wrong(monkeypatch):
    cpu = torch.device("cpu")
    assert self_test.problem("emulated", cpu) is None
    assert self_test.rounding_problem(cpu, 16) is None

    right = native.quantize_square

    def swapped(x, amax):
        return right(x.flip(0), amax)

    monkeypatch.setattr(self_test.native, "quantize_square", swapped)
    assert "16x16" in self_test.problem("emulated", cpu)


def test_other_stochastic_rounding_is_told(monkeypatch):
    right = native.quantize_rows_and_columns

    def hardware(x, rows, columns, signs=None, hardware_rounding=False):
        """One byte of the thresholds comes out otherwise."""
        results = right(x, rows, columns, signs)
        if hardware_rounding and x.shape[1] == 4096:
            results[0].codes[5, 7] += 1
        return results

    monkeypatch.setattr(self_test.native, "quantize_rows_and_columns", hardware)
    told = self_test.rounding_problem(torch.device("cpu"), 16)
    assert told == "at thresholds 1 of 32768 bytes of codes differ"


def test_the_thresholds_of_stochastic_rounding_are_all_there():
    x = self_test.rounding_grid(64)
    q = quantize(x, amax=torch.tensor(2688.0))
    assert (q.scales.float() == 1).all()  # so what is rounded is x itself
    steps = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    at = (x / steps * 512).frac() == 0
    assert at.float().mean() > 0.3
    assert len(x[at].unique()) > 0.99 * 2 * 7 * 512  # of both signs
    assert (~at).float().mean() > 0.3  # the neighbours
