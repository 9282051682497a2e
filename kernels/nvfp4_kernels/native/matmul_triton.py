"""Launching the native GEMM: descriptors, and which tile shapes are tried."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from nvfp4_kernels.native.gemm_kernel import gemm_kernel
from nvfp4_kernels.native.tensor import NativeTensor
from nvfp4_kernels.swizzle import tiles_of


class Tile(NamedTuple):
    """A tile of the result, the K that one step reads, steps in flight, warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int

    def parts(self, out_dtype: torch.dtype) -> int:
        """Pieces in which the tile leaves through shared memory, 32 KiB at most each."""
        return max(1, self.m * self.n * out_dtype.itemsize // 32768)


# Tried once for each shape of a product; registers, shared and tensor memory of each: docs/results/native_gemm.md.
TILES = {
    10: (
        Tile(128, 256, 256, 4, 8),
        Tile(128, 128, 256, 6, 4),
        Tile(128, 128, 256, 5, 8),
        Tile(128, 128, 128, 8, 4),
    ),
    12: (Tile(128, 128, 128, 4, 8), Tile(128, 128, 256, 2, 8), Tile(256, 128, 128, 3, 8)),
}


def descriptors(
    a: NativeTensor, b: NativeTensor, out: torch.Tensor, tile: Tile
) -> dict[str, TensorDescriptor]:
    """The five matrices as the kernel reads and writes them, in blocks of `tile`."""
    return {
        "a": _blocks(a.codes, [tile.m, tile.k // 2]),
        "a_scales": _scale_blocks(a, tile.m, tile.k),
        "b": _blocks(b.codes, [tile.n, tile.k // 2]),
        "b_scales": _scale_blocks(b, tile.n, tile.k),
        "out": _blocks(out, [tile.m, tile.n // tile.parts(out.dtype)]),
    }


def _blocks(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def _scale_blocks(q: NativeTensor, rows: int, k: int) -> TensorDescriptor:
    down, across = tiles_of(q.shape[0], q.shape[1] // 16)
    tiles = q.scales.view(torch.uint8).view(1, down, across, 2, 256)
    return TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), [1, rows // 128, k // 64, 2, 256])


def launch(
    a: NativeTensor, b: NativeTensor, alpha: torch.Tensor, out: torch.Tensor, tile: Tile, accumulate: bool,
    programs: int, emulate: bool = False,
) -> None:  # fmt: skip
    """Run the kernel with one tile shape. `emulate`: in Triton's interpreter, in fp32."""
    (m, k), n = a.shape, b.shape[0]
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    gemm_kernel[(min(programs, tiles),)](
        **descriptors(a, b, out, tile), alpha=alpha, M=m, N=n, K=k, PROGRAMS=min(programs, tiles),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, PARTS=tile.parts(out.dtype),
        ACCUMULATE=accumulate, EMULATE=emulate, STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


_fastest: dict[tuple, Tile] = {}


def matmul(
    a: NativeTensor, b: NativeTensor, alpha: torch.Tensor, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """out = (out +) alpha * a b^T on FP4 tensor cores. The first call for a shape times every tile shape of `TILES`."""
    programs, generation = _device(out.device)
    key = (out.device, *a.shape, b.shape[0], out.dtype, accumulate)
    if key not in _fastest:
        _fastest[key] = _choose(a, b, alpha, torch.empty_like(out), TILES[generation], accumulate, programs)
    launch(a, b, alpha, out, _fastest[key], accumulate, programs)
    return out


def _choose(a, b, alpha, scratch, tiles, accumulate, programs) -> Tile:
    if torch.cuda.is_current_stream_capturing():
        return tiles[0]  # nothing can be timed inside a CUDA graph
    times = [
        triton.testing.do_bench(
            lambda tile=tile: launch(a, b, alpha, scratch, tile, accumulate, programs), warmup=5, rep=20
        )
        for tile in tiles
    ]
    return tiles[times.index(min(times))]


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, major compute capability)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major
