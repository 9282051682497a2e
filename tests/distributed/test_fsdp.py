"""The same training in one process and in several, over gloo."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from nvfp4_train.distributed.processes import ALONE
from tests.distributed import train_in_ranks
from tests.distributed.ranks import run_ranks

FP32, NVFP4 = ["precision=fp32"], ["precision=nvfp4"]


def in_ranks(n: int, folder: pathlib.Path, runs: dict[str, list[str]]) -> dict:
    out = folder / "results.pt"
    run_ranks(n, train_in_ranks.__file__, str(out), json.dumps(runs))
    return torch.load(out)


@pytest.fixture(scope="module")
def alone() -> dict:
    runs = {"fp32": FP32, "nvfp4": NVFP4}
    return {
        name: train_in_ranks.train(train_in_ranks.tiny_config(*words), ALONE) for name, words in runs.items()
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict:
    return in_ranks(2, tmp_path_factory.mktemp("two"), {"fp32": FP32, "nvfp4": NVFP4})


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> dict:
    hybrid = ["parallel.replicate=2"]
    return in_ranks(
        4, tmp_path_factory.mktemp("four"), {"fp32": [*FP32, *hybrid], "nvfp4": [*NVFP4, *hybrid]}
    )


@pytest.fixture(params=["two", "four"])
def several(request) -> dict:
    return request.getfixturevalue(request.param)


def test_initial_weights_are_those_of_one_process_bit_by_bit(alone, several):
    for name, value in alone["fp32"]["initial"].items():
        assert torch.equal(several["fp32"]["initial"][name], value), name


def test_fp32_training_is_that_of_one_process(alone, several):
    torch.testing.assert_close(several["fp32"]["losses"], alone["fp32"]["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(several["fp32"]["norms"], alone["fp32"]["norms"], rtol=1e-5, atol=0)


def test_nvfp4_starts_from_the_same_loss_and_stays_close(alone, several):
    assert several["nvfp4"]["losses"][0] == alone["nvfp4"]["losses"][0]
    torch.testing.assert_close(several["nvfp4"]["losses"], alone["nvfp4"]["losses"], rtol=0.02, atol=0)
