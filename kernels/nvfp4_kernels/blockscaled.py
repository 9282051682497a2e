"""MXFP4 and blockwise FP8: elements with power-of-two block scales and no tensor scale.

A value is `element x 2^k`: E2M1 elements in blocks of 32 (OCP MX 1.0; the scale rounded up, so that nothing is clipped), or
E4M3 elements in blocks of 128 (1x128 activations and gradients, 128x128 weights; power-of-two scales as Transformer Engine's
block scaling has them by default). Both are exact in bf16, so the emulated GEMM is NVFP4's, with alpha = 1.

Backends as in `quantize.py`: `reference` here, `cpu` in C++, `triton`; the same bits from each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from nvfp4_kernels import reference
from nvfp4_kernels.cpu import ops as cpu
from nvfp4_kernels.format import E2M1_VALUES, pack, unpack
from nvfp4_kernels.hadamard import SIGNS, hadamard
from nvfp4_kernels.random_bits import CounterKey, block_bytes
from nvfp4_kernels.triton import blockscaled as gpu
from nvfp4_kernels.triton.ops import supports as gpu_supports

NOT_FINITE = 255  # the scale of a block with NaN or Inf: all of it is NaN
SIGNS32 = SIGNS + SIGNS  # H32 diag(s, s)


@dataclass(frozen=True)
class BlockFormat:
    """`block`: elements that share a scale. `round_up`, `offset`: the scale's exponent is that of the block's amax, plus one
    where the mantissa exceeds the largest element's (round_up is what then carries), minus offset; `least` is the smallest
    code, with which no operand is subnormal in bf16."""

    name: str
    block: int
    largest: float
    round_up: int
    offset: int
    least: int


MXFP4 = BlockFormat("mxfp4", 32, 6.0, 0x3FFFFF, 2, 2)  # 6 = 1.5 x 2^2
FP8 = BlockFormat("fp8", 128, 448.0, 0x1FFFFF, 8, 10)  # 448 = 1.75 x 2^8


def scale_exponents(block_amax: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """E8M0 codes, uint8, of the smallest powers of two >= amax / largest that `fmt` allows. block_amax: fp32."""
    bits = block_amax.contiguous().view(torch.int32)
    code = (((bits + fmt.round_up) >> 23) - fmt.offset).clamp(min=fmt.least)
    return torch.where(bits >= 0x7F800000, NOT_FINITE, code).to(torch.uint8)


def scale_values(exponents: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two of E8M0 codes; NaN for 255."""
    value = (exponents.int() << 23).view(torch.float32)
    return torch.where(exponents == NOT_FINITE, torch.nan, value)


@dataclass(frozen=True)
class BlockScaledTensor:
    """A matrix [rows, cols] in MXFP4 or FP8.

    `codes`  uint8 [rows, cols/2] (MXFP4, even column in the low nibble) or float8_e4m3fn [rows, cols]; None where only the
    operand was asked for. `scales` uint8, E8M0 codes, [rows / block rows, cols / block columns], rounded up (None likewise).
    `amax` is None: there is no tensor scale. Strides are free.
    """

    fmt: BlockFormat
    block: tuple[int, int]
    codes: torch.Tensor | None
    scales: torch.Tensor | None
    cached_operand: torch.Tensor | None = None
    amax: None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix."""
        if self.cached_operand is not None:
            return tuple(self.cached_operand.shape)
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.fmt is MXFP4 else 1)

    def _scale(self) -> torch.Tensor:
        """Each element's scale, fp32 [rows, cols]."""
        s = scale_values(self.scales)
        for dim, size in enumerate(self.block):
            s = s.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
        return s

    def operand(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """element * scale, exact in bf16 and fp32, [rows, cols]."""
        if self.cached_operand is not None:
            return self.cached_operand.to(dtype)
        if self.fmt is MXFP4:
            table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=self.codes.device)
            elements = table[unpack(self.codes).int()]
        else:
            elements = self.codes.float()
        return (elements * self._scale()).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix in `dtype`."""
        return self.operand(torch.float32).to(dtype)

    def rows(self, part: slice) -> BlockScaledTensor:
        """Some of the rows (whole blocks of them)."""
        height = self.block[0]
        if part.start % height:
            raise ValueError(f"rows from {part.start} on cut a block of {height} rows")
        return BlockScaledTensor(
            self.fmt,
            self.block,
            self.codes[part],
            self.scales[part.start // height : -(-part.stop // height)],
        )

    def limit(self) -> torch.Tensor:
        """The largest magnitude that each element's block can hold, fp32 [rows, cols]."""
        return self._scale() * self.fmt.largest

    def transposed(self) -> BlockScaledTensor:
        """The same numbers as [cols, rows] (square blocks only)."""
        if self.block[0] != self.block[1]:
            raise ValueError("only square blocks can be transposed; 1xN blocks must be quantized again")
        return BlockScaledTensor(self.fmt, self.block, None, None, self.operand().t())


def quantize_blocks(
    x: torch.Tensor,
    fmt: BlockFormat,
    square: bool = False,
    key: CounterKey | None = None,
    transpose: bool = False,
    rotate: bool = False,
    output: str = "codes",
    backend: str = "auto",
) -> BlockScaledTensor:
    """Quantize x, bf16 or fp32 [rows, cols], to `fmt`; ragged last blocks are shorter.

    Blocks are 1xN along rows, or NxN (`square`). `transpose` quantizes x^T, along x's rows, after the 32-point Hadamard
    transform with `rotate` (MXFP4 of bf16, rows a multiple of 32); its results keep x's memory layout. `key`: stochastic
    rounding with its bits (MXFP4). `output`: "codes", "operand" (bf16) or "operand_fp32". Raises ValueError for sizes that
    are not multiples of 16 and for combinations that do not exist.
    """
    _check(x, fmt, square, key, transpose, rotate)
    n = fmt.block
    block = (n, n) if square else (1, n)
    if backend == "auto":
        backend = "triton" if gpu_supports(x) else "cpu" if cpu.supports(x) else "reference"
    if backend == "reference":
        q = _reference(x.t() if transpose else x, fmt, block, key, rotate)
        if output == "codes":
            return q
        operand = q.operand(torch.float32 if output == "operand_fp32" else torch.bfloat16)
        return BlockScaledTensor(fmt, block, None, None, operand)
    run = {"cpu": cpu.quantize_blocks, "triton": gpu.quantize_blocks}[backend]
    if rotate and backend == "cpu":
        x = cpu.hadamard32_columns(x.contiguous(), SIGNS32)
    shape = block[::-1] if transpose else block
    out = run(x.contiguous(), fmt, shape, key, rotate, output)
    if transpose:
        out = tuple(t.t() for t in out)
    if output != "codes":
        return BlockScaledTensor(fmt, block, None, None, out[0])
    codes = out[0] if fmt is MXFP4 else out[0].view(torch.float8_e4m3fn)
    return BlockScaledTensor(fmt, block, codes, out[1])


def expand_columns(
    codes: torch.Tensor, scales: torch.Tensor, fmt: BlockFormat, dtype: torch.dtype
) -> torch.Tensor:
    """The operand [cols, rows] in `dtype` of column codes and scales as a transposed quantization returned them."""
    if cpu.supports(codes.new_empty(0, dtype=dtype)):
        return cpu.expand_blocks(codes.t(), scales.t(), fmt, dtype).t()
    if gpu_supports(codes.new_empty(0, dtype=dtype)):
        return gpu.expand_blocks(codes.t(), scales.t(), fmt).t().to(dtype)
    return BlockScaledTensor(
        fmt, (1, fmt.block), codes if fmt is MXFP4 else codes.view(torch.float8_e4m3fn), scales
    ).operand(dtype)


def _check(x, fmt: BlockFormat, square: bool, key, transpose: bool, rotate: bool) -> None:
    if x.ndim != 2:
        raise ValueError(f"expected a matrix, got shape {tuple(x.shape)}")
    for name, size, needed in (("rows", x.shape[0], transpose or square), ("columns", x.shape[1], True)):
        if needed and (size % 16 or size == 0):
            raise ValueError(
                f"{fmt.name.upper()} needs {name} in multiples of 16, got {size} (shape {tuple(x.shape)})"
            )
    if key is not None and (fmt is not MXFP4 or square):
        raise ValueError("only MXFP4 in blocks of 1x32 is rounded stochastically")
    if square and transpose:
        raise ValueError("square blocks serve both orientations as they are")
    if rotate and not (fmt is MXFP4 and transpose and x.dtype == torch.bfloat16 and x.shape[0] % 32 == 0):
        raise ValueError(
            f"the 32-point Hadamard transform takes transposed MXFP4 of bfloat16 with rows in multiples of 32, not "
            f"{fmt.name} of {x.dtype}, shape {tuple(x.shape)}"
        )


def _reference(x, fmt: BlockFormat, block: tuple[int, int], key, rotate: bool) -> BlockScaledTensor:
    x = x.contiguous()
    x = (hadamard(x, SIGNS32) if rotate else x).float()
    rows, cols = x.shape
    padded = F.pad(x.abs(), (0, -cols % block[1], 0, -rows % block[0]))
    amax = padded.unflatten(1, (-1, block[1])).amax(2).unflatten(0, (-1, block[0])).amax(1)
    scales = scale_exponents(amax, fmt)
    inverse = (((254 - scales.int()) & 255) << 23).view(torch.float32)
    for dim, size in enumerate(block):
        inverse = inverse.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
    y = x * inverse
    if fmt is FP8:
        return BlockScaledTensor(fmt, block, y.to(torch.float8_e4m3fn), scales)
    if key is None:
        codes = reference.round_nearest(y)
    else:
        codes = reference.round_stochastic(y, block_bytes(key, rows, cols, x.device))
    return BlockScaledTensor(fmt, block, pack(codes), scales)
