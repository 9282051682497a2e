"""The model in shards: PyTorch's FSDP2, one unit a block, with what travels chosen weight by weight.

FSDP2's own mixed precision would round every parameter of a block to bf16 and its gradients with it; here parameters
and gradients stay fp32 and each weight says what it travels as. FSDP2 asks a parameter's local tensor for that
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`); any tensor may answer, so the shards stay plain tensors for the
optimizer, clipping and checkpoints.

    norms, convolutions, Mamba's A_log, D, dt_bias    fp32, by FSDP2 itself
    embeddings, head                                  bf16, unfolded to fp32
    linear layers in BF16                             bf16, multiplied as it arrives
    linear layers in NVFP4                            bf16, quantized as it arrives; or the codes (weight_gather=nvfp4)

What a linear layer multiplies is written into a tensor beside the parameter, whose memory FSDP2 frees and allocates with
its own; the whole fp32 parameter never has any, it only gathers the gradient.

Parts of FSDP2 that are private, or move between versions of PyTorch, are touched in this file alone (seen in 2.11 to 2.14).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Shard

from nvfp4_train.config.layout import shard_dim
from nvfp4_train.config.schema import ParallelConfig
from nvfp4_train.distributed.processes import FSDP, REPLICATE, Processes, all_gather
from nvfp4_train.distributed.traffic import Traffic
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.precision import formats
from nvfp4_train.precision.linear import Linear

_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # new name since 2.13


class ShardedModel:
    """Shards a model in place and keeps its weights' travelling forms up to date."""

    def __init__(self, model: HybridModel, processes: Processes, cfg: ParallelConfig, device: torch.device):
        """`model` is on the meta device; its shards come to `device` without values (`initialize_` or a checkpoint)."""
        self.group, self.traffic = processes.shard_group, Traffic()
        self._wrap(model, processes)
        model.to_empty(device=device)
        self._weights = self._extend(model) if model.compute_dtype != torch.float32 else []
        for unit in self._units:
            unit.set_custom_all_gather(_CountedAllGather(self.traffic))
            unit.set_custom_reduce_scatter(_CountedReduceScatter(self.traffic))

    @torch.no_grad()
    def prepare_weights(self) -> None:
        """Make what the weights, as they are now, will travel as: once an optimizer step."""
        for weight in self._weights:
            weight.prepare()

    def _wrap(self, model: HybridModel, processes: Processes) -> None:
        mesh = processes.mesh if processes.mesh[REPLICATE].size() > 1 else processes.mesh[FSDP]
        dims = {
            module.weight: shard_dim(*module.weight.shape, mesh[FSDP].size())
            for module in model.modules()
            if isinstance(module, Linear)
        }

        def place(parameter: nn.Parameter) -> Shard:
            return Shard(dims.get(parameter) or 0)

        self._units = [model.embeddings, *model.layers, model.lm_head, model]
        for unit in self._units:
            # Always back to shards, the root too: after a validation the optimizer and checkpoints must see shards.
            fully_shard(unit, mesh=mesh, shard_placement_fn=place, reshard_after_forward=True)
            # The loss is divided by the number of all targets before backward: gradients are summed, not averaged.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        model.embeddings.set_unshard_in_backward(False)
        register_fsdp_forward_method(model.lm_head, "loss")
        register_fsdp_forward_method(model, "loss")
        for module in (model, *model.layers):
            for method in ("prefill", "step"):
                register_fsdp_forward_method(module, method)

    def _extend(self, model: HybridModel) -> list[_TravellingWeight]:
        linears = {id(m): m for m in model.modules() if isinstance(m, Linear)}
        whole = {id(model.embeddings), id(model.lm_head)}
        weights = []
        for unit in self._units:
            # Once as FSDP2 does it by itself: its unsharded parameters are made, and their memory is freed again.
            unit.unshard()
            unit.reshard()
            for parameter in _parameters(unit):
                owner = id(parameter._module_info.module)
                if owner in linears:
                    weights.append(_LinearWeight(parameter, linears[owner]))
                elif owner in whole:
                    weights.append(_TravellingWeight(parameter))
        return weights


class _TravellingWeight:
    """A parameter that travels in bf16 and is unfolded to fp32."""

    def __init__(self, parameter: Any) -> None:
        """`parameter`: its FSDPParam."""
        self.parameter = parameter
        self.shard: Tensor = parameter._sharded_local_tensor
        self.payload = torch.zeros(
            parameter.padded_sharded_param_size, dtype=torch.bfloat16, device=self.shard.device
        )
        self.shard.fsdp_pre_all_gather = self._before
        self.shard.fsdp_post_all_gather = self._after
        parameter._init_extensions()
        self._restart([parameter._unsharded_param.detach()])

    def prepare(self) -> None:
        """Write the payload from the shard as it is now."""
        self.payload[: len(self.shard)].copy_(self.shard)

    def arrived(self, gathered: Tensor) -> None:
        """Take in the whole parameter as it arrived, bf16 with its rows padded."""
        self.parameter._unsharded_param.copy_(gathered)

    def _restart(self, tensors: list[Tensor]) -> None:
        """Receive anew, with other sizes; `tensors` are allocated before `arrived` and freed with the parameter."""
        self.parameter.all_gather_outputs = []
        self.parameter._unsharded_inner_tensors = tensors
        self.written: tuple[Tensor, ...] = tuple(tensors)
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def _before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> tuple:
        return (self.payload,), None

    @torch.no_grad()
    def _after(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor
    ) -> None:
        # What autograd saved in the forward pass is written again for the backward pass, with the same values.
        with torch.autograd._unsafe_preserve_version_counter((out, *self.written)):
            self.arrived(outputs[0].view(-1, *out.shape[1:])[: len(out)])


class _LinearWeight(_TravellingWeight):
    """The weight of a linear layer, which arrives as the operands of its GEMMs."""

    def __init__(self, parameter: Any, linear: Linear) -> None:
        super().__init__(parameter)
        self.linear = linear
        self._plan = None

    def prepare(self) -> None:
        super().prepare()
        linear, plan = self.linear, self.linear.plan
        if plan != self._plan:
            self._plan = plan
            shape, device = self.linear.weight.shape, self.shard.device
            names = {"fprop.weight", "dgrad.weight"} & plan.quantized
            separate = bool(names) and not (plan.square_weights and len(names) == 2)
            self._operands = [
                torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(1 + separate)
            ]
            self._amax = torch.zeros((), device=device)
            self._restart(self._operands)
            self.written += (self._amax,)
        linear.fprop_weight, linear.dgrad_weight = self._operands[0], self._operands[-1]
        linear.weight_amax = self._amax

    def arrived(self, gathered: Tensor) -> None:
        if not self._plan.quantized:
            self._operands[0].copy_(gathered)
            return
        fprop, dgrad, amax = formats.weight_operands(self._plan, gathered)
        self._operands[0].copy_(fprop)
        if self._operands[-1] is not self._operands[0]:
            self._operands[-1].copy_(dgrad)
        self._amax.copy_(amax)


def _parameters(unit: nn.Module) -> list[Any]:
    """FSDP2's own records (FSDPParam) of the parameters of a unit."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # PyTorch 2.11
        groups = [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


class _Plain:
    """Buffers as FSDP2 makes them by default."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_Plain, AllGather):
    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.traffic.all_gather("weights", input_tensor.nbytes, group.size())
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _CountedReduceScatter(_Plain, ReduceScatter):
    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.traffic.reduce_scatter("gradients", input_tensor.nbytes, group.size())
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
