"""tokenizer.json, read by transformers, gives our tokens and our text back."""

from __future__ import annotations

import io
import pathlib

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.interop.tokenizer_files import same_tokens, tokenizer_files

transformers = pytest.importorskip("transformers", reason="its tokenizer is what is compared (the dev extra)")


@pytest.fixture(scope="module")
def theirs(exported):
    return transformers.AutoTokenizer.from_pretrained(exported["bf16"])


def assert_same(ours, theirs, text):
    tokens = theirs(text)["input_ids"]
    assert tokens == [ours.eos_id, *ours.encode(text)]
    assert theirs.decode(tokens, skip_special_tokens=True) == text


def test_source_code(tiny_run, theirs):
    for source in sorted(pathlib.Path(io.__file__).parent.glob("[a-h]*.py")):
        assert_same(tiny_run.dataset.tokenizer, theirs, source.read_text(errors="ignore"))


TEXTS = st.text() | st.text(alphabet="ab \n\t=_(▁é漢") | st.text(alphabet=" \n").map(lambda t: t * 7)


@given(TEXTS)
def test_any_text(tiny_run, theirs, text):
    assert_same(tiny_run.dataset.tokenizer, theirs, text)


@pytest.mark.parametrize("text", ["", "</s><unk>", "a</s>b", "<0x41>▁\r\n\x00", "\ufeff \u200b😀"])
def test_special_words_are_text(tiny_run, theirs, text):
    assert_same(tiny_run.dataset.tokenizer, theirs, text)


def test_a_document_begins_and_ends_with_eos(tiny_run, theirs):
    eos = tiny_run.dataset.tokenizer.eos_id
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.pad_token_id == eos
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(pathlib.Path(theirs.name_or_path) / "tokenizer.model")
    )
    assert model.encode("def f") == tiny_run.dataset.tokenizer.encode("def f")


def test_a_byte_level_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator([pathlib.Path(io.__file__).read_text()], trainer)
    ours = Tokenizer(bpe.to_str().encode())
    files = tokenizer_files(ours)
    assert same_tokens(files["tokenizer.json"], ours.model)
    assert not same_tokens(files["tokenizer.json"].replace(b'"ass"', b'"sas"'), ours.model)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(x):\n    return é漢", "<|endoftext|> is text"):
        assert_same(ours, theirs, text)
