"""AdamW on fp32 master weights whose update can be scaled and skipped on the device.

torch's fused AdamW reads two scalars, made for gradient scalers. It divides every gradient by `grad_scale`,
which carries the clipping coefficient without a pass of its own; and where `found_inf` is exactly 1 it leaves
weights and moments as they are and takes the step counter's increment back, without asking the host.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_train.config.checks import check_optimizer
from nvfp4_train.config.schema import OptimizerConfig
from nvfp4_train.errors import ConfigError


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over the model's trainable parameters, in two groups.

    Weight decay acts on parameters of two or more dimensions (embeddings, linear and convolution weights),
    not on norms, biases and Mamba's A_log, D and dt_bias. The learning rate is a float32 scalar on the
    parameters' device, so that setting it neither syncs nor recompiles.

    Raises ConfigError where `cfg` has an impossible value or a parameter is not float32.
    """
    check_optimizer(cfg)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in named:
        if p.dtype != torch.float32:
            raise ConfigError(
                f"Parameter {name} is {p.dtype}, but the optimizer's master weights must be torch.float32: "
                "convert the model with .float() before building the optimizer."
            )
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr = torch.tensor(cfg.lr, dtype=torch.float32, device=named[0][1].device)
    for group in groups:
        group["lr"] = lr.clone()
    return torch.optim.AdamW(groups, betas=tuple(cfg.betas), eps=cfg.eps, fused=True)


@torch.no_grad()
def apply_update(optimizer: torch.optim.AdamW, lr: float, coefficient: Tensor, finite: Tensor) -> None:
    """One AdamW step at rate `lr` on the gradients x `coefficient`; nothing at all where `finite` is 0.

    `coefficient` (from clipping, in (0, 1]) and `finite` (exactly 0 or 1) are float32 scalars on the
    parameters' device. Gradients are divided, in place, by 1 / coefficient: exact at 1, else two roundings.
    A skipped step leaves weights, moments and step counters bit for bit as they were.

    Gradients must have their parameters' strides, as autograd's have: torch's fused kernel on the CPU reads
    them in memory order, and would take a transposed view assigned to `.grad` for another matrix.
    """
    for group in optimizer.param_groups:
        group["lr"].fill_(lr)
    optimizer.grad_scale = coefficient.reciprocal()
    optimizer.found_inf = 1.0 - finite
    try:
        optimizer.step()
    finally:
        # Checkpoint loaders call step() to create missing state: they must find a plain optimizer.
        del optimizer.grad_scale, optimizer.found_inf
