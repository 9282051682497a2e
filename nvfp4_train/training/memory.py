"""The memory that training takes on one device, without a tensor allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nvfp4_train.config.layout import Layout
from nvfp4_train.config.schema import Config
from nvfp4_train.model.flops import LinearLayer, linear_layers, linear_parameters, parameter_count
from nvfp4_train.model.hybrid import Block
from nvfp4_train.model.loss import SLICE_ELEMENTS
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.triton_conv import split_conv_silu_triton
from nvfp4_train.model.triton_scan import ssd_triton
from nvfp4_train.precision.producers import rms_norm
from nvfp4_train.precision.recipe import LinearPlan, phases_of, plan_for

# What torch.compile keeps on a CPU of the activations that eager autograd keeps: 0.5 to 0.6 of a model, measured on
# quickstart and 125m_hybrid; it recomputes elementwise results in the backward pass. On a GPU the kernels leave little to
# recompute (`_with_kernels`).
COMPILED_SHARE = 0.5

ONE = Layout(1, 1)


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment of a step: the end of a micro-batch's forward pass. torch itself and the working memory
    of single operations come on top."""

    weights: int  # fp32 master weights
    moments: int  # AdamW's two, fp32
    gradients: int  # fp32
    operands: int  # the linear weights in bf16: NVFP4 operands, or copies of the layers in BF16
    activations: int  # what autograd keeps of one micro-batch's blocks
    head: int  # a slice of logits, and the gradients that the loss makes in its forward pass
    saving: int  # weights and moments again, the copy that a checkpoint is written from, where that is this memory
    snapshots: int  # and once more for each of recovery's copies, likewise
    gathered: int = 0  # of a sharded model: what is whole at one time (`_gathered`)

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def estimate(cfg: Config, device_type: str, layout: Layout = ONE) -> Memory:
    """The memory of the run that `cfg` describes, on one device (a rank's) of this type ("cpu" or "cuda")."""
    n = parameter_count(cfg.model) // layout.fsdp
    per_phase = [_blocks(cfg, phase.name, device_type) for phase in phases_of(cfg.precision)]
    activations = max(activations for activations, _ in per_phase)
    return Memory(
        weights=4 * n,
        moments=8 * n,
        gradients=4 * n,
        operands=max(operands for _, operands in per_phase) // layout.fsdp,
        activations=activations,
        head=_head(cfg, device_type),
        saving=12 * n if device_type == "cpu" else 0,
        snapshots=snapshots_kept(cfg) * 12 * n if device_type == "cpu" else 0,
        gathered=_gathered(cfg) if layout.ranks > 1 else 0,
    )


def host_copies(cfg: Config, layout: Layout = ONE) -> int:
    """Bytes of weights and moments that a rank copies to the machine's memory: for saving, and for rewinds."""
    return (1 + snapshots_kept(cfg)) * 12 * (parameter_count(cfg.model) // layout.fsdp)


def snapshots_kept(cfg: Config) -> int:
    """Copies of the state that recovery keeps in the machine's memory."""
    return cfg.recovery.snapshots if cfg.recovery.name == "auto" else 0


def _gathered(cfg: Config) -> int:
    """Of two blocks what arrived and what is multiplied, both bf16; of one the gradient and what is reduced, both fp32. Of
    embeddings or head: what arrived, the same in fp32, the gradient and what is reduced."""
    block = max(linear_parameters(letter, cfg.model) for letter in cfg.model.pattern)
    table = cfg.model.vocab_size * cfg.model.hidden_size
    return max(2 * block * (2 + 2) + block * (4 + 4), table * (2 + 4 + 4 + 4))


def compute_dtype(cfg: Config) -> torch.dtype:
    """The dtype of activations."""
    return torch.float32 if cfg.precision.name == "fp32" else torch.bfloat16


def has_kernels(cfg: Config, device_type: str) -> bool:
    """Whether the GPU kernels of `model/kernels.py` run."""
    return device_type == "cuda" and compute_dtype(cfg) == torch.bfloat16 and cfg.training.kernels != "torch"


def compiled_share(cfg: Config, device_type: str) -> float:
    """What is kept of what `kept_bytes` says, `training.recompute` aside."""
    return 1.0 if cfg.training.compile == "off" or has_kernels(cfg, device_type) else COMPILED_SHARE


def kept_bytes(letter: str, cfg: Config, plans: Mapping[str, LinearPlan], device_type: str = "cpu") -> int:
    """Bytes that autograd keeps of one block's forward pass over a micro-batch, weights and their copies aside: in eager
    mode, but that on a GPU a compiled norm keeps its input alone.

    The block runs on tensors without data. plans: {name of a linear in the mixer: its plan}.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    model, dtype = cfg.model, compute_dtype(cfg)
    with FakeTensorMode():
        block = Block(letter, model, "cpu")
        copies = 0
        for name, plan in plans.items():
            linear = getattr(block.mixer, name)
            linear.plan = plan
            if plan.quantized:
                linear.fused_producers = has_kernels(cfg, device_type)
                linear.fprop_weight = linear.dgrad_weight = torch.empty_like(
                    linear.weight, dtype=dtype
                ).detach()
                linear.weight_amax, linear.rng = torch.empty(()), torch.empty(4, dtype=torch.int64)
            elif dtype != torch.float32:
                copies += linear.weight.numel() * dtype.itemsize
        if has_kernels(cfg, device_type):
            _with_kernels(block, cfg)
        shape = (cfg.training.micro_batch_size, cfg.training.seq_len)
        seq_idx = torch.zeros(shape, dtype=torch.int32) if cfg.data.reset_state_at_documents else None
        x = torch.empty(*shape, model.hidden_size, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(x, seq_idx)
        for tensor in (*block.parameters(), *block.buffers()):
            kept.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values()) - copies


def _with_kernels(block: Block, cfg: Config) -> None:
    """Have the block run those of `choose_kernels` (mamba-ssm's scan keeps about as much as ours)."""
    if isinstance(block.mixer, Mamba2):
        block.mixer.scan = ssd_triton
        block.mixer.conv1d.split_conv_silu = split_conv_silu_triton
        block.mixer.norm.fused = True
    if cfg.training.compile != "off":  # as the kernel Inductor's code keeps a norm's input alone
        norm = block.norm
        norm.forward = lambda x, into=None: rms_norm(x, norm.weight, norm.eps, into, fused=True)


def _blocks(cfg: Config, phase: str, device_type: str) -> tuple[int, int]:
    """(activations, operands) of all blocks in a phase, in bytes. Blocks that are alike are measured once."""
    pattern = cfg.model.pattern
    blocks: dict[int, dict[str, LinearPlan]] = {block: {} for block in range(len(pattern))}
    operands = 0
    for layer in linear_layers(cfg.model):
        plan = plan_for(cfg.precision, layer.name, layer.block, len(pattern), phase)
        blocks[layer.block][layer.name.rsplit(".", 1)[1]] = plan
        operands += _operand_bytes(layer, plan, cfg)
    measured: dict[tuple, int] = {}
    kept = []
    for block, plans in blocks.items():
        key = (pattern[block], *plans.items())
        if key not in measured:
            measured[key] = kept_bytes(pattern[block], cfg, plans, device_type)
        kept.append(measured[key])
    return _activations(cfg, kept, list(blocks.values()), device_type), operands


def _activations(cfg: Config, kept: list[int], plans: list[dict[str, LinearPlan]], device_type: str) -> int:
    """Bytes that a forward pass leaves behind, from what each block's would in eager mode (model/recompute.py)."""
    training = cfg.training
    row = training.micro_batch_size * training.seq_len * compute_dtype(cfg).itemsize  # bytes of one feature
    share = compiled_share(cfg, device_type)
    if training.recompute == "budget":
        share *= training.recompute_budget
    if training.recompute == "block":  # the inputs, and all of the block that is being recomputed
        return round(len(kept) * row * cfg.model.hidden_size + share * max(kept))
    total = sum(kept)
    if training.recompute == "squared_relu":
        down = [block["down_proj"] for block in plans if "down_proj" in block]
        total -= row * cfg.model.intermediate_size * sum("wgrad.input" not in plan.quantized for plan in down)
    return round(share * total)


def _operand_bytes(layer: LinearLayer, plan: LinearPlan, cfg: Config) -> int:
    if cfg.precision.name == "fp32":
        return 0
    both = {"fprop.weight", "dgrad.weight"} & plan.quantized
    copies = 2 if both and not plan.square_weights else 1
    return copies * 2 * layer.out_features * layer.in_features


def _head(cfg: Config, device_type: str) -> int:
    """loss.head_loss: logits in the compute dtype and fp32, their gradients in both, for one slice of tokens (the Triton
    kernel: logits in bf16 alone); the gradients of hidden states (compute dtype) and head (fp32), and the head in the
    compute dtype."""
    vocab, hidden, size = cfg.model.vocab_size, cfg.model.hidden_size, compute_dtype(cfg).itemsize
    in_place = has_kernels(cfg, device_type)
    tokens = cfg.training.micro_batch_size * cfg.training.seq_len
    rows = min(tokens, max(1, SLICE_ELEMENTS[device_type] // vocab))
    logits = size if in_place else 2 * (4 + size)
    return rows * vocab * logits + tokens * hidden * size + vocab * hidden * (4 + size)
