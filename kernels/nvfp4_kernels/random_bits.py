"""Counter-based random bits: Philox4x32-10 (Salmon et al., SC11, "Parallel random numbers: as easy as 1, 2, 3").

Nothing is drawn in sequence: the 16 bytes of a block are a function of who it is, so they do not depend
on the device, the tiling, the number of ranks or a restart.

    key     = (seed, 4 * tensor + role)
    counter = (block column, row, step, micro-batch)      block column = column / 16, global positions

Every field has 32 bits of its own, so no two blocks of a run share a counter. Element i of the block takes
byte i of the four output words in little-endian order. Known answers are in `docs/numerics.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvfp4_kernels.format import BLOCK

MASK = 0xFFFFFFFF
M0, M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
W0, W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of the key
ROLE_ROWS, ROLE_COLUMNS = 0, 1  # the row and the column draw of one tensor differ in role


@dataclass(frozen=True)
class CounterKey:
    """Names the random bits of one tensor in one micro-batch of one step.

    Each of `seed`, `step`, `microbatch`, `tensor` is an int or a 0-d integer tensor in [0, 2^32)
    (`tensor` below 2^30): as device tensors they change without a recompilation or a sync.
    `row_offset`, `col_offset` (a multiple of 16) place a shard inside the global matrix, in elements.
    """

    seed: int | torch.Tensor
    step: int | torch.Tensor
    microbatch: int | torch.Tensor
    tensor: int | torch.Tensor
    role: int = ROLE_ROWS
    row_offset: int = 0
    col_offset: int = 0

    def __post_init__(self) -> None:
        if self.col_offset % BLOCK:
            raise ValueError(f"col_offset must be a multiple of 16, not {self.col_offset}")

    def words(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [6] on `device`: key0, key1, step, microbatch, first row, first block column."""
        fields = (
            self.seed,
            self.tensor * 4 + self.role,
            self.step,
            self.microbatch,
            self.row_offset,
            self.col_offset // BLOCK,
        )
        if not any(isinstance(f, torch.Tensor) for f in fields):
            return torch.tensor(fields, dtype=torch.int64, device=device)
        return torch.stack([torch.as_tensor(f, dtype=torch.int64, device=device) for f in fields])


def philox4x32(counter: list[torch.Tensor], key: list[torch.Tensor], rounds: int = 10) -> list[torch.Tensor]:
    """Philox4x32: four counter words and two key words (int64 tensors holding uint32) -> four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = _multiply(c0, M0), _multiply(c2, M1)
        c0, c1, c2, c3 = p1[0] ^ c1 ^ k0, p1[1], p0[0] ^ c3 ^ k1, p0[1]
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return [c0, c1, c2, c3]


def _multiply(a: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32 bits of the product of two uint32, in int64 (which the full product would overflow)."""
    low, high = (a & 0xFFFF) * m, (a >> 16) * m  # each below 2^48
    total = low + ((high & 0xFFFF) << 16)  # below 2^49
    return (high >> 16) + (total >> 32), total & MASK


def block_bytes(key: CounterKey, rows: int, cols: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The random bytes of a [rows, cols] matrix: uint8-valued int64 [rows, cols] (cols % 16 == 0)."""
    w = key.words(device)
    row = (w[4] + torch.arange(rows, device=device))[:, None].expand(rows, cols // BLOCK)
    col = (w[5] + torch.arange(cols // BLOCK, device=device))[None, :].expand_as(row)
    counter = [col & MASK, row & MASK, w[2].expand_as(row), w[3].expand_as(row)]
    out = torch.stack(philox4x32(counter, [w[0], w[1]]), dim=-1)  # [rows, blocks, 4]
    shifts = torch.arange(0, 32, 8, device=device)
    return ((out[..., None] >> shifts) & 255).reshape(rows, cols)
