"""Hugging Face's tokenizer.json."""

from __future__ import annotations

import json

import pytest
from conftest import make_corpus, silent
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data.build import prepare
from nvfp4_train.data.dataset import open_dataset
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.errors import DataError

tokenizers = pytest.importorskip("tokenizers")

EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def content() -> dict:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["def f(self): return the value of 42\n"] * 20, trainer)
    made.add_tokens(["<think>"])
    return json.loads(made.to_str())


def load(content: dict) -> Tokenizer:
    return Tokenizer(json.dumps(content).encode(), "my.json")


@pytest.fixture(scope="module")
def tokenizer(content) -> Tokenizer:
    return load(content)


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.sampled_from([EOS, f"a{EOS}b <think> c", "  \n\n\t", "\u2581 é漢😀", "<s>"]))
def test_any_text_comes_back(tokenizer, text):
    tokens = tokenizer.encode_document(text)
    assert tokens[-1] == tokenizer.eos_id not in tokens[:-1]
    assert tokenizer.decode(tokens.tolist()) == text
    assert tokenizer.byte_lengths[tokens].sum() == len(text.encode())


def test_the_tokens_are_those_of_the_library(content):
    text = "def value(self): <think> return 42\n"
    theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert load(content).encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert load(content).vocab_size == theirs.get_vocab_size()


def test_a_data_set_is_prepared_with_it(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    cfg = DataConfig(
        source=str(make_corpus(tmp_path / "text")), tokenizer=str(path), cache_dir=str(tmp_path / "c")
    )
    dataset = open_dataset(prepare(cfg, load(content).vocab_size, silent), check="full")
    assert (dataset.path / "tokenizer.json").read_bytes() == path.read_bytes()
    assert (
        dataset.n_bytes("train")
        == dataset.tokenizer.byte_lengths[dataset.tokens("train", 0, dataset.n_tokens("train"))].sum()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalizer": {"type": "NFC"}}, 'set "normalizer" to null'),
        ({"decoder": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}}, "no byte-level"),
        ({"decoder": None}, "no byte-level"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
         "doesn't give text back"),
        ({"added_tokens": []}, "no end-of-document piece"),
        ({"model": {"type": "Nonsense"}}, "no tokenizer.json that can be read"),
    ],
)  # fmt: skip
def test_one_that_would_change_text_is_refused(content, change, said):
    with pytest.raises(DataError, match=said) as error:
        load({**content, **change})
    assert "my.json" in str(error.value)


def test_truncation_and_padding_are_switched_off(content):
    limits = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(load({**content, "truncation": limits}).encode("def value return self")) > 2
