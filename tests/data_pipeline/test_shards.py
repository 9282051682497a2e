from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.corpora import Corpora
from nvfp4_train.data.dataset import TOKENIZER, is_dataset, open_dataset, write_manifest
from nvfp4_train.data.sampler import Sampler
from nvfp4_train.data.shards import OpenFiles, Shard, ShardReader, SplitWriter
from nvfp4_train.errors import DataError


@pytest.fixture
def copy(dataset, tmp_path):
    """A data set that may be damaged."""
    return shutil.copytree(dataset.path, tmp_path / "copy")


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=20), max_size=12),
    vocab_size=st.sampled_from([70_000, 65_536]),
    shard_tokens=st.integers(1, 40),
)
def test_what_is_written_is_read_back(tmp_path_factory, documents, vocab_size, shard_tokens):
    folder = tmp_path_factory.mktemp("shards")
    documents = [[token % vocab_size for token in document] for document in documents]
    writer = SplitWriter(folder, "train", vocab_size, shard_tokens)
    for i, document in enumerate(documents):
        writer.append(np.array(document), n_bytes=3 * i)
    split = writer.close()
    readers = [ShardReader(folder, Shard(**shard), vocab_size) for shard in split["shards"]]
    read = []
    for reader in readers:
        reader.check()
        reader.check_contents()
        index = reader.index()
        starts = [0, *index[:-1, 0].tolist()]
        read += [reader.read(a, b).tolist() for a, b in zip(starts, index[:, 0].tolist(), strict=True)]
    assert read == documents
    assert [n for reader in readers for n in reader.index()[:, 1].tolist()] == [
        3 * i for i in range(len(documents))
    ]
    assert split["tokens"] == sum(map(len, documents))
    assert split["documents"] == len(documents)


def test_the_stream_is_the_documents_and_their_ends(dataset, corpus):
    documents = sorted(path.read_bytes().decode() for path in corpus.iterdir())
    found = []
    for split in ("train", "valid"):
        start = 0
        for end, n_bytes in dataset.documents(split).tolist():
            tokens = dataset.tokens(split, start, end).tolist()
            assert tokens[-1] == dataset.tokenizer.eos_id not in tokens[:-1]
            found.append(dataset.tokenizer.decode(tokens))
            assert len(found[-1].encode()) == n_bytes
            start = end
        assert start == dataset.n_tokens(split)
        assert dataset.documents(split)[:, 1].sum() == dataset.n_bytes(split)
    assert sorted(found) == documents


def test_tokens_are_read_across_shards(dataset, tmp_path):
    """The same stream, cut into many shards, reads the same."""
    folder = tmp_path / "many"
    folder.mkdir()
    shutil.copy(dataset.path / TOKENIZER, folder)
    splits = {}
    for split in ("train", "valid"):
        writer, start = SplitWriter(folder, split, dataset.tokenizer.vocab_size, shard_tokens=500), 0
        for end, n_bytes in dataset.documents(split).tolist():
            writer.append(dataset.tokens(split, start, end), n_bytes)
            start = end
        splits[split] = writer.close()
    write_manifest(folder, {**dataset.manifest, "splits": splits})
    many = open_dataset(folder, check="full")
    assert len(many.readers()) > 5
    n = dataset.n_tokens("train")
    for start, stop in [(0, n), (0, 0), (n, n), (498, 502), (100, 3000), (n - 1, n)]:
        assert (many.tokens("train", start, stop) == dataset.tokens("train", start, stop)).all()
    assert (many.documents("train") == dataset.documents("train")).all()


def damaged(folder, check="fast") -> str:
    with pytest.raises(DataError) as error:
        open_dataset(folder, check)
    message = str(error.value)
    assert f"delete {folder} and prepare the data again" in message
    return message


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx", "valid-00000.bin", "valid-00000.idx"])
def test_a_truncated_missing_or_grown_shard_is_named_at_once(copy, name):
    path = copy / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert f"{path} is truncated" in damaged(copy)
    path.write_bytes(content[:5])
    assert f"{path} is truncated" in damaged(copy)
    path.write_bytes(content + b"\0")
    assert f"{path} is too long" in damaged(copy)
    path.write_bytes(b"X" + content[1:])
    assert str(path) in damaged(copy)
    path.unlink()
    assert f"{path} can't be read" in damaged(copy)


@pytest.mark.parametrize("name", ["train-00000.bin", "valid-00000.idx"])
def test_a_flipped_bit_is_found_by_the_full_check(copy, name):
    path = copy / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    open_dataset(copy)
    assert f"{path} has changed" in damaged(copy, check="full")


def test_a_changed_tokenizer_is_refused(copy, dataset):
    path = copy / TOKENIZER
    path.write_bytes(path.read_bytes() + b"\x12\x00")
    assert str(path) in damaged(copy)
    path.unlink()
    assert str(path) in damaged(copy)


def test_a_changed_manifest_is_refused(copy):
    path = copy / "manifest.json"
    content = path.read_text()
    path.write_text(content.replace('"valid_fraction": 0.1', '"valid_fraction": 0.2'))
    assert f"{path} has changed" in damaged(copy)
    path.write_text(content[: len(content) // 2])
    assert f"{path} is damaged" in damaged(copy)
    assert is_dataset(copy)  # damaged, but not taken for a folder of text
    manifest = json.loads(content)
    path.write_text(json.dumps({**manifest, "format_version": 99}))
    assert f"{path} has format 99, this program reads up to 1: update" in damaged(copy)


def test_a_folder_of_something_else_is_no_data_set(tmp_path):
    assert not is_dataset(tmp_path)
    with pytest.raises(DataError, match="no prepared data set"):
        open_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    assert not is_dataset(tmp_path)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_shard_that_is_cut_while_a_run_reads_is_named(copy, packing):
    """With a memory map this would kill the process."""
    corpora = Corpora({"text": open_dataset(copy)}, packing=packing)
    sampler = Sampler(corpora, seq_len=64, global_batch_size=64, seed=0)
    sampler.batch(0)
    path = copy / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"train-00000\.bin was truncated while it was in use"):
        sampler.batch(1)


def test_an_index_out_of_order_is_named(copy):
    path = copy / "train-00000.idx"
    content = bytearray(path.read_bytes())
    content[16:] = bytes(len(content) - 16)
    path.write_bytes(content)
    corpora = Corpora({"text": open_dataset(copy)}, packing="documents")
    sampler = Sampler(corpora, seq_len=64, global_batch_size=64, seed=0)
    with pytest.raises(DataError, match=r"train-00000\.idx is wrong"):
        sampler.batch(0)


def test_more_shards_than_may_be_open(tmp_path):
    """Their files are opened again when they are needed again."""
    writer = SplitWriter(tmp_path, "train", 384, shard_tokens=1)
    for i in range(40):
        writer.append(np.array([i, i + 1]), n_bytes=1)
    files = OpenFiles(limit=3)
    readers = [ShardReader(tmp_path, Shard(**shard), 384, files) for shard in writer.close()["shards"]]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert [reader.read(0, 2).tolist() for reader in readers] == [[i, i + 1] for i in range(40)]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_token_beyond_the_vocabulary_stops_the_read(copy):
    path = copy / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[16:] = b"\xff" * (len(content) - 16)
    path.write_bytes(content)
    sampler = Sampler(open_dataset(copy), seq_len=16, global_batch_size=2, seed=0)
    with pytest.raises(
        DataError, match=r"train-00000\.bin is damaged \(a token id of 65535, the vocabulary has 384\)"
    ):
        sampler.batch(0)
