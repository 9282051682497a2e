"""The swizzled scale layout against two definitions of others: torch's own and Transformer Engine's."""

import ast
import importlib.util
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from nvfp4_kernels import quantize
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
