"""safetensors files against the library's own reader and writer."""

from __future__ import annotations

import pathlib
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_train.errors import CheckpointError
from nvfp4_train.interop.tensor_files import INDEX, SINGLE, Entry, TensorFolder, write_sharded

safetensors = pytest.importorskip(
    "safetensors.torch", reason="the format's reference is safetensors (the dev extra)"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]


def sample(shape, dtype, seed):
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 120, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).view(shape)


def entries_of(tensors):
    return [Entry(k, tuple(t.shape), t.dtype, lambda t=t: t) for k, t in tensors.items()]


def equal(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


tensors_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6
)


@given(tensors_strategy, st.integers(1, 400))
def test_the_library_reads_what_is_written(kinds, shard_bytes):
    tensors = {f"layer.{i}": sample(*kind, i) for i, kind in enumerate(kinds)}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        files = write_sharded(folder, entries_of(tensors), shard_bytes)
        read = {}
        for path in files:
            part = safetensors.load_file(path)
            sizes = [t.numel() * t.element_size() for t in part.values()]
            assert len(part) == 1 or sum(sizes) <= shard_bytes
            assert not read.keys() & part.keys()
            read |= part
        ours = TensorFolder(folder)
        assert set(ours.keys()) == set(tensors)
        assert (folder / INDEX).exists() == (len(files) > 1)
        for key, tensor in tensors.items():
            assert equal(read[key], tensor)
            assert equal(ours.read(key), tensor)


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {f"t{i}": sample((3, 4), dtype, i) for i, dtype in enumerate(DTYPES)}
    safetensors.save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    ours = TensorFolder(tmp_path)
    assert all(equal(ours.read(key), tensor) for key, tensor in tensors.items())


def test_tensors_are_made_one_at_a_time_in_order(tmp_path):
    made = []

    def make(i):
        made.append(i)
        return torch.full((2,), float(i))

    write_sharded(tmp_path, [Entry(str(i), (2,), torch.float32, lambda i=i: make(i)) for i in range(5)], 16)
    assert made == [0, 1, 2, 3, 4]


def test_damaged_files_are_told(tmp_path):
    write_sharded(tmp_path, entries_of({"a": torch.arange(8.0)}), 1 << 20)
    path = tmp_path / SINGLE
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match="no tensor b"):
        TensorFolder(tmp_path).read("b")
    for damaged, message in (
        (whole[:-3], "truncated"),
        (b"\xff" * 16, "header's length"),
        (whole[:4], "no whole safetensors"),
        (whole.replace(b'"shape":[8]', b'"shape":[9]'), "doesn't fit its shape"),
        (whole.replace(b'{"__', b'["__'), "no whole safetensors"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=message):
            TensorFolder(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="can't be read"):
        TensorFolder(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="restore it"):
        TensorFolder(tmp_path)
