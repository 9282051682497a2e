"""An NVFP4 matrix as FP4 tensor cores read it: codes along K, scales swizzled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvfp4_kernels.format import BLOCK, QuantizedTensor, pack, unpack
from nvfp4_kernels.swizzle import swizzle, swizzled_bytes, unswizzle

ALIGNMENT = 16  # bytes: what the tensor memory accelerator asks of a row's stride


@dataclass(frozen=True)
class NativeTensor:
    """A matrix [rows, cols] whose products run along cols.

    `codes`  uint8 [rows, cols/2], even column in the low nibble, columns contiguous, rows 16 bytes apart or multiples of it
    `scales` float8_e4m3fn, flat, as `swizzle` lays them
    `amax`   float32 scalar tensor
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @staticmethod
    def empty(rows: int, cols: int, amax: torch.Tensor) -> NativeTensor:
        """Room for [rows, cols]; the scales' padding is zero."""
        scales = torch.zeros(swizzled_bytes(rows, cols // BLOCK), dtype=torch.uint8, device=amax.device)
        return NativeTensor(aligned_codes(rows, cols, amax.device), scales.view(torch.float8_e4m3fn), amax)

    @staticmethod
    def of(q: QuantizedTensor) -> NativeTensor:
        """The same numbers in this layout."""
        rows, cols = q.shape
        codes = aligned_codes(rows, cols, q.codes.device)
        return NativeTensor(codes.copy_(q.codes), swizzle(q.scales), q.amax)

    def plain(self, block: tuple[int, int] = (1, BLOCK)) -> QuantizedTensor:
        """Inverse of `of`."""
        rows, cols = self.shape
        return QuantizedTensor(self.codes, unswizzle(self.scales, rows, cols // BLOCK), self.amax, block)


def aligned_codes(rows: int, cols: int, device: torch.device | str) -> torch.Tensor:
    """Uninitialised codes uint8 [rows, cols/2] whose rows start at multiples of 16 bytes."""
    stride = -(-cols // 2 // ALIGNMENT) * ALIGNMENT
    return torch.empty(rows, stride, dtype=torch.uint8, device=device)[:, : cols // 2]


def transposed_square(q: QuantizedTensor) -> QuantizedTensor:
    """The transpose of a matrix in 16x16 blocks, its codes packed along the other side: the same numbers, bit for bit."""
    if q.block != (BLOCK, BLOCK):
        raise ValueError("only 16x16 blocks can be transposed; 1x16 blocks must be quantized again")
    scales = q.scales.view(torch.uint8)[::BLOCK].t().repeat_interleave(BLOCK, 0)
    codes = pack(unpack(q.codes).t().contiguous())
    return QuantizedTensor(codes, scales.contiguous().view(torch.float8_e4m3fn), q.amax, q.block)
