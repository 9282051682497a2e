"""Which implementation of the scan a model runs, chosen once at the start and told in the log."""

from __future__ import annotations

import importlib.metadata

import torch

from nvfp4_train.errors import ConfigError
from nvfp4_train.model import mamba_ssm_scan
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.ssd import ssd_chunked


def choose_kernels(model: HybridModel, kernels: str, device: torch.device) -> str:
    """Have `model` run the scan that `training.kernels` names, and return a line for the log.

    "torch" is the reference, on every device. "auto" takes mamba-ssm's Triton kernels on a GPU where they are found, in
    BF16. Raises ConfigError for "mamba_ssm" where they can't run.
    """
    missing = _missing(model, device) if kernels != "torch" else "training.kernels=torch"
    if kernels == "mamba_ssm" and missing:
        raise ConfigError(f"training.kernels=mamba_ssm, but {missing}: use training.kernels=auto or torch.")
    scan = ssd_chunked if missing else mamba_ssm_scan.ssd_mamba_ssm
    for module in model.modules():
        if isinstance(module, Mamba2):
            module.scan = scan
    if missing:
        return f"scan in PyTorch ({missing})"
    return f"scan by mamba-ssm {importlib.metadata.version('mamba-ssm')} (Triton)"


def _missing(model: HybridModel, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"mamba-ssm's kernels run on GPUs, not on a {device.type.upper()}"
    if model.compute_dtype != torch.bfloat16:
        return f"activations are {str(model.compute_dtype).removeprefix('torch.')}, not bfloat16"
    return mamba_ssm_scan.load()
