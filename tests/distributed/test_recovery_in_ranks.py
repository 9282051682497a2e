"""Recovery in several processes: every rank takes the same decisions, which are those of one process alone."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.distributed import recover_in_ranks
from tests.distributed.ranks import run_ranks
from tests.text import data_words
from tests.tiny import TINY

WORDS = [
    *TINY,
    "training.max_tokens=7680",
    "training.micro_batch_size=2",
    "training.validate_every=0",
    "training.sample_tokens=0",
    "checkpoint.every_steps=12",
    "recovery=auto",
    "recovery.window=5",
    "recovery.snapshot_every=10",
    "recovery.skip_margin=1",
    "recovery.confirm_within=4",
    "recovery.confirm=3",
    "recovery.max_rollbacks=2",
    "recovery.careful_steps=5",
    "precision.health_every=10",
    "faults=[{kind:nan,step:14,steps:99,rank:0,repeat:true}]",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    """What one process decides, without a group."""
    (seen,) = in_ranks(1, tmp_path_factory.mktemp("alone"))
    return seen


def in_ranks(n: int, folder: pathlib.Path) -> list[list[dict]]:
    """What each of `n` ranks saw and decided."""
    run_ranks(
        n, recover_in_ranks.__file__, str(folder), *WORDS, *data_words(folder), f"run_dir={folder / 'run'}"
    )
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(n)]
    assert [each["code"] for each in found] == [76] * n
    assert (folder / "run" / "recovery_report.md").exists()
    return [each["seen"] for each in found]


def test_every_rank_climbs_the_same_ladder(alone, tmp_path):
    first, second = in_ranks(2, tmp_path)
    assert first == second  # every loss, rate and decision of every step
    rewinds = [entry for entry in first if "plan" in entry]
    assert [entry["state"] for entry in rewinds] == [12, 10]
    assert rewinds[1]["plan"]["bf16"]
    assert [entry["plan"]["skip"] for entry in rewinds] == [
        entry["plan"]["skip"] for entry in alone if "plan" in entry
    ]
