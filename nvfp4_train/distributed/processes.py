"""The processes of a run: which of them this is, what they share, and how they agree.

Under torchrun every process is a rank of one group (NCCL between GPUs, gloo between CPUs); started alone, a process is
rank 0 of 1 and nothing here communicates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nvfp4_train.config.layout import Layout
from nvfp4_train.distributed.agreement import Group, control_group
from nvfp4_train.distributed.failures import START_TIMEOUT, record_collectives
from nvfp4_train.distributed.traffic import Traffic
from nvfp4_train.errors import ConfigError

REPLICATE, FSDP = "replicate", "fsdp"
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # new name since 2.13


@dataclass(frozen=True)
class Processes:
    """This process among `size`. `mesh` (replicate, fsdp) is None where a process runs alone, without a group.

    Every rank is data-parallel. Collectives are the same calls on every rank, in the same order.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    control: Group = None  # of host values (agreement.py)
    traffic: Traffic = field(default_factory=Traffic)  # what this rank has sent to the others

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that writes to disk and screen."""
        return self.rank == 0

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the shards of one copy of the model."""
        return None if self.mesh is None else self.mesh.get_group(FSDP)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(value)
            self.traffic.all_reduce("scalars", value.nbytes, self.size)
        return value

    def sum_of_shards(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold the shards of one copy of the model, in place."""
        if self.mesh is not None:
            dist.all_reduce(value, group=self.shard_group)
            self.traffic.all_reduce("scalars", value.nbytes, self.shard_group.size())
        return value

    def concatenate(self, value: Tensor) -> Tensor:
        """The ranks' tensors [n], one after the other: [size * n]."""
        if self.mesh is None:
            return value
        out = value.new_empty(self.size * len(value))
        all_gather(out, value)
        self.traffic.all_gather("scalars", value.nbytes, self.size)
        return out

    def stop(self) -> None:
        """Leave the group; the last call."""
        if self.mesh is not None:
            dist.destroy_process_group()


ALONE = Processes()


def launched() -> bool:
    """Whether a launcher (torchrun) started this process as one of a group, be it a group of one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(device: torch.device, layout: Layout, failures: Path | None = None) -> Processes:
    """Join the group that the launcher describes; a process started alone joins none.

    A CUDA rank takes the GPU of its number on this machine. `failures`: the folder for records of collectives that fail.
    """
    if not launched():
        return ALONE
    if failures is not None:
        record_collectives(failures)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, size = _store()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=START_TIMEOUT)
    return Processes(dist.get_rank(), dist.get_world_size(), make_mesh(device.type, layout), control_group())


def _store() -> tuple[dist.Store, int, int]:
    """The group's store, this rank, and the number of ranks, from the launcher's environment variables.

    torchrun's agents may share one store over all restarts (torch 2.13): without a prefix of its own a restarted rank would
    look for the processes that are gone. Their number of restarts is the same for all ranks on one machine only.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store = dist.TCPStore(
        address, port, size, is_master=rank == 0 and not shared, timeout=START_TIMEOUT, wait_for_workers=False
    )
    if not shared:
        return store, rank, size
    if (
        os.environ.get("LOCAL_WORLD_SIZE") != str(size)
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ):
        raise ConfigError(
            "torchrun --max-restarts on several machines needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment "
            "(scripts/dgx/launch.sh starts them again by itself): without it restarted ranks can't find each other."
        )
    return dist.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), rank, size


def make_mesh(device_type: str, layout: Layout) -> DeviceMesh:
    """The device mesh [replicate, fsdp]; more dimensions (tensor, context) would follow on the right."""
    return init_device_mesh(device_type, (layout.replicate, layout.fsdp), mesh_dim_names=(REPLICATE, FSDP))
