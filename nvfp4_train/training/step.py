"""One optimizer step: micro-batches, gradients, clipping, update. Nothing here waits for the device."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from nvfp4_train.data.batch import Batch
from nvfp4_train.distributed.processes import ALONE, Processes
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.precision import PrecisionRuntime
from nvfp4_train.training.clipping import global_norm
from nvfp4_train.training.finite import update_is_finite
from nvfp4_train.training.optimizer import apply_update
from nvfp4_train.training.state import TrainState


def train_step(
    state: TrainState,
    precision: PrecisionRuntime,
    batch: Batch,
    micro_batch_size: int,
    lr: float,
    gradient_scale: float = 1.0,
    record_health: bool = False,
    processes: Processes = ALONE,
) -> dict[str, Tensor]:
    """Take one step on `batch`, this rank's part of the global batch, at rate `lr`; returns the step's metrics as device
    scalars, the same on every rank.

    Every target counts the same, however many of them a micro-batch has: gradients are of the mean over the global
    batch. Where the detector refuses the step (not finite, or far outside what came before) the weights stay as they are,
    and it counts as skipped. `gradient_scale` is for rehearsed faults: gradients times this, the loss as it is.
    Micro-batches are numbered in the global batch, and their losses summed in that order (in fp64), so that neither their
    random bits nor the loss depend on the number of ranks.
    `record_health`: measure what quantization loses in each rank's first micro-batch.
    """
    model: HybridModel = state.model
    whole = batch.targets.new_full((), batch.targets.numel())
    targets = processes.sum(whole if batch.mask is None else batch.mask.sum())
    micro_batches = len(batch.tokens) // micro_batch_size
    precision.begin_step(state.step)
    losses = []
    for i in range(micro_batches):
        precision.begin_microbatch(processes.rank * micro_batches + i)
        part = batch.rows(i * micro_batch_size, (i + 1) * micro_batch_size)
        with precision.recording_health() if record_health and i == 0 else contextlib.nullcontext():
            with precision.forward_pass():
                nll, _ = model.loss(part.tokens, part.targets, part.seq_idx, part.mask)
            mean = nll / targets
            (mean if gradient_scale == 1.0 else mean * gradient_scale).backward()
        losses.append(nll.detach())
    loss = processes.concatenate(torch.stack(losses)).sum(dtype=torch.float64).float() / targets

    norm = global_norm(model.parameters(), processes)
    accepted = state.detector.update(loss, norm, update_is_finite(loss, norm))
    state.skips.update(accepted)
    coefficient = state.clipper.clip(model.parameters(), norm, accepted)
    apply_update(state.optimizer, lr, coefficient, accepted)
    state.optimizer.zero_grad(set_to_none=True)
    precision.prepare_weights()
    state.step += 1
    state.tokens += batch.tokens.numel() * processes.size
    return {
        "loss": loss,
        "grad_norm": norm,
        **state.clipper.metrics(),
        **state.detector.metrics(),
        "skipped": 1.0 - accepted,
        "skipped_in_a_row": state.skips.consecutive,
        **(precision.health(processes.sum) if record_health else {}),
    }
