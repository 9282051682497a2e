"""The model in shards: PyTorch's FSDP2, one unit a block, with what travels chosen weight by weight.

FSDP2's own mixed precision would round every parameter of a block to bf16 and its gradients with it; here parameters
and gradients stay fp32 and each weight says what it travels as. FSDP2 asks a parameter's local tensor for that
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`); any tensor may answer, so the shards stay plain tensors for the
optimizer, clipping and checkpoints.

    norms, convolutions, Mamba's A_log, D, dt_bias    fp32, by FSDP2 itself
    embeddings, head                                  bf16, unfolded to fp32
    linear layers in BF16                             bf16, multiplied as they arrive
    linear layers in NVFP4                            bf16, quantized as they arrive; or (weight_gather=nvfp4) the codes
                                                      and scales of 16x16 blocks in one buffer of bytes

What a linear layer multiplies is written into a tensor beside the parameter, whose memory FSDP2 frees and allocates with
its own; the whole fp32 parameter never has any, it only gathers the gradient.

Parts of FSDP2 that are private, or move between versions of PyTorch, are touched in this file alone (seen in 2.11 to 2.14).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from nvfp4_kernels import BLOCK, CounterKey, QuantizedTensor, amax, quantize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Shard

from nvfp4_train.config.layout import Layout, layout_of, shard_dim
from nvfp4_train.config.schema import Config
from nvfp4_train.distributed import reduce
from nvfp4_train.distributed.processes import FSDP, REPLICATE, Processes, all_gather, make_mesh
from nvfp4_train.distributed.traffic import Traffic, gradient_parts
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.precision import formats
from nvfp4_train.precision.linear import Linear

_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # new name since 2.13


class ShardedModel:
    """Shards a model in place and keeps its weights' travelling forms up to date."""

    def __init__(self, model: HybridModel, processes: Processes, cfg: Config, device: torch.device):
        """`model` is on the meta device; its shards come to `device` without values (`initialize_` or a checkpoint)."""
        self.group, self.traffic = processes.shard_group, processes.traffic
        self.counters = torch.zeros(
            4, dtype=torch.int64, device=device
        )  # seed, step, micro-batch; see `follow`
        self._codes, self.grad_reduce = cfg.parallel.weight_gather == "nvfp4", cfg.parallel.grad_reduce
        self._units = wrap(model, processes.mesh)
        model.to_empty(device=device)
        self._weights = self._extend(model) if model.compute_dtype != torch.float32 else []
        self._set_collectives(model, cfg, processes)

    def follow(self, counters: Tensor) -> None:
        """Take the random bits' counters (seed, step, micro-batch, ...) from this tensor from now on."""
        self.counters = counters

    @torch.no_grad()
    def prepare_weights(self) -> None:
        """Make what the weights, as they are now, will travel as: once an optimizer step."""
        for weight in self._weights:
            weight.adopt(self._codes)
        coded = [weight for weight in self._weights if weight.coded]
        if coded:
            self._share_amaxes(coded)
        for weight in self._weights:
            weight.prepare()

    def _share_amaxes(self, weights: list[_LinearWeight]) -> None:
        """The largest magnitudes of the whole weights, in one reduction. As bit patterns, so that NaN is the largest."""
        mine = torch.stack([amax(weight.shard.to(torch.bfloat16))[0] for weight in weights]).abs()
        dist.all_reduce(mine.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
        self.traffic.all_reduce("weights/amax", mine.nbytes, self.group.size())
        for weight, value in zip(weights, mine.unbind(), strict=True):
            weight.amax.copy_(value)

    def _extend(self, model: HybridModel) -> list[_TravellingWeight]:
        linears = {id(m): m for m in model.modules() if isinstance(m, Linear)}
        whole = {id(model.embeddings), id(model.lm_head)}
        weights = []
        for unit in self._units:
            # Once as FSDP2 does it by itself: its unsharded parameters are made, and their memory is freed again.
            unit.unshard()
            unit.reshard()
            for parameter in parameters_of(unit):
                owner = id(parameter._module_info.module)
                if owner in linears:
                    weights.append(_LinearWeight(parameter, linears[owner]))
                elif owner in whole:
                    weights.append(_TravellingWeight(parameter))
        return weights

    def _set_collectives(self, model: HybridModel, cfg: Config, processes: Processes) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        parts = gradient_parts(shapes, cfg, layout_of(cfg, processes.size))
        copies = processes.mesh[REPLICATE].size()
        for unit in self._units:
            records = parameters_of(unit)
            mine = [weight for weight in self._weights if weight.parameter in records]
            unit.set_custom_all_gather(_CountedAllGather(self.traffic, mine))
            reduced = [parts[names[id(record.sharded_param)]] for record in records]
            unit.set_custom_reduce_scatter(_QuantizedReduceScatter(self, reduced))
            if copies > 1:
                unit.set_all_reduce_hook(
                    lambda output: self.traffic.all_reduce("gradients/copies", output.nbytes, copies)
                )


def wrap(model: HybridModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard the parameters of a model over `mesh` (replicate, fsdp), one unit a block; returns the units."""
    mesh = mesh if mesh[REPLICATE].size() > 1 else mesh[FSDP]
    dims = {
        module.weight: shard_dim(*module.weight.shape, mesh[FSDP].size())
        for module in model.modules()
        if isinstance(module, Linear)
    }

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(dims.get(parameter) or 0)

    units = [model.embeddings, *model.layers, model.lm_head, model]
    for unit in units:
        # Always back to shards, the root too: after a validation the optimizer and checkpoints must see shards.
        fully_shard(unit, mesh=mesh, shard_placement_fn=place, reshard_after_forward=True)
        # The loss is divided by the number of all targets before backward: gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for unit in (model.embeddings, model.lm_head):
        unit.set_unshard_in_backward(False)  # their gradients don't depend on them
    register_fsdp_forward_method(model.lm_head, "loss")
    register_fsdp_forward_method(model, "loss")
    for module in (model, *model.layers):
        for method in ("prefill", "step"):
            register_fsdp_forward_method(module, method)
    return units


def shards_of_rank0(model: HybridModel, layout: Layout) -> dict[str, tuple[int, ...]]:
    """{parameter: shape of its shard on rank 0} of a meta model, as PyTorch splits it for a process group that is faked."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        wrap(model, make_mesh("cpu", layout))
        return {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    finally:
        dist.destroy_process_group()


class _TravellingWeight:
    """A parameter that travels in bf16 and is unfolded to fp32."""

    coded = quantized = False

    def __init__(self, parameter: Any) -> None:
        """`parameter`: its FSDPParam."""
        self.parameter = parameter
        self.shard: Tensor = parameter._sharded_local_tensor
        self._padded_size = parameter.padded_sharded_param_size
        self.shard.fsdp_pre_all_gather = self._before
        self.shard.fsdp_post_all_gather = self._after
        parameter._init_extensions()
        self._restart(self._bf16_payload(), [parameter._unsharded_param.detach()])

    def adopt(self, codes: bool) -> None:
        """Look whether to travel otherwise from now on."""

    def prepare(self) -> None:
        """Write the payload from the shard as it is now."""
        self.payload[: len(self.shard)].copy_(self.shard)

    def arrived(self, gathered: Tensor) -> None:
        """Take in all ranks' payloads, [ranks x rows, ...]."""
        self.parameter._unsharded_param.copy_(self._rows(gathered))

    def _rows(self, gathered: Tensor) -> Tensor:
        """The whole weight without the padding of its rows."""
        size = self.parameter._orig_size
        return gathered.view(-1, *size[1:])[: size[0]]

    def _bf16_payload(self) -> Tensor:
        return torch.zeros(self._padded_size, dtype=torch.bfloat16, device=self.shard.device)

    def _restart(self, payload: Tensor, tensors: list[Tensor]) -> None:
        """Travel as `payload` from now on; `tensors` are allocated before `arrived` and freed with the parameter."""
        self.payload = payload
        self.parameter.all_gather_outputs = []
        self.parameter._unsharded_inner_tensors = tensors
        # FSDP2 joins shards along another dimension than the first by this size.
        self.parameter.padded_sharded_param_size = payload.shape if self.coded else self._padded_size
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
            self.arrived(outputs[0])


class _LinearWeight(_TravellingWeight):
    """The weight of a linear layer, which arrives as the operands of its GEMMs."""

    def __init__(self, parameter: Any, linear: Linear) -> None:
        self.linear, self.plan = linear, None
        self.amax = torch.zeros((), device=linear.weight.device)
        super().__init__(parameter)

    @property
    def quantized(self) -> bool:
        return bool(self.plan.quantized)

    def adopt(self, codes: bool) -> None:
        linear, plan = self.linear, self.linear.plan
        if plan != self.plan:
            self.plan, self.coded = plan, codes and plan.has_square_codes
            n = self.shard.numel()
            payload = (
                torch.empty(1, n // 2 + n // BLOCK**2, dtype=torch.uint8, device=self.shard.device)
                if self.coded
                else self._bf16_payload()
            )
            names = {"fprop.weight", "dgrad.weight"} & plan.quantized
            separate = bool(names) and not (len(names) == 2 and (plan.square_weights or plan.ms_eden))
            shape = tuple(self.parameter._orig_size)
            self.operands = [
                torch.empty(shape, dtype=torch.bfloat16, device=self.shard.device)
                for _ in range(1 + separate)
            ]
            self._restart(payload, self.operands)
            self.written += (self.amax,)
        linear.fprop_weight, linear.dgrad_weight = self.operands[0], self.operands[-1]
        linear.weight_amax = self.amax

    def prepare(self) -> None:
        if not self.coded:
            super().prepare()
            return
        # Whole blocks and the whole weight's amax: the codes are those of the whole weight.
        q = quantize(self.shard.to(torch.bfloat16), (BLOCK, BLOCK), amax=self.amax)
        scales = q.scales.view(torch.uint8)[::BLOCK]
        torch.cat((q.codes.reshape(-1), scales.reshape(-1)), out=self.payload[0])

    def arrived(self, gathered: Tensor) -> None:
        if self.coded:
            self.operands[0].copy_(self._decode(gathered))
        elif not self.plan.quantized:
            self.operands[0].copy_(self._rows(gathered))
        else:
            fprop, dgrad, value = formats.weight_operands(self.plan, self._rows(gathered))
            self.operands[0].copy_(fprop)
            if self.operands[-1] is not self.operands[0]:
                self.operands[-1].copy_(dgrad)
            self.amax.copy_(value)

    def _decode(self, gathered: Tensor) -> Tensor:
        """The bf16 operand of the codes that arrived from each rank, uint8 [ranks, bytes]."""
        rows, columns = self.parameter._orig_size
        split = rows * columns // 2 // len(gathered)
        codes = self._join(gathered[:, :split], rows, columns // 2)
        scales = self._join(gathered[:, split:], rows // BLOCK, columns // BLOCK)
        scales = scales.repeat_interleave(BLOCK, 0).view(torch.float8_e4m3fn)
        return QuantizedTensor(codes, scales, self.amax, (BLOCK, BLOCK)).operand()

    def _join(self, parts: Tensor, rows: int, columns: int) -> Tensor:
        """The ranks' parts, flat, as the matrix [rows, columns] that they make up."""
        if self.parameter.fsdp_placement.dim == 0:
            return parts.reshape(rows, columns)
        return parts.reshape(len(parts), rows, -1).transpose(0, 1).reshape(rows, columns)


def parameters_of(unit: nn.Module) -> list[Any]:
    """FSDP2's own records (FSDPParam) of the parameters of a unit, in the order in which they are reduced."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # PyTorch 2.11
        groups = [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


class _DefaultBuffers:
    """As FSDP2 allocates them by default."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_DefaultBuffers, AllGather):
    """FSDP2's all-gather of one unit, counted."""

    def __init__(self, traffic: Traffic, weights: list[_TravellingWeight]) -> None:
        self.traffic, self.weights = traffic, weights

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        quantized = sum(w.payload.nbytes for w in self.weights if w.quantized)
        self.traffic.all_gather("weights/quantized", quantized, group.size())
        self.traffic.all_gather("weights/other", input_tensor.nbytes - quantized, group.size())
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _QuantizedReduceScatter(_DefaultBuffers, ReduceScatter):
    """One unit's gradients, reduced part by part in their formats; all in fp32 as FSDP2 does it."""

    def __init__(self, model: ShardedModel, parts: list[reduce.Part]) -> None:
        self.model, self.parts = model, parts

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        ranks, traffic = group.size(), self.model.traffic
        if self.model.grad_reduce == "fp32":
            for part in self.parts:
                traffic.reduce_scatter(part.purpose, 4 * part.numel, ranks)
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        sizes = [part.numel // ranks for part in self.parts]
        chunks = input_tensor.view(ranks, -1).split(sizes, dim=1)
        seed, step, micro_batch = self.model.counters[:3].unbind()
        sent = [
            reduce.encode(part, chunk, CounterKey(seed, step, micro_batch, part.number))
            for part, chunk in zip(self.parts, chunks, strict=True)
        ]
        out = torch.cat(sent, dim=1)
        back = torch.empty_like(out)
        dist.all_to_all_single(back, out, group=group)
        received = back.split([x.shape[1] for x in sent], dim=1)
        for part, bytes_, total in zip(self.parts, received, output_tensor.split(sizes), strict=True):
            total.copy_(reduce.decode_sum(part, bytes_))
            traffic.all_gather(part.purpose, bytes_.shape[1], ranks)
        return None
