from __future__ import annotations

import io
import random

import pytest
import sentencepiece
from conftest import VOCAB, make_text
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvfp4_train.data import tokenizer as tokenizers
from nvfp4_train.data.sources import find_source
from nvfp4_train.data.tokenizer import Sample, Tokenizer, train
from nvfp4_train.errors import DataError

SPECIAL = [
    "\u2581",
    "\u2581\u2581",
    " \u2581 ",
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "\0",
    "\n\n    ",
    "\t",
    "\r\n",
    "  ",
]
SPECIAL += [
    "\u2585",
    "\ufeff",
    "\ufffd",
    "\uffff",
    "\U0010ffff",
    "e\u0301",
    "ﬁ",
    "Ａ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x1b[0m",
]
any_text = st.lists(
    st.one_of(st.sampled_from(SPECIAL), st.text(), st.characters(categories=["Cc", "Zs"]))
).map("".join)


@pytest.fixture(scope="module")
def tokenizer(dataset):
    return dataset.tokenizer


@settings(max_examples=500, deadline=None)
@given(text=any_text)
@example(text="")
@example(text="".join(SPECIAL))
@example(text="a" * 3000)
def test_any_text_comes_back(dataset, text):
    tokens = dataset.tokenizer.encode(text)
    assert dataset.tokenizer.decode(tokens) == text
    assert dataset.tokenizer.byte_lengths[tokens].sum() == len(text.encode())
    assert dataset.tokenizer.eos_id not in tokens
    assert all(0 <= token < VOCAB for token in tokens)


def test_every_code_point_comes_back(tokenizer):
    for start in range(0, 0x110000, 0x4000):
        text = "".join(chr(c) for c in range(start, start + 0x4000) if not 0xD800 <= c < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_longer_than_one_part_comes_back(tokenizer):
    text = make_text(random.Random(1), 300_000) + "\u2581no line end " * 100_000
    assert len(text) > 2 << 20
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from([*"\n\n  \t#-x1", "the ", ":\n", "\n\n"]), st.text(max_size=3)),
        max_size=300,
    )
)
def test_a_text_encoded_in_short_parts_gives_the_tokens_of_the_whole(dataset, parts):
    text = "".join(parts).replace("\u2581", "")
    whole = sentencepiece.SentencePieceProcessor(model_proto=dataset.tokenizer.model)
    assert dataset.tokenizer.encode(text) == whole.encode(text, out_type=int)


def test_short_parts_are_cut_after_line_ends_that_no_piece_crosses():
    pattern = tokenizers._short_parts([b"\n ", b"\n\n", b"\nX", b"a\n", b"a", b"\n"])
    text = "a" * 70 + "\nb" + "a" * 70 + "\n\n  c\nX" + "a" * 70 + "\nX\n" + "end"
    parts = pattern.findall(text)
    assert "".join(parts) == text
    assert [part[:2] for part in parts] == ["aa", "ba", "en"]


@settings(deadline=None)
@given(before=st.text(max_size=20), half=st.integers(0xD800, 0xDFFF), after=st.text(max_size=20))
def test_half_a_surrogate_pair_is_refused(dataset, before, half, after):
    with pytest.raises(DataError, match=rf"surrogate pair \(\\u{half:04x}\)"):
        dataset.tokenizer.encode(before + chr(half) + after)


def test_tokens_a_model_may_sample_decode_without_error(tokenizer):
    euro = tokenizer.encode("\u2581")  # three byte pieces
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b")]) == "ab"
    assert tokenizer.decode(euro[:2]) == "\ufffd"
    assert isinstance(tokenizer.decode(range(VOCAB)), str)


def test_pieces_hold_line_ends_and_indentation():
    code = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    tokenizer = Tokenizer(train([code * 20], 300))
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(code)]
    assert any(piece.endswith(":\n") for piece in pieces)
    assert any(piece.startswith(" " * 8) for piece in pieces)


def test_three_bytes_a_token_on_python_source():
    documents = [d.text for d, _ in find_source("stdlib").documents()][:160]
    tokenizer = Tokenizer(train(documents[::2], 2048))
    held_out = documents[1::16]
    tokens = sum(len(tokenizer.encode(text)) for text in held_out)
    assert sum(len(text.encode()) for text in held_out) / tokens > 2.8


@settings(max_examples=30, deadline=None)
@given(
    documents=st.dictionaries(st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=30), max_size=20),
    limit=st.integers(32, 200),
    seed=st.integers(0, 99),
)
def test_the_sample_is_bounded_and_does_not_depend_on_the_order(documents, limit, seed):
    def sample(items):
        result = Sample(limit)
        for key, data in items:
            result.add(key, data)
        return list(result.texts(below=1 << 64))

    items = list(documents.items())
    shuffled = random.Random(seed).sample(items, len(items))
    assert sample(items) == sample(shuffled)
    assert sum(len(text.encode()) for text in sample(items)) <= limit
    assert not items or sample(items)


def test_training_gives_the_same_bytes_whatever_the_number_of_threads(monkeypatch):
    texts = [make_text(random.Random(i), 300) for i in range(20)]
    models = [train(texts, 400) for _ in range(2)]
    real = sentencepiece.SentencePieceTrainer.train
    monkeypatch.setattr(
        sentencepiece.SentencePieceTrainer, "train", lambda **kwargs: real(**{**kwargs, "num_threads": 5})
    )
    pieces = [[Tokenizer(m).decode_bytes([i]) for i in range(400)] for m in (*models, train(texts, 400))]
    assert models[0] == models[1]
    assert pieces[0] == pieces[2]


@pytest.mark.parametrize("vocab_size", [1, 256, 300_000])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_the_limit(vocab_size):
    texts = [make_text(random.Random(0), 500)]
    with pytest.raises(DataError, match=rf"model.vocab_size={vocab_size} .* at (most|least) (\d+)") as error:
        train(texts, vocab_size)
    limit = int(
        next(
            word
            for word in str(error.value).replace(",", "").replace(".", "").split()[::-1]
            if word.isdigit()
        )
    )
    assert Tokenizer(train(texts, limit)).vocab_size == limit  # the number that is named works


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"add_dummy_prefix": True}, "doesn't give text back"),
        ({"normalization_rule_name": "nmt_nfkc"}, "doesn't give text back"),
        ({"remove_extra_whitespaces": True}, "doesn't give text back"),
        ({"byte_fallback": False}, "doesn't give text back"),
        ({"eos_id": -1}, "no end-of-document piece"),
    ],
)
def test_a_model_that_would_change_text_is_refused(tmp_path, settings_, said):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([make_text(random.Random(0), 2000)]),
        model_writer=model,
        vocab_size=320,
        hard_vocab_limit=False,
        minloglevel=2,
        **{**tokenizers.SETTINGS, **settings_},
    )
    path = tmp_path / "x.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(DataError, match=said) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    for content in (b"not a model", b""):
        (tmp_path / "x.model").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.model is no SentencePiece model"):
            Tokenizer.load(tmp_path / "x.model")
    with pytest.raises(DataError, match="can't be read"):
        Tokenizer.load(tmp_path / "gone.model")
