"""Spikes: a step whose loss or gradient norm stands out from the steps before it, found on the device before its update.

A step is compared with the last `window` accepted ones: their average m and standard deviation s, for the loss and for
the logarithm of the gradient norm (norms scatter by factors, so their logarithm has the even tails that a count of sigmas
supposes). With z = (value - m) / max(s, floor):

    z > sigmas                an exceedance: logged; the windows take it in as m + sigmas x s
    loss: z > skip_sigmas     its update is skipped (where recovery acts), and the windows never see it
    norm > skip_norm x e^m    likewise
    not finite                likewise

and `confirm` exceedances of either kind among the last `confirm_within` steps are a spike, upon which the host acts. The
differences from the plain rule (loss above the average of 100 by three deviations) and their reasons: docs/recipes.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nvfp4_train.config.schema import RecoveryConfig

MODES = ("auto", "skip_nonfinite", "off")


class SpikeDetector:
    """Decides for each step, on the device, whether its update is taken. Its tensors are replaced, never written to."""

    _STATE = ("losses", "norms", "accepted_steps", "recent")

    def __init__(self, cfg: RecoveryConfig, device: torch.device | str) -> None:
        self.cfg = cfg
        self.losses = torch.zeros(cfg.window, dtype=torch.float32, device=device)  # newest last
        self.norms = torch.zeros(cfg.window, dtype=torch.float32, device=device)  # natural logarithms
        self.accepted_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.recent = torch.zeros(
            cfg.confirm_within, dtype=torch.bool, device=device
        )  # exceedances, newest last
        self._ages = torch.arange(cfg.confirm_within, 0, -1, device=device)
        self._metrics: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, loss: Tensor, norm: Tensor, finite: Tensor) -> Tensor:
        """Take in one step; returns 1.0 where its update is to be taken, else 0.0.

        `loss`, `norm` (before clipping), `finite` (0 or 1) and the result are float32 scalars on the detector's device, all
        of them reduced over the ranks. Until `window` steps have been accepted nothing but `finite` decides.
        """
        cfg, is_finite = self.cfg, finite.bool()
        armed = self.accepted_steps >= cfg.window
        log_norm = norm.float().clamp(min=torch.finfo(torch.float32).tiny).log()
        loss_z, loss_kept = self._score(loss.float(), self.losses, cfg.loss_floor, relative=True)
        norm_z, norm_kept = self._score(log_norm, self.norms, cfg.norm_floor, relative=False)
        highest = torch.maximum(loss_z, norm_z)
        exceeds = ~is_finite | (armed & (highest > cfg.sigmas))
        extreme = (loss_z > cfg.skip_sigmas) | (log_norm - self.norms.mean() > math.log(cfg.skip_norm))
        sound = is_finite & ~(armed & extreme)
        accepted = {"auto": sound, "skip_nonfinite": is_finite, "off": torch.ones_like(sound)}[cfg.name]

        self.losses = torch.where(sound, _push(self.losses, torch.where(armed, loss_kept, loss)), self.losses)
        self.norms = torch.where(
            sound, _push(self.norms, torch.where(armed, norm_kept, log_norm)), self.norms
        )
        self.accepted_steps = self.accepted_steps + sound
        self.recent = _push(self.recent, exceeds)
        self._metrics = {
            "loss_sigmas": torch.where(armed, loss_z, 0.0),
            "norm_sigmas": torch.where(armed, norm_z, 0.0),
            "exceedances": self.recent.sum(),
            "exceedance_age": (self.recent * self._ages).amax(),
        }
        return accepted.float()

    def restart(self) -> None:
        """Compare with nothing until `window` steps have been accepted from here on: other text is trained on."""
        self.accepted_steps = torch.zeros_like(self.accepted_steps)

    def metrics(self) -> dict[str, Tensor]:
        """Scalars of the last update.

        `loss_sigmas`, `norm_sigmas`: z, 0 until the windows are full; `exceedances`: among the last `confirm_within`
        steps; `exceedance_age`: how many steps ago the first of these began, this step being 1; 0 without any.
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Tensor]:
        """All state; updates replace the tensors, so those returned keep their values."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on this detector's device."""
        for name in self._STATE:
            setattr(self, name, state[name].to(getattr(self, name), copy=True))

    def _score(self, value: Tensor, window: Tensor, floor: float, relative: bool) -> tuple[Tensor, Tensor]:
        """z, and the value no higher than `sigmas` above the average, as the window takes it in."""
        sigma, mean = torch.std_mean(window)
        sigma = torch.maximum(sigma, mean.abs() * floor if relative else torch.full_like(mean, floor))
        return (value - mean) / sigma, torch.minimum(value, mean + self.cfg.sigmas * sigma)


def _push(window: Tensor, value: Tensor) -> Tensor:
    return torch.cat((window[1:], value.reshape(1)))
