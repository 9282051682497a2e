"""Runs on several corpora: mixed in phases, changed on resume, killed meanwhile. Real runs and one real kill."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import string
import subprocess
import sys
import time

import pytest

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data.build import prepare
from nvfp4_train.distributed import checkpoint
from nvfp4_train.training.metrics import read_metrics
from tests.test_pretrain import in_process
from tests.text import document, write_documents
from tests.tiny import TINY

STEPS = 28  # with a checkpoint every 7
COMMON = [*TINY, f"training.max_tokens={STEPS * 8 * 32}", "training.validate_every=0", "data.workers=2"]
PHASES = "data.mixture=[{weights:{code:70,prose:30}},{start:0.5,weights:{code:20,prose:80,tiny:0}}]"
CODE = "data.mixture=[{weights:{code:1}}]"
TINY_TOO = "data.mixture=[{weights:{prose:9,tiny:1}}]"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> str:
    """The word that names three corpora of one tokenizer, one of them a few sequences long."""
    root = tmp_path_factory.mktemp("corpora")
    write_documents(root / "code", 12)
    write_documents(root / "prose", 12, seed=1)
    (root / "tiny").mkdir()
    for i in range(2):
        (root / "tiny" / f"{i}.txt").write_text(document(i)[:900])
    folders, tokenizer = {}, None
    for name in ("code", "prose", "tiny"):
        cfg = DataConfig(str(root / name), tokenizer=tokenizer, cache_dir=str(root), valid_fraction=0.2)
        folders[name] = prepare(cfg, 384, lambda line: None)
        tokenizer = tokenizer or str(folders[name] / "tokenizer.model")
    return "data.corpora={" + ",".join(f"{name}:{folder}" for name, folder in folders.items()) + "}"


def losses(run: pathlib.Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r}


def recorded(run: pathlib.Path, step: int) -> list:
    found = checkpoint.open_checkpoint(run / "checkpoints" / f"step_{step:08d}")
    return found.values["data"]["mixture"]


def test_a_run_in_two_phases_resumes_bit_for_bit_and_validates_each_corpus(corpora, tmp_path):
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    assert in_process(unbroken, *COMMON, corpora, PHASES) == (0, "")
    last = [r for r in read_metrics(unbroken / "run" / "metrics.jsonl") if "loss" in r][-1]
    for name in ("code", "prose", "tiny"):
        assert last[f"valid/{name}/loss"] > 0
        assert last[f"valid/{name}/bits_per_byte"] > 0
    shares = [[0, {"code": 0.7, "prose": 0.3}], [14, {"code": 0.2, "prose": 0.8}]]
    for steps, segments in ((13, 1), (STEPS, 2)):  # across the change of phases at step 14
        assert in_process(resumed, *COMMON, corpora, PHASES, f"training.max_steps={steps}") == (0, "")
        assert recorded(resumed / "run", steps) == shares[:segments]
    assert losses(resumed / "run") == losses(unbroken / "run")
    log = (unbroken / "run" / "console.log").read_text()
    assert "from step 14: 20 % code, 80 % prose" in log
    assert "held-out loss prose" in log


def test_the_mixture_may_change_twice_and_a_kill_in_between_changes_nothing(corpora, tmp_path):
    direct, killed = tmp_path / "direct", tmp_path / "killed"
    assert in_process(direct, *COMMON, corpora, PHASES, "training.max_steps=14") == (0, "")
    shutil.copytree(direct, killed)
    assert in_process(direct, *COMMON, corpora, TINY_TOO, "training.max_steps=21") == (0, "")
    assert in_process(direct, *COMMON, corpora, CODE) == (0, "")
    assert recorded(direct / "run", STEPS) == [
        [0, {"code": 0.7, "prose": 0.3}],
        [14, {"prose": 0.9, "tiny": 0.1}],
        [21, {"code": 1.0}],
    ]
    events = [r for r in read_metrics(direct / "run" / "metrics.jsonl") if r.get("event") == "mixture"]
    assert [(r["step"], r["segments"][-1]) for r in events][1:] == [
        (14, [14, {"prose": 0.9, "tiny": 0.1}]),
        (21, [21, {"code": 1.0}]),
    ]

    # Killed on its way with another mixture, before it saved anything, the run comes back to the checkpoint's.
    words = [*COMMON, corpora, CODE, f"run_dir={killed / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nvfp4_train.pretrain", *words, "checkpoint.every_steps=1000"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while max(losses(killed / "run")) < 16 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert max(losses(killed / "run")) >= 16
    assert in_process(killed, *COMMON, corpora, TINY_TOO, "training.max_steps=21") == (0, "")
    assert in_process(killed, *COMMON, corpora, CODE) == (0, "")
    assert losses(killed / "run") == losses(direct / "run")


def test_another_mixture_is_no_spike(corpora, tmp_path):
    """Text that is harder by nats, from step 20 on: recovery compares it with itself alone."""
    (tmp_path / "noise").mkdir()
    for i in range(8):
        letters = random.Random(i).choices(string.printable, k=4000)
        (tmp_path / "noise" / f"{i}.txt").write_text("".join(letters))
    code = corpora.split("code:")[1].split(",")[0]
    tokenizer = str(pathlib.Path(code) / "tokenizer.model")
    cfg = DataConfig(
        str(tmp_path / "noise"), tokenizer=tokenizer, cache_dir=str(tmp_path), valid_fraction=0.2
    )
    both = f"data.corpora={{code:{code},noise:{prepare(cfg, 384, lambda line: None)}}}"
    steps = 36
    words = [
        f"training.max_tokens={steps * 256}",
        "recovery.window=10",
        "recovery.max_rollbacks=0",
        "training.log_every=4",
    ]
    phases = "data.mixture=[{weights:{code:1}},{start:0.5,weights:{noise:1}}]"
    assert in_process(tmp_path, *COMMON, *words, both, phases) == (0, "")
    seen = losses(tmp_path / "run")
    assert seen[19] > seen[18] + 0.5
    assert not [
        r
        for r in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if r.get("event") == "spike" and r["step"] > 18
    ]


def test_what_cannot_be_mixed_is_refused(corpora, tmp_path):
    words = [*COMMON, corpora, PHASES, "training.max_steps=7"]
    assert in_process(tmp_path, *words) == (0, "")
    names = dict(pair.split(":") for pair in corpora.removeprefix("data.corpora={").rstrip("}").split(","))
    renamed = f"data.corpora={{other:{names['code']},prose:{names['prose']}}}"
    code, error = in_process(tmp_path, *COMMON, renamed, "data.mixture=[{weights:{other:1}}]")
    assert code == 2
    assert "data.corpora.other" in error and "trained on as code" in error  # noqa: PT018
    swapped = f"data.corpora={{code:{names['prose']},prose:{names['prose']}}}"
    code, error = in_process(tmp_path, *COMMON, swapped, CODE)
    assert code == 2
    assert "is not the data set that this run was trained on as code" in error
    code, error = in_process(tmp_path, *words, "training.seq_len=16")
    assert code == 2
    assert "training.seq_len: was 32, now 16" in error
    assert losses(tmp_path / "run").keys() == set(range(1, 8))


def test_corpora_of_two_tokenizers_are_refused(corpora, tmp_path):
    text = write_documents(tmp_path / "text", 6, seed=2)
    names = dict(pair.split(":") for pair in corpora.removeprefix("data.corpora={").rstrip("}").split(","))
    code, error = in_process(tmp_path, *COMMON, f"data.corpora={{code:{names['code']},text:{text}}}", CODE)
    assert code == 2
    assert "another tokenizer" in error and "data.tokenizer=FILE" in error  # noqa: PT018
