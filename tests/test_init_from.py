"""A run that starts from weights that are there: of a Hugging Face folder, of another run."""

from __future__ import annotations

import re
import shutil

import pytest

from nvfp4_train import export, pretrain
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.validate import validate
from nvfp4_train.errors import CheckpointError, ConfigError
from nvfp4_train.training import init_from
from nvfp4_train.training.inference import load_run
from nvfp4_train.training.metrics import read_metrics
from tests.text import write_documents
from tests.tiny import TINY


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A finished run of 12 steps and its exports."""
    root = tmp_path_factory.mktemp("init_from")
    data = [f"data.source={write_documents(root / 'text', seed=3)}", f"data.cache_dir={root / 'cache'}"]
    words = [*TINY, *data, "training.max_steps=12", "training.sample_tokens=0"]
    pretrain.main([*words, f"run_dir={root / 'run'}", "logging.peak_tflops=0.5"])
    for dtype in ("fp32", "bf16"):
        export.main([f"run={root / 'run'}", f"out={root / dtype}", f"dtype={dtype}"])
    return root, words


def losses(folder):
    return [r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]


def test_mfu_is_written_where_a_peak_is_known(folders):
    """The tiny run of this module is given one; the log says which."""
    root, _ = folders
    records = [r for r in read_metrics(root / "run" / "metrics.jsonl") if "loss" in r]
    assert all(r["mfu"] == r["tflops"] / 0.5 for r in records)
    log = (root / "run" / "console.log").read_text()
    assert re.search(r"MFU +of 0\.5 TFLOP/s \(logging\.peak_tflops\)", log)


def test_training_goes_on_from_the_weights_of_a_hugging_face_folder(folders):
    root, words = folders
    sources = {
        "a": root / "fp32",
        "b": root / "run",
        "c": root / "run/checkpoints/step_00000012",
        "d": root / "bf16",
    }
    after = {}
    for name, source in sources.items():
        pretrain.main([*words, f"run_dir={root / name}", f"init_from={source}", "training.max_steps=3"])
        after[name] = losses(root / name)
    before = losses(root / "run")
    assert after["a"] == after["b"] == after["c"]  # the same numbers however they are stored
    assert abs(after["d"][0] - after["a"][0]) < 0.01
    assert after["a"][0] < before[0] - 0.5
    assert "weights from" in (root / "a" / "console.log").read_text()


def test_once_it_has_a_checkpoint_the_run_needs_its_source_no_more(folders):
    root, words = folders
    shutil.copytree(root / "fp32", root / "gone")
    words = [*words, f"run_dir={root / 'resumes'}", f"init_from={root / 'gone'}"]
    pretrain.main([*words, "training.max_steps=2"])
    shutil.rmtree(root / "gone")
    pretrain.main([*words, "training.max_steps=3"])
    assert len(losses(root / "resumes")) == 3


def test_another_model_is_refused_with_the_keys_to_set(folders):
    root, words = folders
    for source in (root / "fp32", root / "run"):
        cfg = compose_config(
            [*words, f"run_dir={root / 'x'}", f"init_from={source}", "model.intermediate_size=96"]
        )
        with pytest.raises(ConfigError, match=r"intermediate_size 96\): set model\.intermediate_size=64\.$"):
            validate(cfg)


def test_another_tokenizer_is_refused(folders, tiny_run):
    root, words = folders
    cfg = compose_config([*words, f"run_dir={root / 'x'}", f"init_from={root / 'fp32'}"])
    with pytest.raises(CheckpointError, match=r"another tokenizer .* set data\.tokenizer=.*tokenizer\.model"):
        init_from.weight_source(cfg, tiny_run.dataset.tokenizer, pytest.fail)
    said = []
    shutil.copytree(root / "fp32", root / "no_tokenizer")
    for name in ("tokenizer.model", "tokenizer.json"):
        (root / "no_tokenizer" / name).unlink()
    cfg.init_from = str(root / "no_tokenizer")
    init_from.weight_source(cfg, tiny_run.dataset.tokenizer, said.append)
    assert "can't be checked" in said[0]
    tokenizer = load_run(root / "run", "cpu", pytest.fail).tokenizer
    cfg.init_from = str(root / "run")
    init_from.weight_source(cfg, tokenizer, pytest.fail)
