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
    model, of tokenizer.model itself. A tokenizer.json that training used is written as it is."""
    if tokenizer.file_name == JSON_FILE:
        added = json.loads(tokenizer.model)["added_tokens"]
        eos = next(token["content"] for token in added if token["id"] == tokenizer.eos_id)
        # Its post-processor may not put the eos before a document as training does: transformers then makes one that does.
        configuration = {"add_bos_token": True, **_configuration(eos, eos)}
        return {JSON_FILE: tokenizer.model, "tokenizer_config.json": _json(configuration)}
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    eos = model.id_to_piece(tokenizer.eos_id)
    return {
        MODEL_FILE: tokenizer.model,
        JSON_FILE: _json(_tokenizer_json(model, eos)),
        "tokenizer_config.json": _json(_configuration(eos, model.id_to_piece(model.unk_id()))),
    }


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
    eos_id = pieces.index(eos)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        # In training an eos stands before every document.
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(eos, 0), {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                _special(eos, 0),
                {"Sequence": {"id": "A", "type_id": 0}},
                _special(eos, 1),
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {eos: {"id": eos, "ids": [eos_id], "tokens": [eos]}},
        },
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


def _special(token: str, kind: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": kind}}


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
