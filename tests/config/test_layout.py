"""Which numbers of processes a run accepts, and what it says to the others."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from nvfp4_train.config.layout import Layout, layout_of, micro_batches_a_rank, shard_dim
from nvfp4_train.config.load import compose_config
from nvfp4_train.errors import ConfigError

QUICKSTART = ["+experiment=quickstart", "training.micro_batch_size=2"]


def layout(*overrides: str, world: int | None) -> Layout:
    return layout_of(compose_config([*QUICKSTART, *overrides]), world)


def refusal(*overrides: str, world: int) -> str:
    with pytest.raises(ConfigError) as error:
        layout(*overrides, world=world)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_every_process_holds_a_shard_by_default():
    assert layout(world=4) == Layout(1, 4)
    assert layout("parallel.replicate=2", world=4) == Layout(2, 2)
    assert layout("parallel.fsdp=4", world=None) == Layout(1, 4)
    assert layout(world=None) == Layout(1, 1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_micro_batches_are_shared_evenly(world):
    cfg = compose_config(QUICKSTART)
    assert micro_batches_a_rank(cfg, layout_of(cfg, world)) * world == 4


def test_wrong_numbers_of_processes_are_told_with_the_allowed_ones():
    message = refusal(world=3)
    assert "3 data-parallel ranks" in message
    assert "use 1, 2 or 4 data-parallel ranks" in message
    assert "training.global_batch_size to 6 or 12" in message
    assert "set training.micro_batch_size to 1" in refusal(world=8)
    assert "start 2 processes" in refusal("parallel.fsdp=2", world=4)
    assert "start a multiple of 3" in refusal("parallel.replicate=3", world=4)


def test_shards_keep_whole_blocks_or_are_refused_with_sizes_that_do():
    assert shard_dim(1088, 256, 4) == 0
    assert shard_dim(1088, 256, 8) == 1  # 68 blocks of rows, 16 of columns
    assert shard_dim(1088, 256, 32) is None
    assert shard_dim(1096, 256, 1) is None
    large = [
        "+experiment=12b_hybrid",
        "parallel.weight_gather=nvfp4",
        "training.global_batch_size=768",
        "parallel.fsdp=256",
    ]
    with pytest.raises(ConfigError, match=r"in_proj \[22656, 5120\].*set parallel.fsdp to .* or 64 \(and"):
        layout_of(compose_config(large), None)
    assert layout_of(compose_config([*large[:-1], "parallel.fsdp=64", "parallel.replicate=4"])) == Layout(
        4, 64
    )
    assert layout_of(compose_config([large[0], *large[2:]])) == Layout(1, 256)  # in bf16 any size fits
    with pytest.raises(ConfigError, match=r"one set of codes.*weight_blocks_2d"):
        layout("parallel.weight_gather=nvfp4", "precision.weight_blocks_2d=false", world=2)


@pytest.mark.parametrize("path", ["docs/operations.md", "scripts/slurm/pretrain.sbatch"])
def test_launches_on_many_nodes_are_shown_with_sizes_that_fit(path):
    text = (pathlib.Path(__file__).parents[2] / path).read_text()
    shown = re.findall(r"--nodes=(\d+) (?:--time=\S+ )?\S+/pretrain\.sbatch ((?:.*\\\n)*.*)", text)
    assert shown
    for nodes, words in shown:
        count = 8 * (32 if nodes == "33" else int(nodes))  # one of 33 is a spare
        words = [word for word in shlex.split(words.replace("\\\n#", "\\\n")) if "=" in word]
        assert layout_of(compose_config(words), count).ranks == count
