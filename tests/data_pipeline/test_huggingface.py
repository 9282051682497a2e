"""Sources from the library `datasets`, from folders on disk: no network."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import VOCAB, make_text, silent

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data import huggingface
from nvfp4_train.data.build import prepare_into
from nvfp4_train.data.dataset import TOKENIZER, open_dataset
from nvfp4_train.data.sources import find_source
from nvfp4_train.errors import DataError


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
        yield


@pytest.fixture(scope="module")
def texts() -> list[str]:
    import random

    rng = random.Random(3)
    return [f"{i} " + make_text(rng, 30) for i in range(300)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """A folder of two data files."""
    folder = tmp_path_factory.mktemp("files")
    for i in range(2):
        some = texts[150 * i : 150 * (i + 1)]
        (folder / f"train-{i}.jsonl").write_text(
            "".join(json.dumps({"body": t, "n": 1}) + "\n" for t in some)
        )
    return folder


def read(source: str, **options) -> list[str]:
    return [document.text for document, _ in find_source(source, DataConfig(**options)).documents()]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_folder_of_data_files_gives_its_rows(folder, texts, streaming, monkeypatch):
    monkeypatch.setattr(huggingface, "UNIT_ROWS", 64)
    source = find_source(f"hf:{folder}", DataConfig(text_key="body", hf_streaming=streaming))
    assert len(source.units) == (2 if streaming else 5)
    assert [document.text for document, _ in source.documents()] == texts


def test_a_saved_data_set_gives_its_rows(texts, tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "one")
    assert read(f"hf:{tmp_path / 'one'}") == texts
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": texts[:9]})}).save_to_disk(
        tmp_path / "two"
    )
    assert read(f"hf:{tmp_path / 'two'}", hf_split="test") == texts[:9]


def test_it_is_prepared_like_the_same_text_in_files(folder, dataset, tmp_path):
    cfg = DataConfig(source=str(folder), text_key="body", tokenizer=str(dataset.path / TOKENIZER))
    made = {}
    for name, change in {
        "files": {}, "stream": {"source": f"hf:{folder}"}, "rows": {"source": f"hf:{folder}", "hf_streaming": False}
    }.items():  # fmt: skip
        made[name] = open_dataset(prepare_into(tmp_path / name, replace(cfg, **change), VOCAB, silent))
    assert made["files"].hash == made["stream"].hash == made["rows"].hash


def test_what_cannot_be_read_is_named(folder, tmp_path):
    with pytest.raises(DataError, match=r'has no column "text" \(columns: body, n\).*data.text_key'):
        read(f"hf:{folder}", hf_streaming=False)
    with pytest.raises(DataError, match=r"data.source=hf:\S+ can't be opened .*data.hf_split=nope"):
        read(f"hf:{folder}", hf_split="nope")
    with pytest.raises(DataError, match=r"data.source=hf:no/such can't be opened"):
        read("hf:no/such")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(DataError, match=r"row 1 has null in the column \"text\""):
        read(f"hf:{tmp_path}")


def test_without_the_library_it_says_what_to_install(monkeypatch, folder):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"needs the package datasets: install it with pip install 'nvfp4-train\[hf\]'"
    ):
        read(f"hf:{folder}")
