"""Faults on purpose (`faults=[{kind:...,step:...}]`), to rehearse what recovery does about them.

Each strikes at a chosen step the first time that the run comes by (a rewind to before it ends it), or with `repeat` every
time; a fault of the data belongs to its batch, so a run that steps over the batch steps over the fault.

    repeated_tokens, random_tokens   the batch is one token over and over, or noise
    gradient, nan                    gradients x `factor`, or NaN (on one rank), with the loss as it is
    bit_flip                         one bit of one weight, for good
    lr                               the learning rate x `factor`
    read_error                       the batch can't be read, the first `steps` times that it is tried
    stuck                            one rank stops for ever
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nvfp4_train.config.schema import FaultConfig
from nvfp4_train.data.batch import Batch
from nvfp4_train.errors import ConfigError
from nvfp4_train.training.history import History

DATA_KINDS = ("repeated_tokens", "random_tokens", "read_error")


class Faults:
    """The configured faults as rank `rank` meets them. Steps are counted from 1, batches from 0."""

    def __init__(self, faults: Sequence[FaultConfig], rank: int = 0, vocab_size: int = 0) -> None:
        self._faults, self._rank, self._vocab_size = list(faults), rank, vocab_size
        self._read_errors: dict[int, int] = {}

    def check(self, ranks: int, steps: int, model: nn.Module) -> None:
        """Raise ConfigError for a fault that would never strike: on no such rank, after the last step, of no such weight."""
        for i, fault in enumerate(self._faults):
            if fault.rank is not None and fault.rank >= ranks:
                raise ConfigError(
                    f"faults[{i}].rank={fault.rank} is not one of the {ranks} ranks: choose 0 to {ranks - 1}."
                )
            if fault.step > steps:
                raise ConfigError(
                    f"faults[{i}].step={fault.step} comes after the run's last step, {steps}: choose another."
                )
            names = [name for name, _ in model.named_parameters()]
            if fault.kind == "bit_flip" and not any(fnmatchcase(name, fault.tensor) for name in names):
                raise ConfigError(
                    f"faults[{i}].tensor={fault.tensor!r} is the name of no weight: choose a pattern for names such as "
                    f"{names[-1]}."
                )

    def lr_factor(self, step: int, history: History) -> float:
        """What the learning rate of `step` is multiplied with."""
        return math.prod(f.factor for f in self._at(step, history, "lr"))

    def gradient_scale(self, step: int, history: History) -> float:
        """What the gradients of `step` are multiplied with on this rank."""
        scale = math.prod(f.factor for f in self._at(step, history, "gradient"))
        return math.nan if self._at(step, history, "nan") else scale

    def before_step(self, step: int, history: History, model: nn.Module) -> None:
        """Flip bits of weights; or never return."""
        for fault in self._at(step, history, "bit_flip"):
            if step == fault.step:
                flip_bit(model, fault.tensor, fault.bit)
        if self._at(step, history, "stuck"):
            threading.Event().wait()

    def check_readable(self, batch: int) -> None:
        """Raise OSError where the read of a batch is to fail."""
        for fault in self._of("read_error"):
            if batch == fault.step - 1:
                tries = self._read_errors[batch] = self._read_errors.get(batch, 0) + 1
                if tries <= fault.steps:
                    raise OSError(5, "Input/output error (rehearsed)")

    def poison(self, number: int, first_sequence: int, batch: Batch) -> Batch:
        """The batch as it is trained on; `first_sequence`: the number of its first sequence in the global batch."""
        for fault in self._of("repeated_tokens", "random_tokens"):
            if fault.step - 1 <= number < fault.step - 1 + fault.steps:
                rows, length = batch.tokens.shape
                if fault.kind == "repeated_tokens":
                    text = torch.full((rows, length + 1), self._vocab_size // 2)
                else:
                    text = torch.stack(
                        [self._noise(number, first_sequence + row, length + 1) for row in range(rows)]
                    )
                batch = replace(batch, tokens=text[:, :-1].contiguous(), targets=text[:, 1:].contiguous())
        return batch

    def _noise(self, number: int, sequence: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number << 20 | sequence)
        return torch.randint(self._vocab_size, (length,), generator=generator)

    def _of(self, *kinds: str) -> list[FaultConfig]:
        return [f for f in self._faults if f.kind in kinds]

    def _at(self, step: int, history: History, kind: str) -> list[FaultConfig]:
        return [
            f
            for f in self._of(kind)
            if f.step <= step < f.step + f.steps
            and self._rank == _rank_of(f, self._rank)
            and (f.repeat or not history.came_by(f.step))
        ]


def flip_bit(model: nn.Module, pattern: str, bit: int) -> None:
    """Flip a bit of the first weight of the first parameter whose name matches; of a shard, of this rank's first."""
    parameter = next(p for name, p in model.named_parameters() if fnmatchcase(name, pattern))
    local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
    if local.numel():
        mask = 1 << bit if bit < 31 else -(1 << 31)
        local.view(torch.int32).view(-1)[0] ^= mask


def _rank_of(fault: FaultConfig, here: int) -> int:
    """The rank that the fault strikes; where none is named, rank 0 or every one, as suits its kind."""
    if fault.rank is not None:
        return fault.rank
    return 0 if fault.kind in ("nan", "bit_flip", "stuck") else here
