"""Copies of the training state in host memory, for a rewind that needs no disk."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nvfp4_train.training.state import TrainState

Tree = dict[str, Any]  # nested dicts with tensors as leaves


@dataclass(frozen=True)
class Snapshot:
    """The state after `step`: this rank's shards in host memory."""

    step: int
    tokens: int
    tensors: Tree
    values: dict[str, Any]
    copied: torch.cuda.Event | None  # when the copies from a GPU are done


class Snapshots:
    """The newest `keep` snapshots. Taking one queues copies behind the kernels of its step; the host doesn't wait."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._snapshots: list[Snapshot] = []  # oldest first

    def take(self, state: TrainState) -> None:
        # The oldest one's memory is written over: pinned memory is slow to get.
        room = self._snapshots.pop(0).tensors if len(self._snapshots) == self._keep else {}
        tensors = _copy(state.tensors(), room)
        copied = None
        if state.detector.losses.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        values = copy.deepcopy(state.values())
        self._snapshots.append(Snapshot(state.step, state.tokens, tensors, values, copied))

    def newest(self, up_to: int) -> Snapshot | None:
        """The newest snapshot of a step no later than `up_to`."""
        return next((s for s in reversed(self._snapshots) if s.step <= up_to), None)

    def steps(self) -> list[int]:
        return [s.step for s in self._snapshots]

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of a way that the run has left."""
        self._snapshots = [s for s in self._snapshots if s.step <= step]


def restore(state: TrainState, snapshot: Snapshot) -> None:
    """Make `state` what it was at the snapshot; parameters and moments in place."""
    if snapshot.copied is not None:
        snapshot.copied.synchronize()
    tensors = state.tensors()
    _fill(tensors, snapshot.tensors)
    state.adopt(tensors, snapshot.values, snapshot.step, snapshot.tokens)


def _copy(tensors: Tree, room: Tree) -> Tree:
    out: Tree = {}
    for name, value in tensors.items():
        if isinstance(value, dict):
            out[name] = _copy(value, room.get(name, {}))
            continue
        local = _local(value)
        if name not in room:
            room[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        out[name] = room[name].copy_(local, non_blocking=True)
    return out


@torch.no_grad()
def _fill(tensors: Tree, saved: Tree) -> None:
    for name, value in tensors.items():
        if isinstance(value, dict):
            _fill(value, saved[name])
        else:
            _local(value).copy_(saved[name])


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
