"""Gradient clipping by the global norm, with a fixed threshold or one that adapts (docs/recipes.md).

Norms, thresholds and counters are scalars on the device, where all decisions are taken: the host reads them
only when it logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from nvfp4_train.config.checks import check_clipping
from nvfp4_train.config.schema import ClippingConfig
from nvfp4_train.errors import CheckpointError


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together: a float32 scalar on their device. No gradient counts as 0.

    Non-finite gradients give a non-finite norm, and so does a sum of squares beyond float32.
    """
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class FixedClipper:
    """Clips the global norm to `clipping.baseline`, and watches how the norms sit below it."""

    _STATE = ("threshold", "clipped_in_a_row", "average_norm", "accepted_steps", "off_target_steps")

    def __init__(self, cfg: ClippingConfig, device: torch.device | str) -> None:
        self.cfg = cfg
        self.threshold = torch.tensor(
            cfg.baseline * self._initial_ratio(), dtype=torch.float32, device=device
        )
        self.clipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.average_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.accepted_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.off_target_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._metrics: dict[str, Tensor] = {}
        self._warned = False

    @torch.no_grad()
    def update(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Take in one step's gradient norm; returns the factor for its gradients, min(1, threshold / norm).

        `norm`, `finite` (0 or 1) and the result are float32 scalars on the clipper's device. A step that is
        not finite changes no state, and its factor is 1.
        """
        accepted = finite.bool()
        clipped = norm > self.threshold
        coefficient = (self.threshold / norm).clamp(max=1.0)

        steps = self.accepted_steps + 1
        # The mean of all norms until there are enough for the exponential average, so no start-up bias.
        weight = (1.0 / steps).clamp(min=2.0 / (self.cfg.average_steps + 1))
        average = self.average_norm + (norm - self.average_norm) * weight
        self.average_norm = torch.where(accepted, average, self.average_norm)
        average_ratio = self.average_norm / self.threshold
        off_target = (average_ratio - self.cfg.target_ratio).abs() > self.cfg.tolerance
        self._metrics = {
            "clip_threshold": self.threshold,
            "clip_ratio": norm / self.threshold,
            "clip_average_ratio": average_ratio,
        }

        in_a_row = (self.clipped_in_a_row + 1) * clipped
        threshold, in_a_row = self._next_threshold(in_a_row)
        self.threshold = torch.where(accepted, threshold, self.threshold)
        self.clipped_in_a_row = torch.where(accepted, in_a_row, self.clipped_in_a_row)
        off_steps = (self.off_target_steps + 1) * off_target
        self.off_target_steps = torch.where(accepted, off_steps, self.off_target_steps)
        self.accepted_steps = torch.where(accepted, steps, self.accepted_steps)
        self._metrics["clip_off_target_steps"] = self.off_target_steps
        return torch.where(accepted, coefficient, 1.0)

    def metrics(self) -> dict[str, Tensor]:
        """Scalars of the last update, left as they are by later ones.

        `clip_threshold`: as that step used it; `clip_ratio`: norm / threshold; `clip_average_ratio`: average
        norm / threshold; `clip_off_target_steps`: accepted steps in a row with that average off its target.
        """
        return dict(self._metrics)

    def warning(self, host_metrics: Mapping[str, float]) -> str | None:
        """A sentence, once, when the average has been off its target for `warn_after` steps; else None.

        `host_metrics` holds the values of `metrics()` as the caller read them. It is told again only after
        the average has been back.
        """
        steps = int(host_metrics["clip_off_target_steps"])
        if steps < self.cfg.warn_after:
            self._warned = False
            return None
        if self._warned:
            return None
        self._warned = True
        average = host_metrics["clip_average_ratio"]
        wanted = average * host_metrics["clip_threshold"] / self.cfg.target_ratio
        return (
            f"Gradient norms have averaged {average:.2f} of the clipping threshold, off the target "
            f"{self.cfg.target_ratio:g} +- {self.cfg.tolerance:g} for {steps} steps: a threshold of "
            f"{wanted:.3g} would meet it (in a new run clipping.baseline={wanted / self._initial_ratio():.3g})."
        )

    def state_dict(self) -> dict[str, Tensor]:
        """All state, as scalars; updates replace them, so the tensors returned keep their values."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on this clipper's device. Raises CheckpointError on a gap."""
        missing = [name for name in self._STATE if name not in state]
        if missing:
            raise CheckpointError(
                f"The checkpoint's clipping state lacks {', '.join(missing)}: resume from another checkpoint."
            )
        for name in self._STATE:
            setattr(self, name, state[name].to(getattr(self, name), copy=True))

    def _initial_ratio(self) -> float:
        return 1.0

    def _next_threshold(self, in_a_row: Tensor) -> tuple[Tensor, Tensor]:
        """The next step's threshold and count of clipped steps, given the count with this step in it."""
        return self.threshold, in_a_row


class AdaptiveClipper(FixedClipper):
    """Starts at `initial_ratio` x `baseline`; `raise_after` clipped steps in a row raise the threshold."""

    def _initial_ratio(self) -> float:
        return self.cfg.initial_ratio

    def _next_threshold(self, in_a_row: Tensor) -> tuple[Tensor, Tensor]:
        raised = in_a_row >= self.cfg.raise_after
        threshold = torch.where(raised, self.threshold * self.cfg.raise_factor, self.threshold)
        return threshold, torch.where(raised, 0, in_a_row)


def build_clipper(cfg: ClippingConfig, device: torch.device | str) -> FixedClipper:
    """The clipper that `cfg` names, with its state on `device`. Raises ConfigError on impossible values."""
    check_clipping(cfg)
    return {"adaptive": AdaptiveClipper, "fixed": FixedClipper}[cfg.name](cfg, device)
