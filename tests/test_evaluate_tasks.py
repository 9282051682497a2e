"""lm-evaluation-harness with task files of our own, from a run folder and from a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from nvfp4_train import evaluate, export
from nvfp4_train.errors import ConfigError
from nvfp4_train.training.inference import load_run
from nvfp4_train.training.scoring import log_likelihoods

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(
    not HAS_HARNESS, reason="lm-evaluation-harness (the eval extra) isn't installed"
)

CHOICES = """task: which_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """task: some_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WRITE = """task: go_on
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(tmp_path):
    documents = [
        {"question": "import ", "choices": ["os", "zzz"], "answer": 0, "text": "import os\nimport re\n" * 9},
        {"question": "def f(x):\n    return", "choices": [" q%", " x"], "answer": 1, "text": "class A:\n"},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(d) + "\n" for d in documents))
    (tmp_path / "tasks").mkdir()
    for name, text in {"choices": CHOICES, "text": TEXT, "write": WRITE}.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.format(data=data))
    return tmp_path / "tasks", documents


@needs_harness
@pytest.mark.parametrize("source", ["run", "hf"])
def test_local_task_files(tiny_run, tasks, tmp_path, capsys, source, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder, documents = tasks
    run = tiny_run.path
    if source == "hf":
        run = tmp_path / "exported"
        export.main([f"run={tiny_run.path}", f"out={run}"])
    evaluate.main([f"run={run}", f"tasks={folder}"])
    out = capsys.readouterr().out
    assert "which_word" in out
    assert "go_on" in out
    model = load_run(run, "cpu", pytest.fail)
    encode, eos = model.tokenizer.encode, model.tokenizer.eos_id
    pairs = [([eos, *encode(d["question"])], encode(c)) for d in documents for c in d["choices"]]
    values = [value for value, _ in log_likelihoods(model.model, pairs)]
    hits = [
        (a < b) == d["answer"]
        for (a, b), d in zip(zip(values[::2], values[1::2], strict=True), documents, strict=True)
    ]
    assert f"acc {sum(hits) / 2:.4f}" in out
    bits = float(out.split("bits_per_byte ")[1].split()[0])
    assert 0 < bits < 40
    if source == "hf":  # BF16: the text's windows score as the held-out text does
        tokens = [encode(d["text"]) for d in documents]
        total = 0.0
        for sequence in tokens:
            inputs = [eos, *sequence]
            for i in range(0, len(sequence), 32):
                ((value, _),) = log_likelihoods(model.model, [(inputs[i : i + 1], inputs[i + 1 : i + 33])])
                total -= value
        n_bytes = sum(len(d["text"].encode()) for d in documents)
        assert bits == pytest.approx(total / math.log(2) / n_bytes, rel=0.02)


@needs_harness
def test_an_unknown_task_is_told(tiny_run, tasks):
    folder, _ = tasks
    with pytest.raises(ConfigError, match="can't be read"):
        evaluate.main([f"run={tiny_run.path}", f"tasks={folder / 'none.yaml'}"])
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match="nothing is no task"):
        evaluate.main([f"run={tiny_run.path}", f"tasks={folder / 'empty'}"])


def test_bad_words_are_told(tiny_run, monkeypatch):
    with pytest.raises(ConfigError, match="limit=0 must be at least 1"):
        evaluate.main(["run=x", "tasks=y", "limit=0"])
    with pytest.raises(ConfigError, match="give one of them"):
        evaluate.main(["run=x", "tasks=y", "data=z"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs lm-evaluation-harness: .*nvfp4-train\[eval\]"):
        evaluate.main(["run=x", "tasks=y"])
