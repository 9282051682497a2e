from __future__ import annotations

import gzip
import math
import re
import shutil

import pytest
import torch

from nvfp4_train import evaluate
from nvfp4_train.errors import ConfigError, DataError
from nvfp4_train.training import evaluation
from nvfp4_train.training.inference import load_run
from tests.text import document


def measure(capsys, *words: str) -> dict[str, str]:
    """The printed table by name."""
    evaluate.main(list(words))
    out = capsys.readouterr().out
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    starts = {len(re.match(r"\S.*?  +", line)[0]) for line in out.splitlines()}
    assert len(starts) <= 2  # aligned; baselines leave the loss's place empty
    return rows


def numbers(row: str) -> tuple[float, float]:
    """loss and bits per byte."""
    match = re.match(r"loss (\S+)  (\S+) bits per byte", row)
    return float(match[1]), float(match[2])


@torch.no_grad()
def stream_loss(model, tokens: list[int], eos: int, seq_len: int) -> float:
    """The mean loss in windows of seq_len, each by itself, in fp64."""
    model = model.double()
    total = 0.0
    inputs = [eos, *tokens[:-1]]
    for start in range(0, len(tokens), seq_len):
        window = (
            torch.tensor([inputs[start : start + seq_len]]),
            torch.tensor([tokens[start : start + seq_len]]),
        )
        total += float(model.loss(*window)[0])
    return total / len(tokens)


def test_held_out_text_is_measured_whole(tiny_run, capsys):
    rows = measure(capsys, f"run={tiny_run.path}", "bf16=true")
    dataset = tiny_run.dataset
    loss, bits = numbers(rows["as trained"])
    tokens, n_bytes = dataset.n_tokens("valid"), dataset.n_bytes("valid")
    assert bits == pytest.approx(loss / math.log(2) * tokens / n_bytes, rel=1e-3)
    assert numbers(rows["all in BF16"])[0] != loss
    assert rows["model"].endswith("step 20 (2.56k tokens)")
    assert rows["gzip -9"] == f"{dataset.baselines()['gzip']:.3f} bits per byte"


def test_bf16_loss_of_any_text_agrees_with_the_definition(tiny_run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(document(99)[:3001] + "é漢")
    rows = measure(capsys, f"run={tiny_run.path}", f"data={text}", "bf16=true")
    run = load_run(tiny_run.path, "cpu", pytest.fail)
    tokens = [*run.tokenizer.encode(text.read_text()), run.tokenizer.eos_id]
    with run.precision.all_bf16():
        expected = stream_loss(run.model, tokens, run.tokenizer.eos_id, 32)
    loss, bits = numbers(rows["all in BF16"])
    assert loss == pytest.approx(expected, rel=2e-3)
    n_bytes = len(text.read_bytes())
    assert bits == pytest.approx(loss * len(tokens) / math.log(2) / n_bytes, rel=1e-3)
    gzipped = 8 * len(gzip.compress(text.read_bytes(), 9)) / n_bytes
    assert rows["gzip -9"] == f"{gzipped:.3f} bits per byte"


def test_a_part_of_the_text(tiny_run, capsys):
    rows = measure(capsys, f"run={tiny_run.path}", f"data={tiny_run.cfg.data.source}", "max_tokens=100")
    assert ": 100 tokens" in rows["text"]
    assert "gzip -9" not in rows


def test_a_folder_is_read_in_order(tiny_run, tmp_path):
    tokenizer = tiny_run.dataset.tokenizer
    for name in ("b.md", "a.txt"):
        (tmp_path / name).write_text(name)
    text = evaluation.read_text(str(tmp_path), tokenizer, None)
    expected = [*tokenizer.encode("a.txt"), tokenizer.eos_id, *tokenizer.encode("b.md"), tokenizer.eos_id]
    assert text.stream.tokens("valid", 0, 99).tolist() == expected


def test_bad_input_is_told_in_one_sentence(tiny_run, tmp_path):
    with pytest.raises(ConfigError, match="max_tokens=0"):
        evaluate.main([f"run={tiny_run.path}", "max_tokens=0"])
    with pytest.raises(DataError, match="doesn't exist"):
        evaluate.main([f"run={tiny_run.path}", f"data={tmp_path / 'none'}"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="only empty documents"):
        evaluate.main([f"run={tiny_run.path}", f"data={tmp_path}"])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ol\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        evaluate.main([f"run={tiny_run.path}", f"data={tmp_path}"])


def test_a_source_that_has_changed_is_refused(tiny_run, tmp_path):
    run, source = tmp_path / "run", tmp_path / "text"
    shutil.copytree(tiny_run.path, run)
    shutil.copytree(tiny_run.cfg.data.source, source)
    (source / "a_new.py").write_text("xyzzy = 12345\n" * 2000)
    config = (run / "config.yaml").read_text().replace(tiny_run.cfg.data.source, str(source))
    (run / "config.yaml").write_text(config)
    with pytest.raises(DataError, match=r"no longer is the text .* data=FILE_OR_FOLDER"):
        evaluate.main([f"run={run}"])


def test_a_run_of_another_machines_backend_is_read_with_this_ones(tmp_path, tiny_run):
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    config = (run / "config.yaml").read_text()
    assert "backend: auto" in config
    (run / "config.yaml").write_text(config.replace("backend: auto", "backend: cublas"))
    warnings = []
    loaded = load_run(run, "cpu", warnings.append)
    assert loaded.precision.backend == "emulated"
    assert "precision.backend=cublas can't run here" in warnings[-1]
