"""Every byte that a rank sends, by purpose: counted where the collectives are called, and foretold for a plan.

A ring (or a direct exchange) among W ranks sends, from each rank: of an all-gather or an all-to-all W - 1 times what it puts
in (to each other rank), of a reduce-scatter (W - 1) / W of it, of an all-reduce twice that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes that this rank has sent since the last `take`, by purpose, such as "weights/nvfp4" and "gradients/fp32"."""

    sent: Counter[str] = field(default_factory=Counter)

    def all_gather(self, purpose: str, n_bytes: int, ranks: int) -> None:
        """`n_bytes` of this rank's go to every other one."""
        self.sent[purpose] += n_bytes * (ranks - 1)

    def reduce_scatter(self, purpose: str, n_bytes: int, ranks: int) -> None:
        """`n_bytes` on every rank are summed, and each keeps its share."""
        self.sent[purpose] += n_bytes * (ranks - 1) // ranks

    def all_reduce(self, purpose: str, n_bytes: int, ranks: int) -> None:
        """`n_bytes` on every rank are summed for all."""
        self.sent[purpose] += 2 * n_bytes * (ranks - 1) // ranks

    def take(self) -> dict[str, int]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, Counter()
        return dict(sent)
