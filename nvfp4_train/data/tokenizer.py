"""Tokenizers whose round trip is exact: decode(encode(text)) == text for any text that UTF-8 can hold.

SentencePiece BPE, trained here or given, or byte-level BPE in the format of Hugging Face (`byte_level.py`).

Training: byte fallback, identity normalisation, no dummy prefix, no white space removed. Runs of white space, line
ends and whole phrases may become pieces (pieces cross word boundaries but not boundaries between scripts, or
between letters and digits), so a token stands for more bytes of code and prose alike.

Two things SentencePiece alone doesn't do: it writes a space as U+2581, so U+2581 itself would come back as a
space (here it is always encoded as its three bytes), and it encodes a text in one go, however long (here in parts of
at most 2^20 characters, cut after line ends).
"""

from __future__ import annotations

import hashlib
import heapq
import io
import itertools
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from nvfp4_train.data import byte_level
from nvfp4_train.errors import DataError

MODEL_FILE, JSON_FILE = "tokenizer.model", "tokenizer.json"
SAMPLE_BYTES = 8 << 20  # text that a tokenizer is trained on; more changes little
MAX_PART = 1 << 20  # characters encoded in one go
SHORT_PART = 1 << 6  # at least so many, where a text can be cut without changing its tokens
SETTINGS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_by_whitespace": False,
    "max_sentencepiece_length": 32,
    "character_coverage": 0.9995,  # rarer characters are encoded as bytes
    "max_sentence_length": 1 << 16,  # bytes; above any sentence that `_sentences` makes
    "unk_id": 0,
    "eos_id": 1,
    "bos_id": -1,
    "pad_id": -1,
}
_SENTENCES = re.compile(r"(?s).{1,1024}\n|.{1,1024}")
_PARTS = re.compile(rf"(?s).{{1,{MAX_PART - 1}}}\n|.{{1,{MAX_PART}}}")
_SPACE = "\u2581"
_PROBE = " \t  a\u2581b\u2581\u2581 \r\n\n\x00\x01\x7f\ufeff\u2585<s></s><unk><0x41> é e\u0301 ﬁ Ａ 漢 😀\u200b\u2028  \n "


class Tokenizer:
    """A SentencePiece model, or byte-level BPE (`byte_level.py`). Immutable, and safe to use from several threads at once.

    `byte_lengths` int64 [vocab_size]: UTF-8 bytes each token stands for; 0 for eos, which ends every document.
    `file_name`: what a file that holds `model` is called.
    """

    def __init__(self, model: bytes, name: str = "the tokenizer") -> None:
        """`model`: the content of a .model file or a tokenizer.json. Raises DataError when it is neither, or isn't exact."""
        if model.lstrip()[:1] == b"{" and b'"model"' in model:
            self.file_name = JSON_FILE
            self._pieces, eos_id, self._encode = byte_level.load(model, name)
            remedy = "add one of " + " ".join(byte_level.END_OF_DOCUMENT) + " to its special tokens"
        else:
            self.file_name = MODEL_FILE
            self._pieces, eos_id, self._encode = _load_sentencepiece(model, name)
            remedy = "train one with eos_id set"
        if eos_id is None:
            raise DataError(f"{name} has no end-of-document piece (eos): {remedy}.")
        self.eos_id = eos_id
        self.vocab_size = len(self._pieces)
        self.hash = hashlib.sha256(model).hexdigest()
        self.model = model
        self.byte_lengths = np.array([len(piece) for piece in self._pieces], dtype=np.int64)
        if any(self.decode(self.encode(probe)) != probe for probe in (_PROBE, "a")):
            raise DataError(
                f"{name} doesn't give text back as it was: use a model trained with byte_fallback, the identity "
                "normalisation, no dummy prefix and no removal of white space, or leave data.tokenizer unset."
            )

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a file. Raises DataError naming it."""
        try:
            return cls(Path(path).expanduser().read_bytes(), name=str(path))
        except OSError as error:
            raise DataError(
                f"The tokenizer {path} can't be read ({error.strerror}): give a SentencePiece .model file or a "
                "tokenizer.json."
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without eos. Raises DataError for half of a surrogate pair, which is no text."""
        return [token for part in self._parts(text) for token in self._encode(part)]

    def encode_document(self, text: str) -> np.ndarray:
        """int32: token ids of `text`, then eos. Raises DataError as `encode` does."""
        parts = [np.frombuffer(array("i", self._encode(part)), np.int32) for part in self._parts(text)]
        return np.concatenate([*parts, np.array([self.eos_id], np.int32)])

    def _parts(self, text: str) -> list[str]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"Character {error.start} of the text is half of a surrogate pair "
                f"(\\u{ord(text[error.start]):04x}), which is no text: remove it."
            ) from error
        return [text] if len(text) <= MAX_PART else _PARTS.findall(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; eos gives nothing, and bytes that aren't UTF-8 (a model may sample such) U+FFFD."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """The bytes that `tokens` stand for."""
        return b"".join([self._pieces[token] for token in tokens])


def _load_sentencepiece(
    model: bytes, name: str
) -> tuple[list[bytes], int | None, Callable[[str], list[int]]]:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except Exception as error:  # the binding raises whatever class its status maps to
        raise DataError(f"{name} is no SentencePiece model: restore it, or choose another.") from error

    def piece(i: int) -> bytes:
        text = processor.id_to_piece(i)
        if processor.is_byte(i):
            return bytes([int(text[3:5], 16)])
        if processor.is_control(i) or processor.is_unknown(i):
            return b""
        return text.replace(_SPACE, " ").encode()

    escaped_space = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]

    def encode(text: str) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(text.split(_SPACE)):
            if i:
                tokens += escaped_space
            for lines in short_parts.findall(part):
                tokens += processor.encode(lines, out_type=int)
        return tokens

    pieces, eos_id = [piece(i) for i in range(processor.get_piece_size())], processor.eos_id()
    short_parts = _short_parts(pieces)
    return pieces, eos_id if eos_id >= 0 else None, encode


def _short_parts(pieces: Sequence[bytes]) -> re.Pattern[str]:
    """Cuts a text where no piece can lie across the cut: the tokens are those of the whole, found some 10 % faster.

    A cut is after a line end, before a character that follows a line end in no piece.
    """
    texts = [piece.decode(errors="ignore") for piece in pieces]
    following = {after for text in texts for before, after in itertools.pairwise(text) if before == "\n"}
    inside = "".join(map(re.escape, sorted(following)))
    return re.compile(
        rf"(?s).{{{SHORT_PART},}}?\n(?![{inside}])|.+" if inside else rf"(?s).{{{SHORT_PART},}}?\n|.+"
    )


class Sample:
    """Of all texts added, those with the smallest keys, up to `limit` bytes: the order of adding doesn't matter.

    Texts of one key are equal, and are taken once.
    """

    def __init__(self, limit: int = SAMPLE_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._heap: list[tuple[int, bytes]] = []  # keys negated: the largest comes out first
        self._keys: set[int] = set()  # of the heap
        self._end: float = math.inf  # the smallest key that had no room: nothing from it on is taken

    def add(self, key: int, data: bytes) -> None:
        if key >= self._end or key in self._keys:
            return
        self._keys.add(key)
        data = data[: self._limit // 16]  # no document is more than a small part of the sample
        heapq.heappush(self._heap, (-key, data))
        self._bytes += len(data)
        while self._bytes > self._limit:
            negated, dropped = heapq.heappop(self._heap)
            self._bytes -= len(dropped)
            self._end = -negated
            self._keys.remove(-negated)

    def remove(self, key: int) -> None:
        """Drop the text of this key."""
        self._keys.discard(key)
        self._heap = [entry for entry in self._heap if entry[0] != -key]
        heapq.heapify(self._heap)
        self._bytes = sum(len(data) for _, data in self._heap)

    def texts(self, below: int) -> Iterator[str]:
        """In the order of their keys, those smaller than `below`."""
        for key, data in sorted(self._heap, reverse=True):
            if -key < below:
                yield data.decode(errors="ignore")  # what was cut may end inside a character


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a model of exactly `vocab_size` pieces; the same texts give the same bytes on any machine.

    Raises DataError when the texts cannot give so many pieces, or when `vocab_size` is too small for them.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            vocab_size=max(vocab_size, 258),  # below, it fails before it counts how many are needed
            num_threads=1,
            minloglevel=2,
            **SETTINGS,
        )
    except Exception as error:  # the binding raises whatever class its status maps to
        raise DataError(_explain(str(error), vocab_size)) from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    # Several lines a sentence, for pieces to hold line ends: SentencePiece strips one at the end of a sentence.
    for text in texts:
        yield from _SENTENCES.findall(text)


def _explain(error: str, vocab_size: int) -> str:
    if largest := re.search(r"value <= (\d+)", error):
        return (
            f"model.vocab_size={vocab_size} is too large for so little text: set it to at most {largest[1]}, or give "
            "more text."
        )
    if smallest := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return (
            f"model.vocab_size={vocab_size} is too small for the 256 bytes and the text's characters: set it to at "
            f"least {smallest[1]}."
        )
    return f"No tokenizer of model.vocab_size={vocab_size} could be trained: {' '.join(error.split())}."


def check_vocab_size(tokenizer: Tokenizer, vocab_size: int, name: str | Sequence[str]) -> None:
    """Raise DataError unless the tokenizer has exactly `vocab_size` pieces."""
    if tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size}, but {name} has {tokenizer.vocab_size} pieces: set model.vocab_size="
            f"{tokenizer.vocab_size}."
        )
