from __future__ import annotations

import gzip
import json
import os
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data import readers, sources
from nvfp4_train.data.sources import find_source
from nvfp4_train.errors import DataError


def texts(source) -> list[str]:
    return [document.text for document, _ in find_source(str(source)).documents()]


def lines(*records: str) -> bytes:
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(records)).encode()


def test_every_kind_of_file_gives_its_documents_byte_for_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo é\x00".encode())
    (tmp_path / "b.md").write_text("# b\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.py").write_text("c = 1\n")
    (tmp_path / "d.jsonl").write_bytes(lines("d0", "", "d2 \u2581") + b"\n  \n" + lines("d3"))
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(lines("e0", "e1")))
    (tmp_path / "f.jsonl.zst").write_bytes(zstandard.compress(lines("f0")) + zstandard.compress(lines("f1")))
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress(b"g"))
    (tmp_path / "h.txt.zst").write_bytes(zstandard.compress(b"h"))
    pq.write_table(pa.table({"id": [1, 2], "text": ["i0", "i1"]}), tmp_path / "i.parquet")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\xff\xd8")
    assert texts(tmp_path) == [
        "\ufeffone\r\ntwo é\x00", "# b\n", "d0", "d2 \u2581", "d3", "c = 1\n", "e0", "e1", "f0", "f1", "g", "h",
        "i0", "i1",
    ]  # fmt: skip


def test_the_standard_library_is_there_without_tests_packages_and_duplicates():
    source = find_source("stdlib")
    names = [file.name for unit in source.units for file in unit.files]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]
    documents = [document for document, _ in source.documents()]
    assert len({d.data for d in documents}) == len(documents) > 300
    assert sum(len(d.data) for d in documents) > 5_000_000
    argparse = next(d for d in documents if d.name == "argparse.py")
    assert argparse.data == Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in source.name


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab\né漢😀", max_size=200),
    part_bytes=st.integers(4, 40),
    compressed=st.booleans(),
)
def test_a_long_file_is_cut_into_parts_that_give_it_back(tmp_path_factory, text, part_bytes, compressed):
    path = tmp_path_factory.mktemp("t") / ("x.txt.zst" if compressed else "x.txt")
    path.write_bytes(zstandard.compress(text.encode()) if compressed else text.encode())
    (unit,) = find_source(str(path)).units
    source = sources.Source("x", (replace(unit, part_bytes=part_bytes),))
    parts = [document.data for document, _ in source.documents()]
    assert b"".join(parts).decode() == text
    assert all(len(part) <= part_bytes for part in parts)
    for part in parts[:-1]:  # a part ends with a line wherever it holds the end of one
        assert part.endswith(b"\n") or b"\n" not in part


def test_a_single_text_file_becomes_many_documents(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a line of the book\n" * 20_000)
    parts = texts(path)
    assert len(parts) == 6
    assert "".join(parts) == path.read_text()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("latin1.txt", b"line\ncaf\xe9 \n", "0xe9 at offset 8"),
        ("latin1.txt.gz", gzip.compress(b"caf\xe9", mtime=0), "0xe9 at offset 3"),
        ("latin1.jsonl", lines("fine") + b'{"text": "\xe9"}\n', "0xe9 at offset 36"),
        ("cut.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:-9], "truncated or damaged"),
        ("no.txt.gz", b"plain text", "truncated or damaged"),
        ("cut.jsonl.zst", zstandard.compress(lines(*map(str, range(5000))))[:-7], "truncated or damaged"),
        ("no.txt.zst", b"plain text", "truncated or damaged"),
        ("bad.jsonl", lines("fine") + b'{"text": "unfinished', "line 2 is not JSON"),
        ("bad.jsonl", b'{"content": "x"}\n', "line 1 has no field \"text\" that holds text (fields: content)"),
        ("bad.jsonl", b'{"text": 5}\n', "no field"),
        ("bad.jsonl", b'["text"]\n', "no field"),
        ("surrogate.jsonl", b'{"text": "ab\\ud800"}\n', "surrogate pair (\\ud800, character 2)"),
        ("bad.parquet", b"PAR1 not really PAR1", "no parquet file"),
    ],
)  # fmt: skip
def test_text_that_cannot_be_read_is_named(tmp_path, name, content, said):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        texts(tmp_path)
    assert str(tmp_path / name) in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"content": ["x"]}, 'no column "text" of strings (columns: content)'),
        ({"text": [1]}, 'no column "text" of strings'),
        ({"text": ["x", None]}, "row 1 has null"),
    ],
)
def test_a_parquet_file_without_text_is_named(tmp_path, table, said):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(table), path)
    with pytest.raises(DataError) as error:
        texts(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_the_offset_of_a_bad_byte_counts_from_the_start_of_a_file_read_in_parts(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"0123456\n" * 20_000 + b"\xff")
    with pytest.raises(DataError, match="0xff at offset 160000"):
        texts(path)


def test_a_pipe_in_the_folder_is_passed_over_and_a_broken_link_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    os.mkfifo(tmp_path / "pipe.txt")
    assert texts(tmp_path) == ["a\n"]
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"link\.txt"):
        texts(tmp_path)


def test_a_byte_order_mark_before_jsonl_is_passed_over(tmp_path):
    for name in ("x.jsonl", "y.jsonl.gz"):
        content = b"\xef\xbb\xbf" + lines("a", "\ufeffb")
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "z.jsonl").write_bytes(b"\xef\xbb\xbf")
    assert texts(tmp_path) == ["a", "\ufeffb"] * 2


def test_a_glob_gives_what_it_matches_once(tmp_path):
    for name in ("a/x.txt", "a/deep/y.txt", "b/x.txt", "b/x.md", "c.txt", ".hidden/x.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert texts(tmp_path / "*" / "*.txt") == ["a/x.txt", "b/x.txt"]
    assert texts(tmp_path / "**") == ["a/deep/y.txt", "a/x.txt", "b/x.md", "b/x.txt", "c.txt"]
    with pytest.raises(DataError, match="matches nothing"):
        texts(tmp_path / "*.nothing")


def test_a_url_gives_what_the_folder_would(tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    for name, content in [("a.txt", b"a"), ("deep/b.jsonl.gz", gzip.compress(lines("b"))), (".c.txt", b"c")]:
        store.pipe(f"/bucket/{name}", content)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    table = pa.table({"text": ["p"]})
    pq.write_table(table, tmp_path / "t.parquet")
    store.pipe("/bucket/t.parquet", (tmp_path / "t.parquet").read_bytes())
    assert texts("memory://bucket") == texts(f"file://{tmp_path}") == texts(tmp_path) == ["a", "b", "p"]
    assert texts("memory://bucket/*.txt") == ["a"]
    before = find_source("memory://bucket").fingerprint()
    store.pipe("/bucket/a.txt", b"changed")
    assert find_source("memory://bucket").fingerprint() != before
    store.pipe("/bucket/bad.txt.zst", b"no zst")
    with pytest.raises(DataError, match=r"/bucket/bad.txt.zst is truncated or damaged"):
        texts("memory://bucket")
    with pytest.raises(DataError, match="holds no text"):
        texts("memory://nothing")
    with pytest.raises(DataError, match=r"data.source=nope://x can't be listed"):
        texts("nope://x")


def test_a_line_too_long_to_be_parsed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE", 1 << 12)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1 << 10)
    (tmp_path / "x.jsonl").write_bytes(lines("fine", "x" * 4000))
    assert len(texts(tmp_path)) == 2
    (tmp_path / "x.jsonl").write_bytes(lines("fine", "x" * 10_000))
    with pytest.raises(DataError, match=r"x\.jsonl line 2 is longer than"):
        texts(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    documents = find_source(str(tmp_path)).documents()
    next(documents)
    (tmp_path / "b.txt").write_text("other")
    with pytest.raises(DataError, match=r"b\.txt was changed while it was read"):
        next(documents)


def test_tiny_files_take_no_memory_mapping_each(tmp_path):
    for i in range(300):
        (tmp_path / f"{i}.txt").write_text(str(i))

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    (unit,) = find_source(str(tmp_path)).units
    before = mappings()
    blocks = [block for block, _ in unit.blocks()]
    assert len(blocks) == 300
    assert mappings() - before < 100


def test_missing_empty_and_foreign_sources_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"data.source=\S+gone doesn't exist.*data.source=stdlib"):
        find_source(str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"holds no text.*\.jsonl"):
        find_source(str(tmp_path))
    (tmp_path / "x.png").write_bytes(b"x")
    with pytest.raises(DataError, match="holds no text"):
        find_source(str(tmp_path / "x.png"))


def test_memory_does_not_grow_with_the_file(tmp_path):
    import resource

    path = tmp_path / "x.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as f:
        for _ in range(60):
            f.write(lines("many words " * 100) * 1000)  # 1.1 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(len(d.data) for d, _ in find_source(str(path)).documents()) == 66_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
