"""Initial weights: the rules Megatron-LM trains Nemotron-H from (not those of Hugging Face's class).

A parameter's values are a pure function of the seed, its qualified name and its full shape, so any number of
ranks and any sharding start from the same weights: a rank makes the whole parameter and keeps its part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.model.hybrid import HybridModel

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4  # seconds in the state space model's sense; log-uniform
A_MIN, A_MAX = 1.0, 16.0

Rule = Callable[[Tensor, torch.Generator, ModelConfig], Tensor]


def _normal(t: Tensor, gen: torch.Generator, cfg: ModelConfig) -> Tensor:
    return t.normal_(0.0, _std(cfg), generator=gen)


def _normal_into_residual(t: Tensor, gen: torch.Generator, cfg: ModelConfig) -> Tensor:
    """Every block adds to the residual stream; sqrt(blocks) keeps its variance at the end independent of depth."""
    return t.normal_(0.0, _std(cfg) / math.sqrt(len(cfg.pattern)), generator=gen)


def _uniform_kernel(t: Tensor, gen: torch.Generator, cfg: ModelConfig) -> Tensor:
    """Kaiming-uniform with a = sqrt(5) of a depthwise kernel: fan-in is its length."""
    bound = 1 / math.sqrt(cfg.conv_kernel)
    return t.uniform_(-bound, bound, generator=gen)


def _dt_bias(t: Tensor, gen: torch.Generator, cfg: ModelConfig) -> Tensor:
    """softplus^-1(dt) with dt log-uniform in [DT_MIN, DT_MAX]."""
    low, high = math.log(DT_MIN), math.log(DT_MAX)
    dt = t.uniform_(low, high, generator=gen).exp().clamp(min=DT_FLOOR)
    return dt + torch.log(-torch.expm1(-dt))


def _a_log(t: Tensor, gen: torch.Generator, cfg: ModelConfig) -> Tensor:
    return t.uniform_(A_MIN, A_MAX, generator=gen).log()


def _ones(t: Tensor, gen: torch.Generator, cfg: ModelConfig) -> Tensor:
    return t.fill_(1.0)


RULES: dict[str, Rule] = {
    "embeddings.weight": _normal,
    "lm_head.weight": _normal,
    "layers.*.mixer.in_proj.weight": _normal,
    "layers.*.mixer.qkv_proj.weight": _normal,
    "layers.*.mixer.up_proj.weight": _normal,
    "layers.*.mixer.out_proj.weight": _normal_into_residual,
    "layers.*.mixer.o_proj.weight": _normal_into_residual,
    "layers.*.mixer.down_proj.weight": _normal_into_residual,
    "layers.*.mixer.conv1d.weight": _uniform_kernel,
    "layers.*.mixer.conv1d.bias": _uniform_kernel,
    "layers.*.mixer.dt_bias": _dt_bias,
    "layers.*.mixer.A_log": _a_log,
    "layers.*.mixer.D": _ones,
    "layers.*.mixer.norm.weight": _ones,
    "layers.*.norm.weight": _ones,
    "norm_f.weight": _ones,
}


def initial_value(name: str, shape: tuple[int, ...], cfg: ModelConfig, seed: int) -> Tensor:
    """The initial value of the parameter with this qualified name and full shape: fp32, on the CPU.

    Raises KeyError when no rule names the parameter.
    """
    rule = next((rule for glob, rule in RULES.items() if fnmatchcase(name, glob)), None)
    if rule is None:
        raise KeyError(f"parameter {name} has no rule in nvfp4_train/model/init.py")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return rule(torch.empty(shape, dtype=torch.float32), generator, cfg)


def initialize_(model: HybridModel, seed: int) -> None:
    """Fills every parameter with its `initial_value`; see `fill_`."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    fill_(model, lambda name: initial_value(name, shapes[name], model.cfg, seed))


@torch.no_grad()
def fill_(model: HybridModel, value_of: Callable[[str], Tensor]) -> None:
    """Fills every parameter, whole or sharded (DTensor), on any device but meta. value_of: a name -> the whole value."""
    for name, parameter in model.named_parameters():
        value = value_of(name)
        if hasattr(parameter, "placements"):  # a DTensor, whose module takes long to import
            from torch.distributed.tensor import distribute_tensor

            value = value.to(parameter.device)
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)


def _std(cfg: ModelConfig) -> float:
    return cfg.init_std if cfg.init_std is not None else math.sqrt(0.8 / cfg.hidden_size)
