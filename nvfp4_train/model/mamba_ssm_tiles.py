"""Tiles for mamba-ssm's kernels, instead of its choice: by default the fastest that each process measures at its start, and
in its deterministic mode the smallest. With these a run starts sooner, and all processes and launches have the same bits.

Measured on one NVIDIA H200, 2026-12-02, mamba-ssm 2.3.2.post1, PyTorch 2.11.0, Triton 3.6.0: the fastest of the package's
own for 4 sequences of 8192 tokens, 64 heads of 64, 8 groups, state 128, chunks of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

HOPPER = 9  # major number of the compute capability they were measured on

# Kernel: block sizes, warps, stages.
TILES: dict[str, tuple[dict[str, int], int, int]] = {
    "_bmm_chunk_fwd_kernel": ({"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32}, 4, 4),
    "_bmm_chunk_bwd_kernel": ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_CS": 32}, 4, 4),
    "_chunk_cumsum_fwd_kernel": ({"BLOCK_SIZE_H": 16}, 4, 3),
    "_chunk_cumsum_bwd_kernel": ({"BLOCK_SIZE_H": 32}, 4, 3),
    "_chunk_state_fwd_kernel": ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32}, 4, 4),
    "_chunk_state_bwd_db_kernel": ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128}, 4, 3),
    "_state_passing_fwd_kernel": ({"BLOCK_SIZE": 512}, 4, 3),
    "_state_passing_bwd_kernel": ({"BLOCK_SIZE": 512}, 4, 3),
    "_chunk_scan_fwd_kernel": ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, 2, 4),
    "_chunk_scan_bwd_dstates_kernel": ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32}, 4, 4),
    "_chunk_scan_bwd_dc_kernel": ({"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 64}, 4, 3),
    "_chunk_scan_bwd_dcb_kernel": ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32}, 4, 3),
    "_chunk_scan_bwd_ddAcs_stable_kernel": ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32}, 4, 3),
    "_chunk_scan_chunk_state_bwd_dx_kernel": (
        {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32},
        4,
        5,
    ),
}


def pin(modules: Iterable[ModuleType], otherwise: Callable[[list[Any]], list[Any]]) -> list[str]:
    """Leave each kernel of TILES (a `triton.runtime.Autotuner` in one of `modules`) its tile alone.

    Returns the names of those for which the package has no such tile; such a kernel keeps `otherwise(its tiles)`.
    """
    kernels = {name: kernel for module in modules for name, kernel in vars(module).items() if name in TILES}
    missing = []
    for name, tile in TILES.items():
        if name not in kernels:
            missing.append(name)
            continue
        configs = kernels[name].configs
        # The package's own object: its pre_hook zeroes what the kernel adds to.
        found = [config for config in configs if (config.kwargs, config.num_warps, config.num_stages) == tile]
        if not found:
            missing.append(name)
        kernels[name].configs = found[:1] or otherwise(configs)
    return missing
