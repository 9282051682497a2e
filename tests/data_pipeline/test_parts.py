"""Pieces, parts, the merge, duplicates: the same data set however the work was shared."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import VOCAB, make_text, silent
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data import duplicates, encode, merge, readers, sources
from nvfp4_train.data.build import prepare_into
from nvfp4_train.data.dataset import TOKENIZER, open_dataset
from nvfp4_train.data.duplicates import mark_duplicates
from nvfp4_train.data.encode import Part, Rules
from nvfp4_train.data.pieces import ENTRY, Piece, PieceWriter
from nvfp4_train.errors import ConfigError, DataError


@pytest.fixture
def small(monkeypatch):
    """Blocks, pieces and units so small that little text has many."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1 << 11)
    monkeypatch.setattr(encode, "BLOCK_BYTES", 1 << 11)
    monkeypatch.setattr(encode, "BATCHES_PER_PIECE", 3)
    monkeypatch.setattr(sources, "UNIT_BYTES", 1 << 14)
    monkeypatch.setattr(merge, "SLICE", 7)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Three .jsonl files with documents that occur again, within a file and in others."""
    folder, rng = tmp_path_factory.mktemp("parts") / "text", random.Random(1)
    folder.mkdir()
    documents = [make_text(rng, rng.randint(1, 60)) or "x" for _ in range(300)]
    for i in range(3):
        some = rng.choices(documents, k=250)
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in some))
    return folder


@pytest.fixture
def cfg(text, dataset) -> DataConfig:
    return DataConfig(source=str(text), valid_fraction=0.1, tokenizer=str(dataset.path / TOKENIZER))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("of", "source"), [(2, "*.jsonl"), (5, ""), (7, "0.jsonl")]
)  # more parts than units as well
@pytest.mark.parametrize("drop", [False, True])
def test_parts_in_any_order_merge_to_the_same_manifest(cfg, tmp_path, of, source, drop):
    cfg = replace(cfg, source=f"{cfg.source}/{source}" if source else cfg.source, drop_duplicates=drop)
    prepare_into(tmp_path / "whole", cfg, VOCAB, silent)
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"units of data.source=.* aren't encoded .*finish every part"):
        prepare_into(out, cfg, VOCAB, silent, merge_only=True)
    for number in random.Random(0).sample(range(1, of + 1), of):
        partial = prepare_into(out, cfg, VOCAB, silent, part=Part(number, of))
        assert partial == tmp_path / ".out.partial"
    prepare_into(out, cfg, VOCAB, silent, merge_only=True)
    assert (out / "manifest.json").read_bytes() == (tmp_path / "whole" / "manifest.json").read_bytes()
    dataset = open_dataset(out, check="full")
    ends = dataset.documents("train")[:, 0].tolist()
    texts = [
        dataset.tokenizer.decode(dataset.tokens("train", a, b).tolist())
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    assert (len(texts) == len(set(texts))) == drop
    assert not partial.exists()


@pytest.mark.usefixtures("small")
def test_several_workers_and_a_trained_tokenizer_change_nothing(cfg, tmp_path):
    cfg = replace(cfg, tokenizer=None)
    for n in (1, 3):
        prepare_into(tmp_path / str(n), cfg, VOCAB, silent, workers=n)
    assert (tmp_path / "1" / "manifest.json").read_bytes() == (tmp_path / "3" / "manifest.json").read_bytes()


@pytest.mark.usefixtures("small")
def test_a_repaired_file_costs_only_its_own_unit(cfg, tmp_path):
    folder = shutil.copytree(cfg.source, tmp_path / "text")
    cfg = replace(cfg, source=str(folder))
    bad = folder / "2.jsonl"
    content = bad.read_bytes()
    bad.write_bytes(content + b"{}\n")
    with pytest.raises(DataError, match=r"2\.jsonl line 251 has no field"):
        prepare_into(tmp_path / "out", cfg, VOCAB, silent)
    bad.write_bytes(content)
    lines: list[str] = []
    prepare_into(tmp_path / "out", cfg, VOCAB, lines.append)
    assert "2 of 3 units of text are encoded already" in lines
    prepare_into(tmp_path / "whole", cfg, VOCAB, silent)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == (
        tmp_path / "whole" / "manifest.json"
    ).read_bytes()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("at", [10, -150, -5])
def test_a_damaged_piece_is_named(cfg, tmp_path, at):
    prepare_into(tmp_path / "out", cfg, VOCAB, silent, part=Part(1, 1))
    path = sorted((tmp_path / ".out.partial" / "pieces").iterdir())[1]
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} is damaged: delete it and start again"):
        prepare_into(tmp_path / "out", cfg, VOCAB, silent)
    path.unlink()
    prepare_into(tmp_path / "out", cfg, VOCAB, silent)
    open_dataset(tmp_path / "out", check="full")


def test_parts_that_make_no_sense_are_refused():
    for text in ("3", "0/4", "5/4", "a/b", "1/", "-1/3", "1/0"):
        with pytest.raises(ConfigError, match="must be NUMBER/PARTS"):
            Part.parse(text)
    assert Part.parse("3/64") == Part(3, 64)
    assert sorted(i for n in range(1, 5) for i in range(99) if Part(n, 4).has(i)) == list(range(99))


def _piece(folder: Path, number: int, hashes: list[tuple[int, int]], lengths: list[int]) -> Piece:
    path = folder / f"{number:05d}"
    writer = PieceWriter(path, 2)
    entries = np.array([(a, b, n, 3 * n) for (a, b), n in zip(hashes, lengths, strict=True)], ENTRY)
    writer.append(np.arange(sum(lengths), dtype=np.uint16), entries)
    writer.close(last=False)
    return Piece(path)


hashes = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, (1 << 64) - 1])


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.tuples(hashes, st.sampled_from([0, 1 << 63, 5])), max_size=30), max_size=6
    ),
    chunk=st.integers(1, 40),
)
def test_of_equal_documents_the_first_stays_whatever_fits_in_memory(tmp_path_factory, documents, chunk):
    folder = tmp_path_factory.mktemp("pieces")
    pieces = [_piece(folder, i, some, [1] * len(some)) for i, some in enumerate(documents)]
    found = mark_duplicates(pieces, folder / "flags", chunk)
    seen: set = set()
    expected = [h in seen or seen.add(h) is not None for some in documents for h in some]
    assert np.fromfile(folder / "flags", np.uint8).tolist() == expected
    assert found == sum(expected)
    assert not (folder / "flags.buckets").exists()


def test_a_document_that_is_everywhere_fills_no_bucket(tmp_path, monkeypatch):
    sizes = []
    real = duplicates._first_of_each
    monkeypatch.setattr(duplicates, "_first_of_each", lambda h: sizes.append(len(h)) or real(h))
    pieces = [_piece(tmp_path, i, [(7, 7)] * 100, [1] * 100) for i in range(20)]
    assert mark_duplicates(pieces, tmp_path / "flags", chunk=50) == 1999
    assert max(sizes) <= 50


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), max_size=20), max_size=5),
    shard_tokens=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_shards_are_cut_by_the_document_that_fills_them(tmp_path_factory, lengths, shard_tokens, seed):
    folder, rng = tmp_path_factory.mktemp("cut"), random.Random(seed)
    made = [[(rng.choice([0, 9]), 0) for _ in some] for some in lengths]
    pieces = [_piece(folder, i, h, n) for i, (h, n) in enumerate(zip(made, lengths, strict=True))]
    selection = merge.Selection(Rules(valid_below=5))
    shards = merge.cut(pieces, selection, shard_tokens)
    for split, wanted in (("valid", 0), ("train", 9)):
        expected = [
            n
            for some, ns in zip(made, lengths, strict=True)
            for (h, _), n in zip(some, ns, strict=True)
            if h == wanted
        ]
        found = []
        for number, spans in enumerate(shards[split]):
            shard = merge.write_shard(folder, split, number, spans, selection, 65_536)
            index = np.fromfile(folder / shard.index_file, "<i8", offset=16).reshape(-1, 2)
            of_shard = np.diff(index[:, 0], prepend=0).tolist()
            assert sum(of_shard[:-1]) < shard_tokens
            assert number == len(shards[split]) - 1 or sum(of_shard) >= shard_tokens
            found += of_shard
        assert found == expected
