"""One optimizer step: micro-batches, gradients, clipping, update. Nothing here waits for the device."""

from __future__ import annotations

from torch import Tensor

from nvfp4_train.data.batch import Batch
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
) -> dict[str, Tensor]:
    """Take one step on `batch` (the whole global batch) at rate `lr`; returns the step's metrics as device scalars.

    Every target counts the same, however many of them a micro-batch has: gradients are of the mean over the global
    batch. Where the detector refuses the step (not finite, or far outside what came before) the weights stay as they are,
    and it counts as skipped. `gradient_scale` is for rehearsed faults: gradients times this, the loss as it is.
    """
    model: HybridModel = state.model
    targets = batch.targets.numel() if batch.mask is None else batch.mask.sum()
    precision.begin_step(state.step)
    nll: Tensor | float = 0.0
    for i, start in enumerate(range(0, len(batch.tokens), micro_batch_size)):
        precision.begin_microbatch(i)
        part = batch.rows(start, start + micro_batch_size)
        part_nll, _ = model.loss(part.tokens, part.targets, part.seq_idx, part.mask)
        mean = part_nll / targets
        (mean if gradient_scale == 1.0 else mean * gradient_scale).backward()
        nll = nll + part_nll.detach()
    loss = nll / targets

    norm = global_norm(model.parameters())
    accepted = state.detector.update(loss, norm, update_is_finite(loss, norm))
    state.skips.update(accepted)
    coefficient = state.clipper.clip(model.parameters(), norm, accepted)
    apply_update(state.optimizer, lr, coefficient, accepted)
    state.optimizer.zero_grad(set_to_none=True)
    precision.prepare_weights()
    state.step += 1
    state.tokens += batch.tokens.numel()
    return {
        "loss": loss,
        "grad_norm": norm,
        **state.clipper.metrics(),
        **state.detector.metrics(),
        "skipped": 1.0 - accepted,
        "skipped_in_a_row": state.skips.consecutive,
    }
