"""The NVFP4 format: E2M1 elements, one E4M3 scale a block of 16, one fp32 scale a tensor.

A value is ``e2m1 * e4m3 * amax / 2688``; 2688 = 6 (largest E2M1) x 448 (largest E4M3).
The product of an E2M1 and an E4M3 number has at most 6 significant bits, so it is exact in bf16:
that product is the *operand* of an emulated GEMM, and the tensor scale is applied to the GEMM's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
TENSOR_RANGE = E2M1_MAX * E4M3_MAX  # 2688
FLT_MAX = torch.finfo(torch.float32).max

# Index = 4-bit code; bit 3 is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes, uint8 [..., n] (n even), into bytes uint8 [..., n/2]; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`: uint8 [..., n/2] -> uint8 [..., n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    """g = fp32(amax / 2688), the factor that dequantization applies last."""
    # By a tensor: on GPUs PyTorch divides by a number as a product with its reciprocal, which rounds twice.
    return amax / torch.full_like(amax, TENSOR_RANGE)


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [rows, cols] in NVFP4.

    `codes`  uint8 [rows, cols/2], even column in the low nibble (None when only the operand was asked for)
    `scales` float8_e4m3fn [rows, cols/16]; a 16x16 block's scale is repeated on its 16 rows (None likewise)
    `amax`   float32 scalar tensor; NaN or Inf when the input had any
    `block`  (1, 16) or (16, 16)
    Strides are free: column-wise codes lie with the channel dimension contiguous.
    """

    codes: torch.Tensor | None
    scales: torch.Tensor | None
    amax: torch.Tensor
    block: tuple[int, int]
    cached_operand: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix."""
        if self.cached_operand is not None:
            return tuple(self.cached_operand.shape)
        return self.codes.shape[0], self.codes.shape[1] * 2

    def operand(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """e2m1 * scale as [rows, cols] in `dtype` (bf16 or fp32; both exact)."""
        if self.cached_operand is not None:
            return self.cached_operand.to(dtype)
        from nvfp4_kernels.quantize import expand_operand

        return expand_operand(self.codes, self.scales, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """fp32(e2m1 * scale), exact, times g = fp32(amax / 2688), then one cast to `dtype`."""
        return (self.operand(torch.float32) * tensor_scale(self.amax)).to(dtype)

    def rows(self, part: slice) -> QuantizedTensor:
        """Some of the rows."""
        return QuantizedTensor(self.codes[part], self.scales[part], self.amax, self.block)

    def limit(self) -> torch.Tensor:
        """The largest magnitude that each element's block can hold, fp32 [rows, cols]."""
        return (self.scales.float() * (E2M1_MAX * tensor_scale(self.amax))).repeat_interleave(BLOCK, dim=1)

    def transposed(self) -> QuantizedTensor:
        """The same numbers as [cols, rows] (16x16 blocks only: their codes serve both orientations)."""
        if self.block != (16, 16):
            raise ValueError("only 16x16 blocks can be transposed; 1x16 blocks must be quantized again")
        return QuantizedTensor(None, None, self.amax, self.block, self.operand().t())
