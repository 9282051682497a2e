"""Decisions that all ranks take alike, over a gloo group of host values; without a group, in one process, all are free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nvfp4_train.distributed.failures import START_TIMEOUT

Result = TypeVar("Result")
Group = dist.ProcessGroup | None


def control_group() -> Group:
    """A gloo group of all ranks for host values, None in one process. A collective call."""
    return (
        dist.new_group(backend="gloo", timeout=START_TIMEOUT)
        if dist.is_initialized() and dist.get_world_size() > 1
        else None
    )


def rank_in(group: Group) -> int:
    return dist.get_rank(group) if group else 0


def size_of(group: Group) -> int:
    return dist.get_world_size(group) if group else 1


def gather(group: Group, value: Any) -> list[Any]:
    """Every rank's `value` (anything that pickles), on every rank, in their order."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(group: Group, function: Callable[[], Result]) -> Result:
    """What `function` returns on the first rank, where alone it runs; raises its exception on every rank."""
    if group is None:
        return function()
    outcome: list[Any] = [None, None]
    if rank_in(group) == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    if outcome[1] is not None:
        outcome[1].of_all_ranks = True
        raise outcome[1]
    return outcome[0]


class LaggedMax:
    """The largest of all ranks' flags, one call later: the reduction runs while the ranks go on.

    A flag that any rank raises in call n comes out of call n + 1 on every rank, so all act on it at the same step. Nothing
    waits for the device, and for another host only if that is a whole step behind. In one process a flag comes out at once.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None

    def __call__(self, flag: int) -> int:
        if self._group is None:
            return flag
        before = self._result()
        self._flag = torch.tensor(flag, dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return before

    def _result(self) -> int:
        if self._work is not None:
            self._work.wait()
        return int(self._flag)
