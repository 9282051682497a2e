from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import VOCAB, make_corpus, silent

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data import build, encode, measure
from nvfp4_train.data.build import prepare, prepare_into
from nvfp4_train.data.dataset import MANIFEST, TOKENIZER, open_dataset
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.errors import ConfigError, DataError
from nvfp4_train.prepare import exit_code, main


@pytest.fixture
def cfg(corpus, tmp_path) -> DataConfig:
    return DataConfig(source=str(corpus), cache_dir=str(tmp_path / "cache"), valid_fraction=0.1)


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def texts(dataset, split: str) -> list[str]:
    ends = dataset.documents(split)[:, 0].tolist()
    return [
        dataset.tokenizer.decode(dataset.tokens(split, a, b).tolist())
        for a, b in zip([0, *ends], ends, strict=False)
    ]


def test_a_second_call_builds_nothing(cfg, monkeypatch):
    lines = []
    path = prepare(cfg, VOCAB, lines.append)
    assert path.parent == Path(cfg.cache_dir)
    assert lines[-1].startswith("Prepared ")
    monkeypatch.setattr(build, "decide", None)
    assert prepare(cfg, VOCAB, pytest.fail) == path
    assert visible(path.parent) == [path.name]


def test_the_cache_lies_where_the_environment_says(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepare(DataConfig(source=str(corpus)), VOCAB, silent).parent == tmp_path / "nvfp4_train"


def test_the_same_text_gives_the_same_data_set_wherever_it_lies(cfg, corpus, tmp_path):
    first = open_dataset(prepare(cfg, VOCAB, silent))
    elsewhere = shutil.copytree(corpus, tmp_path / "elsewhere")
    second = open_dataset(prepare(replace(cfg, source=str(elsewhere)), VOCAB, silent))
    assert second.path != first.path
    assert second.hash == first.hash
    assert second.tokenizer.hash == first.tokenizer.hash


def test_any_change_of_what_matters_builds_another(cfg, tmp_path):
    corpus = make_corpus(tmp_path / "text")
    cfg = replace(cfg, source=str(corpus))
    first = open_dataset(prepare(cfg, VOCAB, silent))
    with open(corpus / "000.txt", "a") as f:
        f.write("one more line\n")
    changed = open_dataset(prepare(cfg, VOCAB, silent))
    (corpus / "new.md").write_text("a new file")
    grown = open_dataset(prepare(cfg, VOCAB, silent))
    os.utime(corpus / "new.md", (0, 0))
    touched = open_dataset(prepare(cfg, VOCAB, silent))
    others = [
        open_dataset(prepare(replace(cfg, valid_fraction=0.3), VOCAB, silent)),
        open_dataset(prepare(cfg, VOCAB + 1, silent)),
        open_dataset(prepare(replace(cfg, max_train_bytes=20_000), VOCAB, silent)),
    ]
    assert len({d.path for d in (first, changed, grown, touched, *others)}) == 7
    assert len({d.hash for d in (first, changed, grown, *others)}) == 6
    assert touched.hash == grown.hash  # the same text, read again
    assert "one more line" in "".join(texts(changed, "train") + texts(changed, "valid"))


def test_a_prepared_data_set_is_a_source(cfg, dataset):
    assert prepare(replace(cfg, source=str(dataset.path)), VOCAB, pytest.fail) == dataset.path
    with pytest.raises(DataError, match=r"model.vocab_size=999, but .*set model.vocab_size=384"):
        prepare(replace(cfg, source=str(dataset.path)), 999, silent)


def test_held_out_documents_are_chosen_by_their_content_alone(cfg, tmp_path):
    corpus = make_corpus(tmp_path / "text", documents=300, words=30)
    cfg = replace(cfg, source=str(corpus))
    before = open_dataset(prepare(cfg, VOCAB, silent))
    held_out = set(texts(before, "valid"))
    assert not held_out & set(texts(before, "train"))
    assert 10 < len(held_out) < 60
    for i, path in enumerate(sorted(corpus.iterdir())):  # other names, other order, half of the documents
        path.rename(corpus / f"{(i * 7) % 300:03d}.md") if i % 2 else path.unlink()
    after = open_dataset(prepare(cfg, VOCAB, silent))
    everything = set(texts(after, "valid")) | set(texts(after, "train"))
    assert set(texts(after, "valid")) == held_out & everything


def test_at_most_so_many_training_bytes(cfg):
    every = open_dataset(prepare(cfg, VOCAB, silent))
    few = open_dataset(prepare(replace(cfg, max_train_bytes=30_000), VOCAB, silent))
    assert 15_000 < few.n_bytes("train") <= 30_000 < every.n_bytes("train")
    assert set(texts(few, "train")) < set(texts(every, "train"))
    assert texts(few, "valid") == texts(every, "valid")
    with pytest.raises(DataError, match=r"data.max_train_bytes=3 is less than one document"):
        prepare(replace(cfg, max_train_bytes=3), VOCAB, silent)


def test_the_tokenizer_never_sees_held_out_text(cfg, tmp_path):
    corpus = make_corpus(tmp_path / "text")
    cfg = replace(cfg, source=str(corpus))
    before = open_dataset(prepare(cfg, VOCAB, silent))
    for i in itertools.count():
        text = "zzz " * 400 + str(i)
        if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < 0.1 * 2**64:
            break  # such a document is held out
    (corpus / "new.txt").write_text(text)
    after = open_dataset(prepare(cfg, VOCAB, silent))
    assert text in texts(after, "valid")
    assert after.tokenizer.hash == before.tokenizer.hash


def test_one_document_is_held_out_even_of_few(cfg, tmp_path):
    corpus = make_corpus(tmp_path / "text", documents=3, words=2000)
    dataset = open_dataset(prepare(replace(cfg, source=str(corpus), valid_fraction=1e-9), VOCAB, silent))
    assert dataset.n_documents("valid") == 1
    assert dataset.n_documents("train") == 2


@pytest.mark.parametrize("documents", [["only one"], ["twice", "twice"], ["", "x", ""]])
def test_too_few_documents_are_refused(cfg, tmp_path, documents):
    folder = tmp_path / "text"
    folder.mkdir()
    for i, text in enumerate(documents):
        (folder / f"{i}.txt").write_text(text)
    with pytest.raises(DataError, match=r"too few documents to train on some and hold out others"):
        prepare(replace(cfg, source=str(folder)), VOCAB, silent)
    assert visible(Path(cfg.cache_dir)) == []


def test_a_tokenizer_of_ones_own_is_used(cfg, dataset, tmp_path):
    model = shutil.copy(dataset.path / TOKENIZER, tmp_path / "my.model")
    other = make_corpus(tmp_path / "text", seed=5)
    mine = open_dataset(prepare(replace(cfg, source=str(other), tokenizer=str(model)), VOCAB, silent))
    assert mine.tokenizer.hash == dataset.tokenizer.hash
    with pytest.raises(
        DataError, match=r"model.vocab_size=512, but data.tokenizer=\S+my.model has 384 pieces"
    ):
        prepare(replace(cfg, tokenizer=str(model)), 512, silent)


def test_values_out_of_range_are_refused(cfg):
    for value in (0.0, 1.0, -1.0):
        with pytest.raises(ConfigError, match=r"data.valid_fraction=\S+ must lie between 0 and 1"):
            prepare(replace(cfg, valid_fraction=value), VOCAB, silent)
    with pytest.raises(ConfigError, match=r"data.max_train_bytes=0 must be"):
        prepare(replace(cfg, max_train_bytes=0), VOCAB, silent)
    with pytest.raises(DataError, match=r"model.vocab_size=50000 is too large .* at most \d+"):
        prepare(cfg, 50_000, silent)
    assert visible(Path(cfg.cache_dir)) == []


def test_a_damaged_cache_is_named_and_not_used(cfg):
    path = prepare(cfg, VOCAB, silent)
    shard = path / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=rf"{shard} is truncated .*delete {path}"):
        prepare(cfg, VOCAB, silent)
    shutil.rmtree(path)
    open_dataset(prepare(cfg, VOCAB, silent), check="full")


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_data_set_without_a_readable_manifest_is_no_folder_of_text(cfg, damage):
    path = prepare(cfg, VOCAB, silent)
    manifest = path / MANIFEST
    if damage == "missing":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace("nvfp4_train.dataset", "nvfp5_train.dataset"))
    for source in (cfg.source, str(path)):  # in the cache, before anything is built again; and named itself
        with pytest.raises(DataError, match=rf"{manifest} (can't be read|is damaged).*delete {path}"):
            prepare(replace(cfg, source=source), VOCAB, pytest.fail)


def test_a_refusal_does_not_wait_for_the_compressors(cfg, dataset, tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path / "text")
    (corpus / "zzz.txt").write_bytes(b"\xff\xfe")
    refused, measured, threads = threading.Event(), [], set()

    def add(self, data: bytes) -> None:
        threads.add(threading.current_thread())
        measured.append(data)
        assert refused.wait(60)

    monkeypatch.setattr(measure.Baselines, "add", add)
    monkeypatch.setattr(encode, "BLOCK_BYTES", 1 << 10)  # the bad file comes in a later call than the others
    with pytest.raises(DataError, match=r"zzz.txt is not UTF-8"):
        prepare(replace(cfg, source=str(corpus), tokenizer=str(dataset.path / TOKENIZER)), VOCAB, silent)
    refused.set()
    for thread in threads:
        thread.join(60)
    assert len(measured) == 1


def test_a_bad_file_leaves_nothing(cfg, tmp_path):
    corpus = make_corpus(tmp_path / "text")
    (corpus / "zzz.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"zzz.txt is not UTF-8"):
        prepare(replace(cfg, source=str(corpus)), VOCAB, silent)
    assert visible(Path(cfg.cache_dir)) == []


def test_text_that_changes_while_it_is_read_is_refused(cfg, tmp_path):
    corpus = make_corpus(tmp_path / "text")

    def meddle(line: str) -> None:
        if line.startswith("Training"):
            (corpus / "000.txt").write_text("something else")

    with pytest.raises(DataError, match="was changed while it was read"):
        prepare(replace(cfg, source=str(corpus)), VOCAB, meddle)
    assert visible(Path(cfg.cache_dir)) == []


def test_a_folder_with_other_files_is_not_written_to(cfg, tmp_path, dataset):
    with pytest.raises(DataError, match=r"holds other files: give a new folder"):
        prepare_into(Path(cfg.source), cfg, VOCAB, silent)
    out = prepare_into(tmp_path / "out", cfg, VOCAB, silent)
    assert prepare_into(out, cfg, VOCAB, pytest.fail) == out
    assert open_dataset(out).hash == dataset.hash
    with pytest.raises(DataError, match=r"of another source or other settings"):
        prepare_into(out, replace(cfg, valid_fraction=0.2), VOCAB, silent)


# --- with real processes ---


@pytest.fixture
def small_pieces():
    """The same command with pieces, units and blocks so small that little text has many.

    `kill_before`: module, function and how often it may be called before its process kills itself (SIGKILL).
    """

    def changed(command: list[str], kill_before: tuple[str, str, int] | None = None) -> list[str]:
        code = (
            "import sys; from nvfp4_train.data import encode, readers, sources;"
            "encode.BATCHES_PER_PIECE = 4; encode.BLOCK_BYTES = 1 << 12; sources.UNIT_BYTES = 1 << 18;"
            "import importlib, os, signal\n"
            "def killing(function, n):\n"
            "    calls = []\n"
            "    def f(*args, **kwargs):\n"
            "        calls.append(0)\n"
            "        if len(calls) == n: os.kill(os.getpid(), signal.SIGKILL)\n"
            "        return function(*args, **kwargs)\n"
            "    return f\n"
            f"moment = {kill_before}\n"
            "if moment:\n"
            "    module = importlib.import_module(moment[0])\n"
            "    setattr(module, moment[1], killing(getattr(module, moment[1]), moment[2]))\n"
            "from nvfp4_train.prepare import exit_code, main; sys.exit(exit_code(main))"
        )
        return [sys.executable, "-c", code, *command[3:]]

    return changed


@pytest.fixture(scope="module")
def big_corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("big") / "text", documents=150, words=800)


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "nvfp4_train.prepare",
        f"data.source={corpus}",
        f"out={out}",
        f"vocab_size={VOCAB}",
        *more,
    ]


def test_killed_at_any_moment_it_goes_on_where_it_was(big_corpus, tmp_path, small_pieces):
    reference, out = tmp_path / "reference", tmp_path / "out"
    subprocess.run(small_pieces(command(big_corpus, reference)), check=True, stdout=subprocess.DEVNULL)
    partial = tmp_path / ".out.partial"
    counts = []
    for moment in (
        ("nvfp4_train.data.build", "decide", 1),
        ("nvfp4_train.data.encode", "PieceWriter", 2),
        ("nvfp4_train.data.encode", "PieceWriter", 3),
        ("nvfp4_train.data.merge", "cut", 1),
        ("nvfp4_train.data.build", "write_manifest", 1),
    ):
        killed = small_pieces(command(big_corpus, out, "workers=2"), kill_before=moment)
        assert subprocess.run(killed, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
        assert not out.exists()
        counts.append(len([*partial.glob("pieces/[!.]*")]))
    assert counts[:3] == [0, 1, 3]
    assert counts[3] == counts[4] > 5
    output = subprocess.run(
        small_pieces(command(big_corpus, out)), check=True, capture_output=True, text=True
    )
    assert "units of text are encoded already" in output.stdout
    assert "Training a tokenizer" not in output.stdout
    assert (out / "manifest.json").read_bytes() == (reference / "manifest.json").read_bytes()
    open_dataset(out, check="full")
    assert not partial.exists()


@pytest.mark.parametrize("limit", [1000, 100_000])  # bytes a file: the tokenizer doesn't fit, a shard doesn't
def test_a_full_disk_is_told_and_leaves_nothing(big_corpus, tmp_path, limit):
    out = tmp_path / "out"
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "from nvfp4_train.prepare import exit_code, main; sys.exit(exit_code(main))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *command(big_corpus, out)[3:]], capture_output=True, text=True
    )
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.splitlines()
    assert f"can't be written to {out} (File too large): free space there" in line
    assert visible(tmp_path) == []


def test_processes_that_want_the_same_build_it_once(big_corpus, tmp_path):
    out = tmp_path / "out"
    processes = [
        subprocess.Popen(command(big_corpus, out), stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("Prepared " in output for output in outputs) == 1
    open_dataset(out, check="full")
    assert visible(tmp_path) == ["out"]


def test_who_waited_while_another_data_set_was_built_in_its_place_is_refused(cfg, tmp_path):
    waits, errors = threading.Event(), []

    def second() -> None:
        with pytest.raises(DataError) as error:
            prepare_into(tmp_path / "out", replace(cfg, valid_fraction=0.2), VOCAB, lambda line: waits.set())
        errors.append(str(error.value))

    thread = threading.Thread(target=second)

    def first(line: str) -> None:
        if line.startswith("Training"):
            thread.start()
            assert waits.wait(60)

    prepare_into(tmp_path / "out", cfg, VOCAB, first)
    thread.join()
    assert "another source or other settings" in errors[0]


def test_threads_that_want_the_same_build_it_once(cfg):
    built = []
    threads = [
        threading.Thread(target=prepare, args=(cfg, VOCAB, lambda line: built.append(line))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(line.startswith("Prepared") for line in built) == 1


def test_the_command_builds_verifies_and_describes(corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"

    def called(*arguments: str) -> tuple[int, str, str]:
        """As `run`, without the time that a new process takes to start."""
        monkeypatch.setattr(sys, "argv", ["prepare", f"out={out}", *arguments])
        code = exit_code(main)
        return code, *capsys.readouterr()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nvfp4_train.prepare", f"out={out}", *arguments],
            capture_output=True,
            text=True,
        )

    built = run(f"data.source={corpus}", f"vocab_size={VOCAB}")
    assert built.returncode == 0, built.stderr
    assert "bytes a token" in built.stdout
    stats = called("action=stats")[1]
    assert built.stdout.splitlines()[-1] in stats
    assert "Length of train documents in tokens" in stats
    assert "document 9, token " in stats
    assert "is whole" in called("action=verify", "workers=1")[1]
    shard = out / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    broken = run("action=verify")
    assert broken.returncode == 2
    assert str(shard) in broken.stderr
    for arguments, said in [
        (["data.sorce=x"], "did you mean data.source"),
        (["action=fly"], "choose build, merge, verify, stats"),
        (["vocab_size=many"], "must be a whole number or null"),
        ([f"data.source={tmp_path / 'gone'}"], "doesn't exist"),
    ]:
        code, _, refused = called(*arguments)
        assert code == 2
        assert said in refused
        assert len(refused.splitlines()) == 1


def test_it_goes_on_when_nobody_reads_what_it_reports(corpus, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as stdout:
        subprocess.run(command(corpus, tmp_path / "out"), stdout=stdout, check=True)
    open_dataset(tmp_path / "out", check="full")


def test_the_vocabulary_is_the_given_tokenizers(corpus, dataset, tmp_path):
    model = dataset.path / TOKENIZER
    main([f"data.source={corpus}", f"out={tmp_path / 'out'}", f"data.tokenizer={model}"])
    assert open_dataset(tmp_path / "out").tokenizer.vocab_size == Tokenizer.load(model).vocab_size == VOCAB
