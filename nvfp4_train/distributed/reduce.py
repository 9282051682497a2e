"""Gradients reduced in few bits: each rank sends every other one its share once, rounded, and sums what it gets in fp32.

A reduce-scatter that sums on its way would round again at every hop. Here each rank quantizes its gradient once, with
stochastic rounding, deals the parts out in one all-to-all, and adds the ranks' parts in fp32, in their order.

A gradient is quantized as the whole matrix that it is, and the random bits of an element follow from its place in it, so
the bytes don't depend on how many ranks they are dealt to. The formats, in bytes an element of a matrix with `columns`:

    fp32    4                   as it is
    bf16    2                   stochastic rounding with 8 random bits
    fp8     1 + 4 / columns     E4M3, stochastic rounding, one fp32 scale a row
    nvfp4   0.5625              1x16 blocks, stochastic rounding, and one fp32 amax a matrix
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from nvfp4_kernels import BLOCK, CounterKey, QuantizedTensor, quantize
from nvfp4_kernels.random_bits import block_bytes
from torch import Tensor

E4M3_MAX, E4M3_MIN_EXPONENT, E4M3_BITS = (
    448.0,
    -6,
    3,
)  # largest value, exponent of the smallest normal one, mantissa


@dataclass(frozen=True)
class Part:
    """One parameter's place in what a rank reduces: `shape` is the whole gradient's (rows padded to split evenly), sharded
    along `dim` (0 or 1); `number` names its random bits; `quantized`: whether the precision quantizes the weight."""

    name: str
    shape: tuple[int, ...]
    dim: int
    format: str
    number: int
    quantized: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def purpose(self) -> str:
        """As `traffic.py` counts it."""
        return f"gradients/{'quantized' if self.quantized else 'other'}"

    def bytes_a_rank(self, ranks: int) -> int:
        """Bytes that go to each rank."""
        n = self.numel // ranks
        if self.format == "fp8":
            return n + 4 * (self.shape[0] // (ranks if self.dim == 0 else 1))
        return {"fp32": 4 * n, "bf16": 2 * n, "nvfp4": n // 2 + n // BLOCK + 4}[self.format]


def encode(part: Part, chunks: Tensor, key: CounterKey) -> Tensor:
    """chunks: fp32 [ranks, numel / ranks], the gradient as it is dealt out -> uint8 [ranks, bytes_a_rank]."""
    if part.format == "fp32":
        return chunks.contiguous().view(torch.uint8)
    ranks = len(chunks)
    x = _join(part, chunks)
    if part.format == "bf16":
        return _deal(part, _round_to_bf16(x, key), ranks).view(torch.uint8)
    if part.format == "fp8":
        codes, scales = _round_to_e4m3(x, key)
        dealt_scales = scales.view(ranks, -1) if part.dim == 0 else scales.expand(ranks, -1)
        return torch.cat((_deal(part, codes, ranks), dealt_scales.contiguous().view(torch.uint8)), dim=1)
    q = quantize(x, (1, BLOCK), "stochastic", key=key)
    amax = q.amax.reshape(1).view(torch.uint8).expand(ranks, 4)
    return torch.cat(
        (_deal(part, q.codes, ranks), _deal(part, q.scales.view(torch.uint8), ranks), amax), dim=1
    )


def decode_sum(part: Part, received: Tensor) -> Tensor:
    """received: uint8 [ranks, bytes_a_rank], one from each rank -> their sum, fp32 [numel / ranks]."""
    ranks, n = len(received), part.numel // len(received)
    if part.format == "fp32":
        return _sum(received.contiguous().view(torch.float32))
    if part.format == "bf16":
        return _sum(received.contiguous().view(torch.bfloat16).float())
    columns = part.shape[1] // (ranks if part.dim == 1 else 1)
    if part.format == "fp8":
        values = received[:, :n].contiguous().view(torch.float8_e4m3fn).float().view(ranks, -1, columns)
        scales = received[:, n:].contiguous().view(torch.float32)
        return _sum((values * scales[..., None]).view(ranks, n))
    codes = received[:, : n // 2].reshape(-1, columns // 2)
    scales = received[:, n // 2 : n // 2 + n // BLOCK].reshape(-1, columns // BLOCK)
    amax = received[:, -4:].contiguous().view(torch.float32)
    operand = QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), amax, (1, BLOCK)).operand(
        torch.float32
    )
    return _sum(operand.view(ranks, n) * (amax / torch.full_like(amax, 2688.0)))


def _sum(values: Tensor) -> Tensor:
    """Over the ranks, in their order, whatever the sizes."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _join(part: Part, chunks: Tensor) -> Tensor:
    """The whole gradient as a matrix [rows, columns], of [ranks, n] as it is dealt out."""
    if part.dim == 0:
        return chunks.reshape(part.shape[0], -1)
    rows = part.shape[0]
    return chunks.reshape(len(chunks), rows, -1).transpose(0, 1).reshape(rows, -1)


def _deal(part: Part, x: Tensor, ranks: int) -> Tensor:
    """[rows, anything] -> [ranks, ...]: each rank's rows, or columns."""
    if part.dim == 0:
        return x.reshape(ranks, -1)
    return x.reshape(x.shape[0], ranks, -1).transpose(0, 1).reshape(ranks, -1)


def _random_bytes(x: Tensor, key: CounterKey) -> Tensor:
    """0..255 for each element of x [rows, columns]; as the quantizers draw them."""
    rows, columns = x.shape
    padded = -(-columns // BLOCK) * BLOCK
    return block_bytes(key, rows, padded, x.device)[:, :columns]


def _round_to_bf16(x: Tensor, key: CounterKey) -> Tensor:
    """Stochastic: the upper of fp32's 16 spare bits are compared with 8 random ones. Not finite values stay as they are."""
    bits = x.view(torch.int32) + (_random_bytes(x, key).int() << 8)
    rounded = (bits & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _round_to_e4m3(x: Tensor, key: CounterKey) -> tuple[Tensor, Tensor]:
    """(E4M3 codes, uint8 [rows, columns]; fp32 scales [rows]); a row with anything not finite gets a scale that isn't."""
    amax = x.abs().amax(1)
    scales = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, E4M3_MAX))
    y = (x / scales[:, None]).nan_to_num()
    exponent = torch.frexp(y)[1] - 1
    step = torch.ldexp(torch.ones_like(y), exponent.clamp(min=E4M3_MIN_EXPONENT) - E4M3_BITS)
    u = _random_bytes(x, key).float() * (1.0 / 256)
    magnitude = (torch.floor(y.abs() / step + u) * step).clamp(max=E4M3_MAX)
    return magnitude.copysign(y).to(torch.float8_e4m3fn).view(torch.uint8), scales
