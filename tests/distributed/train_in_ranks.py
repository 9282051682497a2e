"""A few steps of a tiny model on random tokens, in as many processes as there are; what came out goes to a file."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nvfp4_train.config.layout import layout_of, world_size
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.schema import Config
from nvfp4_train.data.batch import Batch
from nvfp4_train.distributed.processes import Processes, start
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.precision import Linear, apply_recipe
from nvfp4_train.precision.formats import weight_operands
from nvfp4_train.training.clipping import build_clipper
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.finite import SkipCounter
from nvfp4_train.training.history import History
from nvfp4_train.training.memory import compute_dtype
from nvfp4_train.training.optimizer import build_optimizer
from nvfp4_train.training.recovery import Recovery
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.step import train_step
from tests.tiny import TINY

BATCH, LENGTH, STEPS = 8, 32, 4


def tiny_config(*words: str) -> Config:
    return compose_config(
        [*TINY, "run_dir=unused", "training.micro_batch_size=2", "optimizer.lr=1e-2", *words]
    )


def train(
    cfg: Config, processes: Processes, steps: int = STEPS, order: Sequence[int] = range(BATCH)
) -> dict[str, Any]:
    """Losses, norms, bytes sent, and the initial and final weights (whole) of `steps` steps.

    `order` is that of the batch's rows: the same sums, rounded otherwise.
    """
    device = torch.device("cpu")
    sharded = None
    if processes.mesh is None:
        model = HybridModel(cfg.model, device, compute_dtype(cfg))
    else:
        from nvfp4_train.distributed.fsdp import ShardedModel

        model = HybridModel(cfg.model, "meta", compute_dtype(cfg))
        sharded = ShardedModel(model, processes, cfg, device)
    initialize_(model, cfg.training.seed)
    initial = whole(model)
    precision = apply_recipe(
        model, cfg.precision, len(cfg.model.pattern), 1, sharded.prepare_weights if sharded else None
    )
    if sharded:
        sharded.follow(precision.counters[0])
    optimizer = build_optimizer(model, cfg.optimizer)
    clipper, skips = build_clipper(cfg.clipping, device), SkipCounter(device)
    recovery = Recovery(cfg.recovery, History())
    state = TrainState(model, optimizer, clipper, SpikeDetector(cfg.recovery, device), skips, recovery, 1, "")
    tokens = torch.randint(
        0, cfg.model.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3)
    )
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, :20] = False  # ranks have different numbers of targets
    part = slice(processes.rank * BATCH // processes.size, (processes.rank + 1) * BATCH // processes.size)
    rows = torch.tensor(order)[part]
    batch = Batch(tokens[rows, :-1], tokens[rows, 1:], mask[rows])
    losses, norms = [], []
    processes.traffic.take()  # what the run before and the start sent
    for _ in range(steps):
        metrics = train_step(
            state, precision, batch, cfg.training.micro_batch_size, 1e-2, processes=processes
        )
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    sent = processes.traffic.take()
    before = whole(model)
    refused = train_step(
        state, precision, batch, cfg.training.micro_batch_size, 1e-2, math.nan, processes=processes
    )
    after = whole(model)
    return {
        "losses": losses,
        "norms": norms,
        "sent": sent,
        "initial": initial,
        "nan_changed": [name for name in before if not torch.equal(before[name], after[name])],
        "nan_skipped": refused["skipped"].item(),
        "operands_differ": operands_that_differ(model, before) if sharded else [],
    }


def operands_that_differ(model: HybridModel, weights: dict[str, Tensor]) -> list[str]:
    """Names of the linears whose gathered operands aren't those that their whole weights are quantized to."""
    names = {module: name for name, module in model.named_modules()}
    differ = []
    for layer in model.layers:
        layer.unshard()
        for linear in layer.modules():
            if isinstance(linear, Linear) and linear.fprop_weight is not None:
                fprop, dgrad, amax = weight_operands(linear.plan, weights[f"{names[linear]}.weight"])
                same = torch.equal(linear.fprop_weight, fprop) and torch.equal(linear.dgrad_weight, dgrad)
                if not same or (linear.plan.quantized and not torch.equal(linear.weight_amax, amax)):
                    differ.append(names[linear])
        layer.reshard()
    return differ


def whole(model: HybridModel) -> dict[str, Tensor]:
    """Copies of all parameters, gathered."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def main(out: str, runs: dict[str, list[str]]) -> None:
    """`runs`: {name: overrides}; writes {name: result} on rank 0."""
    processes = None
    results = {}
    for name, words in runs.items():
        cfg = tiny_config(*words)
        if processes is None:
            processes = start(torch.device("cpu"), layout_of(cfg, world_size()))
        results[name] = train(cfg, processes)
    if processes.first:
        torch.save(results, out)
    processes.stop()


if __name__ == "__main__":
    assert "RANK" in os.environ
    main(sys.argv[1], json.loads(sys.argv[2]))
