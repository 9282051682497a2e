"""The tokenizer for other programs: tokenizer.json gives the tokens that training saw, for any text.

SentencePiece writes a space as U+2581 and would take U+2581 itself for one; our tokenizer encodes U+2581 as its bytes.
Here pieces hold spaces as they are, so that U+2581 is no piece and falls back to its bytes, without any normalisation.
SentencePiece merges the pair whose union has the highest score, leftmost first; tokenizers' BPE merges pairs by rank. The
ranks below follow the scores, so the two can differ only where two overlapping pairs make the same piece from different
parts ("ab" "a" "ba"): of such a text both tokenizations are valid, and no such text was found in tests.
"""

from __future__ import annotations

import json
from typing import Any

import sentencepiece

from nvfp4_train.data.tokenizer import JSON_FILE, MODEL_FILE, Tokenizer

_SPACE = "\u2581"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """{file name: content} of what transformers reads (tokenizer.json and its configuration) and, of a SentencePiece
    model, of tokenizer.model itself. Of a tokenizer.json that training used only the post-processor is replaced."""
    if tokenizer.file_name == JSON_FILE:
        theirs = json.loads(tokenizer.model)
        eos = next(token["content"] for token in theirs["added_tokens"] if token["id"] == tokenizer.eos_id)
        content = theirs | {"post_processor": _start_with(eos, tokenizer.eos_id)}
        return {JSON_FILE: _json(content), "tokenizer_config.json": _json(_configuration(eos, eos))}
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    eos = model.id_to_piece(tokenizer.eos_id)
    return {
        MODEL_FILE: tokenizer.model,
        JSON_FILE: _json(_tokenizer_json(model, eos)),
        "tokenizer_config.json": _json(_configuration(eos, model.id_to_piece(model.unk_id()))),
    }


def same_tokens(a: bytes, b: bytes) -> bool:
    """Whether two tokenizer files (Tokenizer.model) encode alike: equal, or but for a tokenizer.json's post-processor."""
    if a == b or not (a.lstrip()[:1] == b.lstrip()[:1] == b"{"):
        return a == b
    ignored = {"post_processor": None}
    return json.loads(a) | ignored == json.loads(b) | ignored


def _configuration(eos: str, unk: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eos,
        "eos_token": eos,
        "pad_token": eos,
        "unk_token": unk,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "</s>" in a text is text, as in training
        "model_max_length": 1 << 30,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _tokenizer_json(model: sentencepiece.SentencePieceProcessor, eos: str) -> dict[str, Any]:
    n = model.get_piece_size()
    special = [i for i in range(n) if model.is_control(i) or model.is_unknown(i)]
    pieces = [model.id_to_piece(i).replace(_SPACE, " ") for i in range(n)]
    added = [
        {"id": i, "content": pieces[i], "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i in special
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _start_with(eos, pieces.index(eos)),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[model.unk_id()],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": _merges(model, pieces),
        },
    }


def _start_with(eos: str, eos_id: int) -> dict[str, Any]:
    """The post-processor that puts an eos before every document, as training does."""
    a, b = (
        [{"SpecialToken": {"id": eos, "type_id": i}}, {"Sequence": {"id": "AB"[i], "type_id": i}}]
        for i in (0, 1)
    )
    return {
        "type": "TemplateProcessing",
        "single": a,
        "pair": [*a, *b],
        "special_tokens": {eos: {"id": eos, "ids": [eos_id], "tokens": [eos]}},
    }


def _merges(model: sentencepiece.SentencePieceProcessor, pieces: list[str]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, best score first."""
    normal = {
        piece: model.get_score(i)
        for i, piece in enumerate(pieces)
        if not (model.is_byte(i) or model.is_control(i) or model.is_unknown(i) or model.is_unused(i))
    }
    ranked = sorted(normal.items(), key=lambda item: -item[1])
    return [
        [piece[:cut], piece[cut:]]
        for piece, _ in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
