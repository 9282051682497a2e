"""The block scales' layout in memory that FP4 tensor cores read: cuBLAS's "1D block scaling factors layout".

Scales [rows, blocks] are padded with zeros to multiples of (128, 4) and cut into tiles of 128 x 4. The 512 bytes of a tile
lie together, tiles of one row band side by side: row r = 32 j + i of a tile, block c, is byte 16 i + 4 j + c.
(cuBLAS documentation, "1D Block Scaling Factors Layout"; Transformer Engine, `_recover_swizzled_scales`.)

Padding must be zero, not left over: a stray NaN there would be multiplied into a real row's sum.
"""

from __future__ import annotations

import torch

TILE_ROWS, TILE_BLOCKS = 128, 4
TILE_BYTES = TILE_ROWS * TILE_BLOCKS


def tiles_of(rows: int, blocks: int) -> tuple[int, int]:
    """How many tiles cover [rows, blocks] scales, downwards and across."""
    return -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)


def swizzled_bytes(rows: int, blocks: int) -> int:
    """Bytes that the scales [rows, blocks] take in this layout, padding included."""
    down, across = tiles_of(rows, blocks)
    return down * across * TILE_BYTES


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] of a one-byte dtype -> flat [swizzled_bytes], the same dtype."""
    rows, blocks = scales.shape
    down, across = tiles_of(rows, blocks)
    padded = torch.zeros(down * TILE_ROWS, across * TILE_BLOCKS, dtype=torch.uint8, device=scales.device)
    padded[:rows, :blocks] = scales.view(torch.uint8)
    tiles = padded.view(down, 4, 32, across, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def unswizzle(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Inverse of `swizzle`: flat [swizzled_bytes] -> [rows, blocks]."""
    down, across = tiles_of(rows, blocks)
    tiles = flat.view(torch.uint8).view(down, across, 32, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    padded = tiles.reshape(down * TILE_ROWS, across * TILE_BLOCKS)
    return padded[:rows, :blocks].contiguous().view(flat.dtype)
