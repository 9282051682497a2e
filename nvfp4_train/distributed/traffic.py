"""Every byte that a rank sends, by purpose: counted where the collectives are called, and foretold for the plan of a run.

A ring (or a direct exchange) among W ranks sends, from each rank: of an all-gather or an all-to-all W - 1 times what goes to
each other rank, of a reduce-scatter (W - 1) / W of what it puts in, of an all-reduce twice that.

Purposes: weights and gradients of the tensors that the precision quantizes ("weights/quantized") and of all others
("weights/other"); the reduction of weight maxima ("weights/amax"); the sum over copies of the model ("gradients/copies");
"scalars": number of targets, micro-batches' losses, gradient norm, some 10 bytes a step and other rank. In a step in which
health is recorded its few numbers are counted with these, but not foretold. Left out: what isn't a step's (start,
validation, saves, rewinds), the flag of 4 bytes by which ranks agree to stop, clipping=adagc's norms (4 bytes a tensor).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nvfp4_train.config.blocking import BLOCK, quantized_layers
from nvfp4_train.config.layout import Layout, micro_batches_a_rank, shard_dim
from nvfp4_train.config.schema import Config
from nvfp4_train.distributed.reduce import Part

Shapes = Mapping[str, tuple[int, ...]]  # parameter name -> shape, in the model's order


@dataclass
class Traffic:
    """Bytes that this rank has sent since the last `take`, by purpose."""

    sent: Counter[str] = field(default_factory=Counter)

    def all_gather(self, purpose: str, n_bytes: int, ranks: int) -> None:
        """`n_bytes` go to every other rank; an all-to-all likewise."""
        self.sent[purpose] += n_bytes * (ranks - 1)

    def reduce_scatter(self, purpose: str, n_bytes: int, ranks: int) -> None:
        """`n_bytes` on every rank are summed, and each keeps its share."""
        self.sent[purpose] += n_bytes * (ranks - 1) // ranks

    def all_reduce(self, purpose: str, n_bytes: int, ranks: int) -> None:
        """`n_bytes` on every rank are summed for all."""
        self.sent[purpose] += 2 * n_bytes * (ranks - 1) // ranks

    def take(self) -> dict[str, int]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, Counter()
        return dict(sent)


def quantized_weights(cfg: Config) -> set[str]:
    """Names of the parameters that have an operand in 4 or 8 bits in some phase of the run."""
    return {f"{layer.name}.weight" for layer in quantized_layers(cfg)}


def gradient_parts(shapes: Shapes, cfg: Config, layout: Layout) -> dict[str, Part]:
    """How each parameter's gradient is sharded and reduced.

    With parallel.grad_reduce other than fp32: quantized weights in that format; other matrices in bf16; norms, convolutions
    and Mamba's vectors, a few in a thousand of the bytes, in fp32. Numbers of random bits follow those of the layers.
    """
    quantized, reduce = quantized_weights(cfg), cfg.parallel.grad_reduce
    parts = {}
    for i, (name, shape) in enumerate(shapes.items()):
        linear = ".mixer." in name and len(shape) == 2
        dim = (shard_dim(*shape, layout.fsdp) or 0) if linear else 0
        padded = list(shape)
        padded[dim] = -(-shape[dim] // layout.fsdp) * layout.fsdp
        format = "fp32" if reduce == "fp32" or len(shape) != 2 else reduce if name in quantized else "bf16"
        parts[name] = Part(name, tuple(padded), dim, format, len(shapes) + i, name in quantized)
    return parts


def plan(shapes: Shapes, cfg: Config, layout: Layout) -> dict[str, int]:
    """Bytes that each rank sends in a step, by purpose, of a run in its quantizing phase."""
    traffic, fsdp = Traffic(), layout.fsdp
    coded = 0
    for name, part in gradient_parts(shapes, cfg, layout).items():
        kind = "quantized" if part.quantized else "other"
        codes = part.quantized and cfg.parallel.weight_gather == "nvfp4"
        coded += codes
        travels = weight_bytes(part, cfg, codes) // fsdp
        # The forward pass gathers a weight, and so does the backward pass, unless its gradient doesn't depend on it.
        times = 1 if name in ("embeddings.weight", "lm_head.weight") else 2
        traffic.all_gather(f"weights/{kind}", times * travels, fsdp)
        if cfg.parallel.grad_reduce == "fp32":
            traffic.reduce_scatter(f"gradients/{kind}", 4 * part.numel, fsdp)
        else:
            traffic.all_gather(f"gradients/{kind}", part.bytes_a_rank(fsdp), fsdp)
        traffic.all_reduce("gradients/copies", 4 * part.numel // fsdp, layout.replicate)
    micro_batches = micro_batches_a_rank(cfg, layout)
    sent = {purpose: n * micro_batches for purpose, n in traffic.take().items()}
    traffic.all_reduce("weights/amax", 4 * coded, fsdp)
    traffic.all_reduce("scalars", 8, layout.ranks)  # the number of targets, int64
    traffic.all_gather("scalars", 4 * micro_batches, layout.ranks)  # their losses, fp32
    traffic.all_reduce("scalars", 4, fsdp)  # the gradients' squares, fp32
    return {purpose: n for purpose, n in (sent | traffic.take()).items() if n}


def weight_bytes(part: Part, cfg: Config, codes: bool) -> int:
    """Bytes of a whole weight as it travels."""
    if codes:
        return part.numel // 2 + part.numel // BLOCK**2
    matrix = len(part.shape) == 2 and cfg.precision.name != "fp32"
    return part.numel * (2 if matrix else 4)


def bf16_plan(shapes: Shapes, cfg: Config, layout: Layout) -> dict[str, int]:
    """The same of BF16 FSDP: matrices gathered and all gradients reduced in 2 bytes an element."""
    parallel = replace(cfg.parallel, weight_gather="bf16", grad_reduce="fp32")
    sent = plan(shapes, replace(cfg, parallel=parallel), layout)
    return {purpose: n // 2 if purpose.startswith("gradients") else n for purpose, n in sent.items()}
