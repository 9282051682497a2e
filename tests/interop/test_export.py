"""Exported folders: whole, streamed, loaded by transformers and exported again without a bit changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from nvfp4_train import evaluate, export, generate
from nvfp4_train.errors import CheckpointError, ConfigError, SaveError
from nvfp4_train.interop.export import export as write
from nvfp4_train.interop.tensor_files import TensorFolder
from nvfp4_train.interop.weights import parameter_shapes
from nvfp4_train.training.inference import load_run, open_model


def same_tensors(a, b) -> bool:
    a, b = TensorFolder(a), TensorFolder(b)
    return a.keys() == b.keys() and all(
        a.read(k).dtype == b.read(k).dtype and torch.equal(a.read(k), b.read(k))
        for k in a.keys()  # noqa: SIM118
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_export_load_in_transformers_export_again_is_bit_equal(exported, tmp_path, dtype):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[dtype], dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    shutil.copy(exported[dtype] / "tokenizer.model", tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    export.main([f"run={tmp_path / 'theirs'}", f"out={tmp_path / 'again'}", f"dtype={dtype}"])
    assert same_tensors(exported[dtype], tmp_path / "again")
    first, again = (
        json.loads((p / "config.json").read_text()) for p in (exported[dtype], tmp_path / "again")
    )
    assert first == again


def test_fp32_is_the_master_weights_and_bf16_what_the_forward_pass_reads(tiny_run, exported):
    for dtype in ("fp32", "bf16"):
        weights = open_model(exported[dtype], pytest.fail).weights
        for name, value in tiny_run.model.state_dict().items():
            rounded = value.bfloat16().float() if dtype == "bf16" and value.ndim == 2 else value
            assert torch.equal(weights(name), rounded), name
    tokens = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(0))
    model = load_run(exported["bf16"], "cpu", pytest.fail).model
    with torch.no_grad(), tiny_run.precision.all_bf16():
        assert torch.equal(model(tokens), tiny_run.model(tokens))


def test_parameters_are_read_once_and_in_order_however_many_files_there_are(tiny_run, exported, tmp_path):
    read = []

    def source(name):
        read.append(name)
        return tiny_run.model.get_parameter(name).detach()

    cfg = tiny_run.cfg.model
    done = write(tmp_path / "out", cfg, source, tiny_run.dataset.tokenizer, 32, "bf16", shard_bytes=10_000)
    assert read == list(parameter_shapes(cfg))
    assert len(done.files) > 3
    assert sorted(p.name for p in done.files) == sorted(
        p.name for p in (tmp_path / "out").glob("*.safetensors")
    )
    assert (
        done.n_bytes
        == json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["metadata"]["total_size"]
    )
    for key in TensorFolder(tmp_path / "out").keys():  # noqa: SIM118
        assert torch.equal(TensorFolder(tmp_path / "out").read(key), TensorFolder(exported["bf16"]).read(key))
    transformers = pytest.importorskip("transformers")
    sharded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    single = transformers.AutoModelForCausalLM.from_pretrained(exported["bf16"]).state_dict()
    assert all(torch.equal(sharded[key], single[key]) for key in single)


def test_a_folder_appears_whole_or_not_at_all(tiny_run, tmp_path):
    cfg, tokenizer = tiny_run.cfg.model, tiny_run.dataset.tokenizer

    def fails(name):
        if name == "norm_f.weight":
            raise RuntimeError("the disk with the checkpoint is gone")
        return tiny_run.model.get_parameter(name).detach()

    with pytest.raises(RuntimeError, match="gone"):
        write(tmp_path / "out", cfg, fails, tokenizer, 32, "bf16")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="can't be written"):
        write(tmp_path / "file" / "out", cfg, fails, tokenizer, 32, "bf16")
    with pytest.raises(CheckpointError, match="is there already"):
        write(tmp_path / "file", cfg, fails, tokenizer, 32, "bf16")


def test_a_hugging_face_folder_writes_and_is_measured_like_a_run(tiny_run, exported, tmp_path, capsys):
    words = ["prompt=import ", "max_new_tokens=12", "temperature=0"]
    generate.main([f"run={exported['bf16']}", *words])
    text = capsys.readouterr().out
    assert text.startswith("import ")
    assert len(text) > 10
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40)
    for run in (exported["bf16"], tiny_run.path):
        evaluate.main([f"run={run}", f"data={tmp_path / 'text.txt'}", "bf16=true"])
    theirs, ours = capsys.readouterr().out.split("model")[1:]
    loss = ours.split("all in BF16")[1].split()[1]
    assert f"loss {loss}" in theirs
    with pytest.raises(ConfigError, match="data=FILE_OR_FOLDER"):
        evaluate.main([f"run={exported['bf16']}"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run=x", "out=y", "format=gguf"], "format='gguf' is unknown"),
        (["run=x", "out=y", "dtype=fp8"], "dtype='fp8' is unknown"),
        (["run=x", "out=y", "shard_gb=0"], "shard_gb=0"),
        (["run=/no/such", "out=y"], "doesn't exist"),
    ],
)
def test_bad_words_are_told(words, message):
    with pytest.raises(ConfigError, match=message):
        export.main(words)


def test_damaged_folders_are_told(exported, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(exported["fp32"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(CheckpointError, match=r"up_proj.* give \[64, 32\] .* \[80, 32\]"):
        load_run(folder, "cpu", pytest.fail)
    (folder / "config.json").write_text(json.dumps(config | {"hybrid_override_pattern": "M*M-M-"}))
    with pytest.raises(CheckpointError, match="has no tensor backbone"):
        load_run(folder, "cpu", pytest.fail)
    for name in ("tokenizer.model", "tokenizer.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.model or tokenizer\.json"):
        load_run(folder, "cpu", pytest.fail)
