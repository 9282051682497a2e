"""Byte-level BPE from a Hugging Face tokenizer.json (GPT-2, Llama 3, NeoX, ...): what `Tokenizer` needs of one.

Of these every text comes back exactly, as long as nothing is normalised and no space is put before the text. The file
doesn't say which token ends a document, so the names that published models use are looked for among its special
tokens. Special tokens in the text itself are encoded as the ordinary text that they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from nvfp4_train.errors import DataError

END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
)


def load(model: bytes, name: str) -> tuple[list[bytes], int | None, Callable[[str], list[int]]]:
    """The bytes that each id stands for, the end of document's id, and `encode`.

    Raises DataError where `tokenizers` isn't installed and for a file that is no byte-level tokenizer.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"{name} needs the package tokenizers: install it with pip install 'nvfp4-train[hf]'."
        ) from error
    # One process a core encodes; threads inside each would only get in the others' way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        content = json.loads(model)
        tokenizer = tokenizers.Tokenizer.from_str(model.decode())
    except Exception as error:  # the binding raises plain Exception
        raise DataError(
            f"{name} is no tokenizer.json that can be read: restore it, or choose another."
        ) from error
    if not _byte_level(content.get("decoder")):
        raise DataError(
            f"{name} is no byte-level BPE tokenizer, so not every text would come back from it: choose one that is, or "
            "leave data.tokenizer unset."
        )
    if content.get("normalizer") is not None:
        raise DataError(
            f'{name} normalises text, which then doesn\'t come back as it was: set "normalizer" to null in a copy of '
            "the file, and use that."
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, i in vocabulary.items():
        if i not in added:
            pieces[i] = bytes(_BYTES[c] for c in piece if c in _BYTES)
        elif not added[i]["special"]:
            pieces[i] = piece.encode()
    special = {token["content"]: i for i, token in added.items() if token["special"]}
    eos_id = next((special[end] for end in END_OF_DOCUMENT if end in special), None)
    return pieces, eos_id, lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders", [])
    return decoder.get("type") == "ByteLevel" or any(map(_byte_level, inner))


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_characters()
