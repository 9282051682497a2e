"""The one decision that a step's update is sound, made on the device so that the host never waits for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def update_is_finite(
    loss: Tensor,
    grad_norm: Tensor,
    amaxes: Iterable[Tensor] = (),
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """1.0 where every value is finite, else 0.0: float32, no dimensions, on `loss`'s device.

    `loss` and `grad_norm` are scalars of any float type; `amaxes` are the quantizers' largest magnitudes
    (tensors of any shape), which pass NaN and Inf on while 4-bit codes cannot. Given a process group, all its
    ranks get the same answer: one rank's bad value stops the update of every rank.
    """
    values = [value.reshape(-1).float() for value in (loss, grad_norm, *amaxes)]
    finite = torch.cat(values).isfinite().all().float()
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    return finite


class SkipCounter:
    """Counts skipped updates, in a row and in all, in int64 scalars on the device."""

    def __init__(self, device: torch.device | str) -> None:
        self.consecutive = torch.zeros((), dtype=torch.int64, device=device)
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Take in one step's decision (`update_is_finite`)."""
        skipped = 1 - finite.long()
        self.consecutive = (self.consecutive + 1) * skipped
        self.total = self.total + skipped

    def state_dict(self) -> dict[str, Tensor]:
        """The two counters; updates replace them, so the tensors returned keep their values."""
        return {"consecutive": self.consecutive, "total": self.total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on this counter's device."""
        self.consecutive = state["consecutive"].to(self.consecutive.device, copy=True)
        self.total = state["total"].to(self.total.device, copy=True)
