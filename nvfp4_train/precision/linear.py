"""The quantizable linear layer."""

from __future__ import annotations

from typing import Protocol

import torch
from nvfp4_kernels import producers
from torch import nn

from nvfp4_train.precision import formats, ops  # noqa: F401  (registers the operators)
from nvfp4_train.precision.producers import Activation
from nvfp4_train.precision.recipe import BF16_PLAN, LinearPlan


class Engine(Protocol):
    """What computes a layer's quantized GEMMs by another backend (`native.NativeLinear`, `te.TELinear`)."""

    takes_amax: bool  # whether it uses the amax that a producer measured of its input

    def prepare(self, weight: torch.Tensor, plan: LinearPlan) -> None:
        """Take the master weight as it is now: once an optimizer step."""

    def release(self) -> None:
        """Let go of what `prepare` made: nothing is quantized from here on."""

    def __call__(
        self,
        x: torch.Tensor,
        amax: torch.Tensor | None,
        weight: torch.Tensor,
        plan: LinearPlan,
        rng: torch.Tensor,
    ) -> torch.Tensor:
        """x: bf16 [tokens, in] -> bf16 [tokens, out]. amax: fp32 [2], of x and its transform, if measured already."""


class Linear(nn.Module):
    """y = x W^T without bias, in the formats its plan names.

    `weight` is the master weight, fp32 [out, in]. As built every operand has the input's dtype; `PrecisionRuntime`
    sets the plan, numbers the layer and prepares the weight's operands once an optimizer step. Of a sharded model the
    operands are given (`distributed/fsdp.py`), those of bf16 layers too.
    """

    def __init__(self, in_features: int, out_features: int, device: torch.device | str | None = None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32, device=device))
        self.plan: LinearPlan = BF16_PLAN
        self.engine: Engine | None = None  # computes in place of the emulated operators
        self.fused_producers = (
            False  # whether this device's producers measure amax in the pass that makes the input
        )
        for name in ("fprop_weight", "dgrad_weight", "weight_amax", "rng"):
            self.register_buffer(name, None, persistent=False)

    def set_plan(self, plan: LinearPlan, rng: torch.Tensor) -> None:
        """Adopt a plan. rng: int64 [4], this layer's row of the runtime's counters (seed, step, micro-batch, tensor)."""
        self.plan, self.rng = plan, rng
        self.fused_producers = producers.fused(rng.device) and (self.engine is None or self.engine.takes_amax)
        if not plan.quantized:
            self.fprop_weight = self.dgrad_weight = self.weight_amax = None
            if self.engine is not None:
                self.engine.release()

    @torch.no_grad()
    def prepare_weight(self) -> None:
        """Quantize the weight as it is now. In place after the first time, so that compiled code keeps its buffers."""
        if not self.plan.quantized:
            return
        if self.engine is not None:
            self.engine.prepare(self.weight, self.plan)
            return
        fprop, dgrad, amax = formats.weight_operands(self.plan, self.weight)
        if self.fprop_weight is None:
            self.fprop_weight, self.dgrad_weight, self.weight_amax = fprop, dgrad, amax
            return
        self.fprop_weight.copy_(fprop)
        if self.dgrad_weight is not self.fprop_weight:
            self.dgrad_weight.copy_(dgrad)
        self.weight_amax.copy_(amax)

    def measures(self) -> str | None:
        """What a producer should measure of this layer's input: "raw" or "rotated" (both amax); None: nothing."""
        plan = self.plan
        if not (
            self.fused_producers and plan.has_tensor_scale and {"fprop.input", "wgrad.input"} & plan.quantized
        ):
            return None
        return "rotated" if torch.is_grad_enabled() and plan.rotates_wgrad and not plan.ms_eden else "raw"

    def forward(self, x: torch.Tensor | Activation) -> torch.Tensor:
        """x: [..., in] -> [..., out] in x's dtype (bf16 when the plan quantizes anything)."""
        x, amax = x if isinstance(x, Activation) else (x, None)
        if self.engine is not None and self.plan.quantized:
            y = self.engine(x.reshape(-1, self.in_features), amax, self.weight, self.plan, self.rng)
            return y.view(*x.shape[:-1], self.out_features)
        if self.fprop_weight is None:
            return nn.functional.linear(x, self.weight.to(x.dtype))
        y, *_ = torch.ops.nvfp4_train.linear(
            x.reshape(-1, self.in_features),
            amax,
            self.weight,
            self.fprop_weight,
            self.dgrad_weight,
            self.weight_amax,
            self.rng,
            self.plan.spec,
            torch.is_grad_enabled(),
        )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, {self.plan.format}={sorted(self.plan.quantized)}"
