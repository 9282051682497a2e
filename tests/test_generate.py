from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train import generate
from nvfp4_train.cli import parse
from nvfp4_train.errors import CheckpointError, ConfigError, DataError, UserError
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.training.inference import load_run
from nvfp4_train.training.sampling import (
    choose,
    sample_batch,
    sample_text,
    sample_tokens,
    start_document,
    stream_text,
)

PROMPT = "if x[\"a\"] == {'b': [1, 2]}:  # ${y} \\n = é漢 "


def write(capsys, *words: str) -> str:
    generate.main(list(words))
    return capsys.readouterr().out


def test_a_prompt_arrives_as_typed_and_is_continued(tiny_run, capsys):
    out = write(capsys, f"run={tiny_run.path}", f"prompt={PROMPT}", "max_new_tokens=20")
    assert out.startswith(PROMPT)
    assert len(out) > len(PROMPT) + 5


@given(st.text(max_size=40))
def test_any_prompt_survives_the_command_line(prompt):
    assert parse([f"prompt={prompt}", "run=x"], generate.Options, "prog").prompt == prompt


def test_the_same_seed_writes_the_same_text_and_another_another(tiny_run, capsys):
    words = [f"run={tiny_run.path}", "prompt=import ", "max_new_tokens=24"]
    first, again, other = (write(capsys, *words, f"seed={seed}") for seed in (1, 1, 2))
    assert first == again != other
    greedy = write(capsys, *words, "temperature=0", "seed=1")
    assert (
        greedy
        == write(capsys, *words, "temperature=0", "seed=2")
        == write(capsys, *words, "top_p=1e-9", "seed=3")
    )


def test_the_command_writes_what_the_trainer_samples(tiny_run, capsys):
    run = tiny_run
    text = sample_text(run.model, run.dataset.tokenizer, "def ", 16, 0.8, 0.95, 5, "cpu")
    out = write(capsys, f"run={run.path}", "prompt=def ", "max_new_tokens=16", "seed=5")
    assert out == text + "\n"


def test_the_newest_checkpoint_is_loaded_with_its_recipe(tiny_run):
    run = load_run(tiny_run.path, "cpu", pytest.fail)
    assert run.checkpoint.step == 20
    for name, parameter in tiny_run.model.named_parameters():
        assert torch.equal(run.model.get_parameter(name), parameter)
    tokens = torch.randint(0, 384, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(run.model(tokens), tiny_run.model(tokens))
        with tiny_run.precision.all_bf16():
            assert not torch.equal(run.model(tokens), tiny_run.model(tokens))  # so it is in NVFP4
    older = load_run(tiny_run.path / "checkpoints" / "step_00000010", "cpu", pytest.fail)
    assert older.checkpoint.step == 10
    assert not any(p.any() for p in older.model.parameters())


def test_one_token_at_a_time_matches_the_whole_sequence(tiny_run):
    tokens = start_document(tiny_run.dataset.tokenizer, "import os\n\n\ndef f(x):\n    return os.path")
    model, cache = tiny_run.model, tiny_run.model.new_cache(1)
    with torch.no_grad():
        steps = torch.stack([model.step(torch.tensor([t]), cache)[0] for t in tokens])
        whole = model(torch.tensor([tokens]))[0]
        with tiny_run.precision.all_bf16():
            exact = model(torch.tensor([tokens]))[0]
    # Tensor scales span other tokens, so both carry quantization noise, and no more than that.
    assert (steps - whole).std() < 1.5 * (whole - exact).std()


@pytest.fixture
def exact(tiny_run):
    """The tiny run's model in fp32, where batch and cache change nothing that could turn a choice."""
    model = HybridModel(tiny_run.cfg.model, compute_dtype=torch.float32).requires_grad_(False)
    model.load_state_dict(tiny_run.model.state_dict())
    return model


def test_cached_generation_equals_uncached_token_for_token(exact):
    prompt = [1, 300, 5, 77]
    written = list(sample_tokens(exact, prompt, 64, 0.0, 1.0, 0, "cpu"))
    tokens = list(prompt)
    for _ in range(64):
        tokens.append(int(exact(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokens[len(prompt) :] == written
    assert len(set(written)) > 4


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_batch_writes_what_each_of_its_sequences_writes_alone(exact, temperature):
    prompts, seeds = [[1, 300, 5, 77, 8, 9, 10], [1], [1, 20]], [3, 4, 4]
    alone = [
        list(sample_tokens(exact, p, 20, temperature, 0.9, s, "cpu"))
        for p, s in zip(prompts, seeds, strict=True)
    ]
    together = sample_batch(exact, prompts, 20, temperature, 0.9, seeds, "cpu")
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone
    ended = sample_batch(exact, prompts, 20, temperature, 0.9, seeds, "cpu", lambda w: len(w[0]) == 3)
    assert len(list(ended)) == 3


def test_several_texts(tiny_run, tmp_path, capsys):
    words = [f"run={tiny_run.path}", "max_new_tokens=6", "samples=2", "seed=3"]
    out = write(capsys, *words, "prompt=import ")
    first, second = out.split("--- 1 of 2\n")[1].split("\n--- 2 of 2\n")
    assert first.startswith("import ")
    assert first != second.strip("\n")
    (tmp_path / "prompts.txt").write_text("def f(\n\nimport é\n")
    out = write(capsys, *words, f"prompts={tmp_path / 'prompts.txt'}")
    assert "--- 6 of 6\nimport é" in out
    (tmp_path / "prompts.txt").write_text("")
    with pytest.raises(DataError, match="is empty"):
        write(capsys, *words, f"prompts={tmp_path / 'prompts.txt'}")
    with pytest.raises(DataError, match="can't be read"):
        write(capsys, *words, f"prompts={tmp_path / 'none.txt'}")


def test_sampling_leaves_the_number_of_threads_as_it_was(tiny_run):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tokens = sample_tokens(tiny_run.model, [1], 3, 0.0, 1.0, 0, "cpu")
        next(tokens)
        assert torch.get_num_threads() == 2
        tokens.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@settings(deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=2, max_size=50), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_a_token_comes_from_the_smallest_likely_set(logits, top_p, seed):
    logits = torch.tensor(logits)
    probabilities = logits.softmax(-1)
    token = choose(logits, 1.0, top_p, torch.Generator().manual_seed(seed))
    likelier = probabilities[probabilities > probabilities[token]].sum()
    assert likelier < top_p + 1e-5


def test_draws_follow_the_probabilities():
    logits, generator = torch.tensor([0.5, 0.3, 0.2]).log(), torch.Generator().manual_seed(0)
    draws = torch.tensor([choose(logits, 1.0, 0.6, generator) for _ in range(3000)])
    shares = torch.bincount(draws, minlength=3) / 3000
    assert shares[2] == 0  # the first two have 0.8 >= 0.6
    assert abs(shares[0] - 0.5 / 0.8) < 0.03


def test_outputs_that_are_not_finite_are_told():
    with pytest.raises(UserError, match="not finite"):
        choose(torch.tensor([0.0, float("nan")]), 1.0, 1.0, torch.Generator())


@settings(deadline=None)
@given(st.text(max_size=60))
def test_streaming_gives_whole_characters_and_ends_with_the_document(tiny_run, text):
    tokenizer = tiny_run.dataset.tokenizer
    tokens = [*tokenizer.encode(text), tokenizer.eos_id, *tokenizer.encode("not this")]
    pieces = list(stream_text(iter(tokens), tokenizer))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_half_a_character_gives_a_replacement(tiny_run):
    tokenizer = tiny_run.dataset.tokenizer
    half = tokenizer.encode("漢")[:2]
    assert "".join(stream_text(iter(half), tokenizer)) == "\ufffd"
    assert "".join(stream_text(iter(half * 4), tokenizer)).count("\ufffd") >= 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompt=x"], "run=... is missing"),
        (["run=a", "run=b"], "given twice"),
        (["run=a", "promt=x"], "did you mean prompt"),
        (["run=a", "hello world"], "not of the form key=value"),
        (["run=a", "max_new_tokens=many"], "max_new_tokens=many must be a whole number"),
        (["run=a", "max_new_tokens=0"], "at least 1"),
        (["run=a", "temperature=-1"], "temperature=-1 must be 0 or more"),
        (["run=a", "temperature=nan"], "temperature=nan"),
        (["run=a", "top_p=0"], "top_p=0 must be above 0"),
        (["run=a", "seed=-1"], "seed=-1"),
        (["run=a", "samples=0"], "samples=0"),
        (["run=a", "prompts=b", "prompt=c"], "give one of them"),
    ],
)
def test_bad_words_are_told_in_one_sentence(words, message):
    with pytest.raises(ConfigError, match=message):
        generate.main(words)


def test_what_is_missing_is_told_in_one_sentence(tiny_run, tmp_path):
    with pytest.raises(CheckpointError, match=r"run=.*none doesn't exist"):
        generate.main([f"run={tmp_path / 'none'}"])
    with pytest.raises(CheckpointError, match="no run folder"):
        generate.main([f"run={tmp_path}"])
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(tiny_run.path / "config.yaml", run)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        generate.main([f"run={run}"])
    shutil.copytree(tiny_run.path / "checkpoints", run / "checkpoints")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.model"):
        generate.main([f"run={run}"])
    shutil.copy(tiny_run.path / "tokenizer.model", run)
    (run / "config.yaml").write_text("model: {no_such_key: 1}\n")
    with pytest.raises(CheckpointError, match=r"config\.yaml can't be used .*no_such_key"):
        generate.main([f"run={run}"])
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda"):
            generate.main([f"run={tiny_run.path}", "device=cuda"])


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tiny_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    data = next((run / "checkpoints" / "step_00000020").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-5])
    generate.main([f"run={run}", "max_new_tokens=2"])
    assert "step 10" in (err := capsys.readouterr().err)
    assert "WARNING" in err
    with pytest.raises(CheckpointError, match="not whole"):
        generate.main([f"run={run / 'checkpoints' / 'step_00000020'}"])


def test_the_command_streams_text_out_and_errors_with_exit_code_2(tiny_run):
    command = [sys.executable, "-m", "nvfp4_train.generate"]
    good = subprocess.run(
        [*command, f"run={tiny_run.path}", f"prompt={PROMPT}", "max_new_tokens=8"],
        capture_output=True,
        text=True,
    )
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith(PROMPT)
    assert "step 20 (2.56k tokens)" in good.stderr
    assert "nvfp4" in good.stderr
    bad = subprocess.run([*command, "run=/no/such/run"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert (
        bad.stderr
        == "Error: run=/no/such/run doesn't exist: give the folder of a run, such as runs/quickstart.\n"
    )


def test_help_lists_every_option(capsys):
    out = write(capsys, "--help")
    for name in ("run=", "prompt=", "max_new_tokens=", "temperature=", "top_p=", "seed=", "device="):
        assert name in out
