"""Gradient clipping by the global norm, with a fixed threshold or one that adapts, or tensor by tensor (docs/recipes.md).

Norms, thresholds and counters are scalars on the device, where all decisions are taken: the host reads them
only when it logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nvfp4_train.config.checks import check_clipping
from nvfp4_train.config.schema import ClippingConfig
from nvfp4_train.distributed.processes import ALONE, Processes
from nvfp4_train.errors import CheckpointError


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], processes: Processes = ALONE) -> Tensor:
    """The 2-norm of all gradients together: a float32 scalar on their device. No gradient counts as 0.

    Where `processes` hold shards of each gradient (DTensors) they all get the same norm.
    Non-finite gradients give a non-finite norm, and so does a sum of squares beyond float32.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if processes.mesh is None:
        return torch.nn.utils.get_total_norm(grads)
    square = torch.nn.utils.get_total_norm([grad.to_local() for grad in grads]).square()
    return processes.sum_of_shards(square).sqrt()


class FixedClipper:
    """Clips the global norm to `clipping.baseline`, and watches how the norms sit below it."""

    _STATE = ("threshold", "clipped_in_a_row", "average_norm", "accepted_steps", "off_target_steps")

    def __init__(self, cfg: ClippingConfig, device: torch.device | str) -> None:
        self.cfg = cfg
        first = cfg.baseline * self._initial_ratio()
        self.threshold = torch.tensor(first, dtype=torch.float32, device=device)
        self.clipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.average_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.accepted_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.off_target_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._metrics: dict[str, Tensor] = {}
        self._warned = False

    def clip(self, parameters: Iterable[nn.Parameter], norm: Tensor, accepted: Tensor) -> Tensor:
        """`update`, for rules that also want the gradients (in place): the factor that is left for all of them."""
        return self.update(norm, accepted)

    @torch.no_grad()
    def update(self, norm: Tensor, accepted: Tensor) -> Tensor:
        """Take in one step's gradient norm; returns the factor for its gradients, min(1, threshold / norm).

        `norm`, `accepted` (0 or 1) and the result are float32 scalars on the clipper's device. A step whose update is
        skipped changes no state, and its factor is 1.
        """
        accepted = accepted.bool()
        used = self._used_threshold(norm)
        clipped = norm > used
        coefficient = (used / norm).clamp(max=1.0)

        steps = self.accepted_steps + 1
        # The mean of all norms until there are enough for the exponential average, so no start-up bias.
        weight = (1.0 / steps).clamp(min=2.0 / (self.cfg.average_steps + 1))
        average = self.average_norm + (norm - self.average_norm) * weight
        self.average_norm = torch.where(accepted, average, self.average_norm)
        average_ratio = self.average_norm / used
        off_target = (average_ratio - self.cfg.target_ratio).abs() > self.cfg.tolerance
        self._metrics = {
            "clip_threshold": used,
            "clip_ratio": norm / used,
            "clip_average_ratio": average_ratio,
        }

        in_a_row = (self.clipped_in_a_row + 1) * clipped
        threshold, in_a_row = self._next_threshold(in_a_row)
        self._take_in(torch.minimum(norm, used), accepted)
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

    def _used_threshold(self, norm: Tensor) -> Tensor:
        """The threshold for a step of this norm."""
        return self.threshold

    def _take_in(self, clipped_norm: Tensor, accepted: Tensor) -> None:
        """Further state of a rule; it must stay as it is where `accepted` (bool) is not set."""

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


class ZClipper(FixedClipper):
    """ZClip (arXiv 2504.02507): a norm that stands out from the average of the clipped norms is pulled back towards it.

    With mean m and deviation s of the norms so far (exponential averages, weight 1 - `zclip_alpha` for the newest) and
    z = (norm - m) / s, the threshold of a step with z > `zclip_z` is m + s x zclip_z^2 / z ("reciprocal"), so that larger
    outliers are clipped harder. Never above `baseline`, which alone holds for the first `zclip_warmup` steps, whose mean and
    variance start the averages.
    """

    _STATE = (*FixedClipper._STATE, "mean", "variance")

    def __init__(self, cfg: ClippingConfig, device: torch.device | str) -> None:
        super().__init__(cfg, device)
        self.mean = torch.zeros((), dtype=torch.float32, device=device)
        self.variance = torch.zeros((), dtype=torch.float32, device=device)

    def _used_threshold(self, norm: Tensor) -> Tensor:
        deviation = self.variance.sqrt() + 1e-6
        z = (norm - self.mean) / deviation
        pulled = self.mean + deviation * self.cfg.zclip_z**2 / z
        stands_out = (self.accepted_steps >= self.cfg.zclip_warmup) & (z > self.cfg.zclip_z)
        return torch.where(stands_out, torch.minimum(pulled, self.threshold), self.threshold)

    def _take_in(self, clipped_norm: Tensor, accepted: Tensor) -> None:
        n = self.accepted_steps + 1
        difference = clipped_norm - self.mean
        # Welford's running mean and variance during warm-up, exponential averages after it.
        warming = n <= self.cfg.zclip_warmup
        weight = torch.where(warming, 1.0 / n, 1.0 - self.cfg.zclip_alpha)
        mean = self.mean + weight * difference
        square = torch.where(warming, difference * (clipped_norm - mean), (clipped_norm - mean).square())
        variance = self.variance + weight * (square - self.variance)
        self.mean = torch.where(accepted, mean, self.mean)
        self.variance = torch.where(accepted, variance, self.variance)


class AdaptiveTensorClipper(FixedClipper):
    """AdaGC (arXiv 2502.11034): each tensor's gradient is clipped to `adagc_ratio` x the average of its own clipped norms.

    For the first `adagc_warmup` steps the global norm is clipped to `baseline`, and a tensor has as average the least of its
    clipped norms; then the average moves by 1 - `adagc_beta` a step. A norm of zero doesn't count (a tensor behind weights
    that start at zero has no gradient at first, and an average of zero would keep it so).

    Costs a second read of the gradients (their norms) and a write; the metrics' threshold is the largest global norm
    that can pass, adagc_ratio x |averages|.
    """

    _STATE = (*FixedClipper._STATE, "tensor_norms")

    def __init__(self, cfg: ClippingConfig, device: torch.device | str, tensors: int) -> None:
        super().__init__(cfg, device)
        self.tensor_norms = torch.full((tensors,), torch.inf, dtype=torch.float32, device=device)

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], norm: Tensor, accepted: Tensor) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = torch.stack([_whole(n) for n in torch._foreach_norm(gradients)]).float()
        warming = self.accepted_steps < self.cfg.adagc_warmup
        limits = self.cfg.adagc_ratio * self.tensor_norms
        exceeds = ~warming & (norms > limits)
        factors = torch.where(exceeds & accepted.bool(), limits / norms, 1.0)
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        torch._foreach_mul_(local, list(factors.unbind()))
        coefficient = self.update(norm, accepted)

        clipped = torch.where(warming, norms * coefficient, norms * factors)
        lowest = torch.minimum(self.tensor_norms, clipped)
        moved = self.tensor_norms + (1.0 - self.cfg.adagc_beta) * (clipped - self.tensor_norms)
        moved = torch.where(self.tensor_norms.isinf(), clipped, moved)  # its first gradient since the start
        averages = torch.where(norms > 0, torch.where(warming, lowest, moved), self.tensor_norms)
        self.tensor_norms = torch.where(accepted.bool(), averages, self.tensor_norms)
        return torch.where(warming, coefficient, 1.0)

    def _used_threshold(self, norm: Tensor) -> Tensor:
        finite = torch.where(self.tensor_norms.isinf(), 0.0, self.tensor_norms)
        largest = self.cfg.adagc_ratio * torch.linalg.vector_norm(finite)
        return torch.where(self.accepted_steps < self.cfg.adagc_warmup, self.threshold, largest)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def build_clipper(cfg: ClippingConfig, device: torch.device | str, tensors: int = 0) -> FixedClipper:
    """The clipper that `cfg` names, with its state on `device`, for a model of so many parameter tensors.

    Raises ConfigError on impossible values.
    """
    check_clipping(cfg)
    if cfg.name == "adagc":
        return AdaptiveTensorClipper(cfg, device, tensors)
    kinds = {"adaptive": AdaptiveClipper, "fixed": FixedClipper, "zclip": ZClipper}
    return kinds[cfg.name](cfg, device)
