"""How the processes of a run share its model and its batches. No torch here: a wrong size is told at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nvfp4_train.config.blocking import BLOCK, plans, quantized_layers
from nvfp4_train.config.checks import at_least, one_of
from nvfp4_train.config.schema import Config, ParallelConfig
from nvfp4_train.errors import ConfigError

WEIGHT_GATHERS = ("bf16", "nvfp4")
GRAD_REDUCES = ("fp32", "bf16", "fp8", "nvfp4")


@dataclass(frozen=True)
class Layout:
    """`replicate` groups of `fsdp` ranks: the ranks of a group hold one shard each, the groups hold the same.

    Tensor and context parallelism will be further dimensions of the mesh; every rank is data-parallel until then.
    """

    replicate: int
    fsdp: int

    @property
    def ranks(self) -> int:
        """Data-parallel ranks, all of which see other sequences."""
        return self.replicate * self.fsdp

    def describe(self, cfg: Config) -> str:
        """One line for people."""
        copies = f"{self.replicate} copies of the model, each in {self.fsdp} shards" * (self.replicate > 1)
        travel = f"weights gathered as {cfg.parallel.weight_gather}, gradients reduced in {cfg.parallel.grad_reduce}"
        return f"{self.ranks}: {copies or f'{self.fsdp} shards of the model'}; {travel}"


def world_size() -> int:
    """Processes that the launcher started (torchrun sets WORLD_SIZE)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def layout_of(cfg: Config, world: int | None = None) -> Layout:
    """The layout of `cfg` on `world` processes: parallel.fsdp=null takes all of them (over parallel.replicate).

    `world` None leaves the number of processes open, for the plan of a run. Raises ConfigError where sizes don't fit,
    with those that do.
    """
    parallel = cfg.parallel
    for name, value in {"tensor": parallel.tensor, "context": parallel.context}.items():
        if value != 1:
            raise ConfigError(f"parallel.{name}={value} is not supported yet: leave it at 1.")
    at_least(parallel, "parallel", 1, "fsdp", "replicate")
    one_of("parallel.weight_gather", parallel.weight_gather, WEIGHT_GATHERS)
    one_of("parallel.grad_reduce", parallel.grad_reduce, GRAD_REDUCES)
    for key in ("weight_gather", "grad_reduce"):
        value = getattr(parallel, key)
        if value in ("fp8", "nvfp4") and cfg.precision.name != "nvfp4":
            raise ConfigError(
                f"parallel.{key}={value} is for the weights that precision=nvfp4 quantizes, and precision="
                f"{cfg.precision.name} has none: leave it at {getattr(ParallelConfig(), key)}."
            )
    layout = Layout(parallel.replicate, parallel.fsdp or max(1, (world or 1) // parallel.replicate))
    if world is not None and layout.ranks != world:
        keys = f"parallel.replicate={layout.replicate}" + (
            f" x parallel.fsdp={parallel.fsdp}" * bool(parallel.fsdp)
        )
        remedy = (
            f"start {layout.ranks} processes, or set parallel.fsdp to null"
            if parallel.fsdp
            else f"start a multiple of {layout.replicate}"
        )
        raise ConfigError(f"{keys} doesn't make the {world} processes that were started: {remedy}.")
    _check_batches(cfg, layout)
    if parallel.weight_gather == "nvfp4":
        _check_blocks(cfg, layout)
    return layout


def shard_dim(rows: int, columns: int, fsdp: int) -> int | None:
    """The dimension along which a weight [rows, columns] splits into `fsdp` shards of whole 16x16 blocks, rows first;
    None where neither does."""
    if rows % BLOCK or columns % BLOCK:
        return None
    return next((dim for dim, size in enumerate((rows, columns)) if size // BLOCK % fsdp == 0), None)


def micro_batches_a_rank(cfg: Config, layout: Layout) -> int:
    """Micro-batches that each rank takes of a step."""
    return cfg.training.global_batch_size // cfg.training.micro_batch_size // layout.ranks


def _check_batches(cfg: Config, layout: Layout) -> None:
    """A step's micro-batches are the same at every number of ranks, since a tensor scale spans one of them."""
    training = cfg.training
    micro_batches = training.global_batch_size // training.micro_batch_size
    if micro_batches % layout.ranks == 0:
        return
    allowed = [n for n in range(1, micro_batches + 1) if micro_batches % n == 0]
    rank_batch = training.global_batch_size / layout.ranks
    remedies = [f"use {_words(allowed, layout.ranks)} data-parallel ranks"]
    if rank_batch == int(rank_batch):
        sizes = [n for n in range(1, int(rank_batch) + 1) if rank_batch % n == 0]
        remedies.append(f"set training.micro_batch_size to {_words(sizes, training.micro_batch_size)}")
    else:
        unit = layout.ranks * training.micro_batch_size
        sizes = sorted(
            {max(1, training.global_batch_size // unit) * unit, -(-training.global_batch_size // unit) * unit}
        )
        remedies.append(f"set training.global_batch_size to {' or '.join(map(str, sizes))}")
    raise ConfigError(
        f"{layout.ranks} data-parallel ranks can't share the {micro_batches} micro-batches of a step evenly "
        f"(training.global_batch_size={training.global_batch_size}, training.micro_batch_size="
        f"{training.micro_batch_size}): {', or '.join(remedies)}."
    )


def _check_blocks(cfg: Config, layout: Layout) -> None:
    """Codes are gathered in whole 16x16 blocks, so every shard must consist of them."""
    for layer, plan in plans(cfg):
        if plan.quantized and not plan.has_square_codes:
            raise ConfigError(
                f"parallel.weight_gather=nvfp4 gathers one set of codes in 16x16 blocks for both GEMMs of a weight, and the "
                f"recipe gives {layer.name} others (precision.weight_blocks_2d, four_over_six or rules): use "
                "parallel.weight_gather=bf16."
            )
    layers = quantized_layers(cfg)

    def fits(n: int) -> bool:
        return all(shard_dim(layer.out_features, layer.in_features, n) is not None for layer in layers)

    if fits(layout.fsdp):
        return
    n = layout.fsdp
    layer = next(m for m in layers if shard_dim(m.out_features, m.in_features, n) is None)
    allowed = [m for m in range(1, n) if fits(m) and layout.ranks % m == 0]
    raise ConfigError(
        f"parallel.fsdp={n}: {layer.name} [{layer.out_features}, {layer.in_features}] doesn't split into {n} shards of "
        f"whole 16x16 blocks along either dimension, as parallel.weight_gather=nvfp4 needs: set parallel.fsdp to "
        f"{_words(allowed, n)} (and parallel.replicate to the rest), or use parallel.weight_gather=bf16."
    )


def _words(numbers: list[int], near: int) -> str:
    """ "1, 2 or 4"; of many the six nearest `near`."""
    shown = sorted(sorted(numbers, key=lambda n: abs(n - near))[:6])
    return " or ".join(filter(None, (", ".join(map(str, shown[:-1])), str(shown[-1]))))
