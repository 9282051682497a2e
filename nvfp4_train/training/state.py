"""All that a run's future depends on, as one nested dict of tensors and one of JSON values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_train.data.corpora import Corpora
from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.checkpoint import Checkpoint
from nvfp4_train.errors import CheckpointError
from nvfp4_train.training.clipping import FixedClipper
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.finite import SkipCounter
from nvfp4_train.training.recovery import Recovery


class TrainState:
    """Model, optimizer, clipping, spike detection, skipped steps, recovery, random state, and how far the run is.

    The learning rate follows from the tokens and the rewinds, the batch of a step from (data set, seed, step, rewinds), the
    bits of stochastic rounding from (seed, step): of these the checkpoint holds what they follow from.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        clipper: FixedClipper,
        detector: SpikeDetector,
        skips: SkipCounter,
        recovery: Recovery,
        seed: int,
        data: Corpora,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.clipper, self.detector, self.skips, self.recovery = clipper, detector, skips, recovery
        self.seed, self.data = seed, data
        self.step = 0  # optimizer steps done
        self.tokens = 0  # tokens consumed by them
        self.precision: dict[
            str, dict[str, Tensor]
        ] = {}  # of the backend, by layer (`PrecisionRuntime.state`)
        self.unfinished: dict[str, Any] | None = None  # metrics of this step, whose validation was broken off

    def tensors(self) -> dict[str, Any]:
        """Everything that is a tensor; the model's, optimizer's and precision's are the tensors in use."""
        return {
            "model": dict(self.model.named_parameters()),
            "optimizer": self._moments(),
            "clipping": self.clipper.state_dict(),
            "detection": self.detector.state_dict(),
            "skips": self.skips.state_dict(),
            "random": {"cpu": torch.get_rng_state()},
            **({"precision": self.precision} if self.precision else {}),
        }

    def values(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "data_hash": self.data.hash,
            "data": self.data.record(self.recovery.history.batch(self.step + 1)),
            "unfinished": self.unfinished,
            "recovery": self.recovery.state(),
        }

    def restore(self, found: Checkpoint) -> None:
        """Go on where `found` was saved. Raises CheckpointError when it belongs to another model, data set or seed."""
        for name, here in {"seed": self.seed, "data_hash": self.data.hash}.items():
            if found.values.get(name) != here:
                raise CheckpointError(
                    f"{found.path} was trained with {name} {found.values.get(name)}, this run has {here}: give back the "
                    "text and the seed it was started with, or set run_dir to a new folder."
                )
        tensors = self.tensors()
        checkpoint.load(found, tensors)
        self.adopt(tensors, found.values, found.step, found.tokens)

    def adopt(self, tensors: dict[str, Any], values: dict[str, Any], step: int, tokens: int) -> None:
        """Take over what `tensors` and `values` gave at `step`; the model's and optimizer's tensors have been filled."""
        self.clipper.load_state_dict(tensors["clipping"])
        self.detector.load_state_dict(tensors["detection"])
        self.skips.load_state_dict(tensors["skips"])
        torch.set_rng_state(tensors["random"]["cpu"])
        self.step, self.tokens = step, tokens
        self.unfinished = values.get("unfinished")
        self.recovery.load_state(values["recovery"])

    def take_precision(self, tensors: dict[str, dict[str, Tensor]], found: Checkpoint | None) -> None:
        """Save what the GEMM backend carries from step to step, too; going on from `found`, fill it. Raises CheckpointError
        when `found` has none of it."""
        self.precision = tensors
        if found is not None and tensors:
            checkpoint.load(found, {"precision": tensors})

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's state by parameter name, made (zero) where no step has been taken yet."""
        out = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            out[name] = dict(state)
        return out
