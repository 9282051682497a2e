"""The same training in one process and in several, over gloo."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import torch.distributed as dist

from nvfp4_train.config.layout import Layout
from nvfp4_train.distributed.processes import ALONE, Processes, make_mesh
from nvfp4_train.distributed.traffic import plan
from nvfp4_train.model.hybrid import HybridModel
from tests.distributed import train_in_ranks
from tests.distributed.ranks import run_ranks

# 3 and 2 blocks: up_proj splits over two ranks by columns alone.
FP32, NVFP4 = ["precision=fp32"], ["model.intermediate_size=48"]
PACKED = [*NVFP4, "parallel.weight_gather=nvfp4", "parallel.grad_reduce=nvfp4"]
FP8 = [*NVFP4, "parallel.grad_reduce=fp8"]
WORDS = {"fp32": FP32, "nvfp4": NVFP4, "packed": PACKED, "fp8": FP8}


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
    return in_ranks(2, tmp_path_factory.mktemp("two"), WORDS)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> dict:
    runs = {name: [*WORDS[name], "parallel.replicate=2"] for name in ("fp32", "nvfp4", "packed")}
    return in_ranks(4, tmp_path_factory.mktemp("four"), runs)


@pytest.fixture(scope="module")
def one() -> dict:
    """A group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Processes(mesh=make_mesh("cpu", Layout(1, 1)))
    results = {
        name: train_in_ranks.train(train_in_ranks.tiny_config(*WORDS[name]), group)
        for name in ("fp32", "nvfp4", "packed")
    }
    group.stop()
    return results


@pytest.fixture(params=["one", "two", "four"])
def several(request) -> dict:
    return request.getfixturevalue(request.param)


def test_initial_weights_are_those_of_one_process_bit_by_bit(alone, several):
    for name, value in alone["fp32"]["initial"].items():
        assert torch.equal(several["fp32"]["initial"][name], value), name


@pytest.fixture(scope="module")
def rounding(alone) -> torch.Tensor:
    """(steps,), relative: how far norms move when one process adds the batch's rows in other orders.

    From step to step it grows: Adam divides gradients by their own size, so an element that is mostly rounding
    still moves its weight by a whole learning rate.
    """
    cfg, draw = train_in_ranks.tiny_config(*FP32), torch.Generator().manual_seed(5)
    orders = [torch.randperm(train_in_ranks.BATCH, generator=draw).tolist() for _ in range(8)]
    norms = torch.tensor([train_in_ranks.train(cfg, ALONE, order=order)["norms"] for order in orders])
    here = torch.tensor(alone["fp32"]["norms"])
    return ((norms - here).abs() / here).amax(0)


def test_fp32_training_is_that_of_one_process(alone, several, rounding):
    torch.testing.assert_close(several["fp32"]["losses"], alone["fp32"]["losses"], rtol=1e-5, atol=0)
    norms, expected = (torch.tensor(run["fp32"]["norms"]) for run in (several, alone))
    # Four times the largest of eight draws; where none moved it, what the order of fp32 sums may do to a norm.
    bound = (4 * rounding).clamp(min=1e-6)
    assert rounding.max() < 1e-4
    assert ((norms - expected).abs() <= bound * expected).all(), (norms, expected, bound)


@pytest.mark.parametrize("traffic", ["nvfp4", "packed"])
def test_nvfp4_starts_from_the_same_loss_and_stays_close(alone, several, traffic):
    assert several[traffic]["losses"][0] == alone["nvfp4"]["losses"][0]
    torch.testing.assert_close(several[traffic]["losses"], alone["nvfp4"]["losses"], rtol=0.02, atol=0)


def test_gathered_operands_are_those_of_the_whole_weights_bit_by_bit(several):
    for run in several.values():
        assert run["operands_differ"] == []


def test_a_gradient_that_is_not_finite_changes_no_weight_on_any_rank(alone, several):
    for run in [*alone.values(), *several.values()]:
        assert run["nan_skipped"] == 1.0
        assert run["nan_changed"] == []


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (Layout(1, 1), "packed"),
        *((Layout(1, 2), run) for run in WORDS),
        (Layout(2, 2), "nvfp4"),
        (Layout(2, 2), "packed"),
    ],
)
def test_bytes_sent_are_those_that_the_plan_foretells(layout, run, request):
    fixture = {1: "one", 2: "two", 4: "four"}[layout.ranks]
    cfg = train_in_ranks.tiny_config(*WORDS[run])
    shapes = {name: tuple(p.shape) for name, p in HybridModel(cfg.model, "meta").named_parameters()}
    planned = {name: n * train_in_ranks.STEPS for name, n in plan(shapes, cfg, layout).items()}
    sent = {name: n for name, n in request.getfixturevalue(fixture)[run]["sent"].items() if n}
    assert sent == planned
    assert ("gradients/copies" in sent) == (layout.replicate > 1)
    assert ("scalars" in sent) == (layout.ranks > 1)
