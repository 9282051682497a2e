from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import VOCAB, make_corpus, silent

from nvfp4_train.config.schema import Config, DataConfig, MixturePhaseConfig, TrainingConfig
from nvfp4_train.data.build import prepare
from nvfp4_train.data.corpora import Corpora, open_corpora
from nvfp4_train.data.dataset import TOKENIZER
from nvfp4_train.errors import CheckpointError, DataError
from nvfp4_train.training.history import History, Rewind
from nvfp4_train.training.resume import Start


@pytest.fixture(scope="module")
def folders(dataset, tmp_path_factory):
    """Three prepared data sets of one tokenizer."""
    root = tmp_path_factory.mktemp("corpora")
    tokenizer = str(dataset.path / TOKENIZER)
    made = [dataset.path]
    for seed in (1, 2):
        source = make_corpus(root / str(seed), documents=10, seed=seed)
        cfg = DataConfig(str(source), cache_dir=str(root), tokenizer=tokenizer, valid_fraction=0.1)
        made.append(prepare(cfg, VOCAB, silent))
    return dict(zip("abc", made, strict=True))


def mixed(*names: str) -> Config:
    """Equal shares of the corpora `names`, 100 steps of 64 tokens."""
    phase = MixturePhaseConfig(weights=dict.fromkeys(names, 1.0))
    training = TrainingConfig(max_tokens=6400, seq_len=32, global_batch_size=2, micro_batch_size=2)
    return Config(data=DataConfig(mixture=[phase]), training=training)


def launch(folders, names: str, past: Corpora | None = None, batch: int = 0) -> Corpora:
    record = past.record(batch) if past else None
    return open_corpora(mixed(*names), {name: folders[name] for name in names}, record, batch)


def test_a_corpus_that_was_left_out_for_a_while_keeps_its_name(folders):
    without = launch(folders, "a", launch(folders, "ab"), batch=10)
    with pytest.raises(CheckpointError, match=r"data.corpora.b=\S+ is not the data set .* trained on as b"):
        launch({**folders, "b": folders["c"]}, "ab", without, batch=20)
    with pytest.raises(CheckpointError, match=r"data.corpora.c=\S+ is what this run was trained on as b"):
        launch({**folders, "c": folders["b"]}, "ac", without, batch=20)
    again = launch(folders, "ab", without, batch=20)
    assert [s.start for s in again.segments] == [0, 10, 20]


def test_a_data_set_has_one_name(folders):
    with pytest.raises(DataError, match=r"data.corpora.b=\S+ is the same data set as data.corpora.a"):
        launch({**folders, "b": folders["a"]}, "ab")


def test_a_change_after_a_rewind_begins_with_the_batch_that_comes_next():
    rewind = Rewind("a spike", onset=12, found=14, back_to=10, skip=(11, 15), careful_until=20)
    for step, batch in ((10, 10), (11, 11 + 5), (20, 20 + 5)):
        values = {"data": "record", "recovery": {"rewinds": History((rewind,)).state()}}
        assert Start(SimpleNamespace(values=values, step=step), {}).data == ("record", batch)
    # Of a rewind after it, whose skipped batches may hold a phase's start, a checkpoint knows nothing.
    before = SimpleNamespace(values={"data": "record", "recovery": {"rewinds": []}}, step=11)
    assert Start(before, {}, history=History((rewind,))).data == ("record", 11)
