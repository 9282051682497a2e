"""Configurations both ways, and what is refused."""

from __future__ import annotations

import json

import pytest

from nvfp4_train.config.load import compose_config, option_names
from nvfp4_train.errors import CheckpointError
from nvfp4_train.interop.nemotron_h import (
    differences,
    hugging_face_config,
    model_config,
    read_config,
    tensor_keys,
)
from nvfp4_train.interop.weights import parameter_shapes

EXPERIMENTS = option_names("experiment")


def model_of(experiment):
    return compose_config([f"+experiment={experiment}", "data.source=unused"]).model


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_there_and_back(experiment):
    cfg = model_of(experiment)
    theirs = hugging_face_config(cfg, 8192, 1, "bfloat16")
    back = model_config(json.loads(json.dumps(theirs, allow_nan=False)), "name")
    assert differences(cfg, back) == {}
    assert back.chunk_size == cfg.chunk_size


def test_transformers_reads_the_configuration():
    """Its own file of it, with its present names of layer types, is read too."""
    transformers = pytest.importorskip("transformers")
    cfg = model_of("12b_hybrid")
    config = transformers.NemotronHConfig(**hugging_face_config(cfg, 8192, 1, "bfloat16"))
    assert config.num_hidden_layers == 62
    assert str(config.dtype) == "torch.bfloat16"
    theirs = json.loads(config.to_json_string(use_diff=False))
    assert "hybrid_override_pattern" not in theirs
    assert differences(cfg, model_config(theirs, "name")) == {}


def test_12b_has_the_published_tensors():
    cfg = model_of("12b_hybrid")
    shapes = parameter_shapes(cfg)
    out = {}
    for name, shape in shapes.items():
        for key, rows in tensor_keys(name, cfg):
            out[key] = (len(range(shape[0])[rows]), *shape[1:])
    assert out["backbone.embeddings.weight"] == out["lm_head.weight"] == (131072, 5120)
    assert out["backbone.layers.0.mixer.in_proj.weight"] == (22656, 5120)
    assert out["backbone.layers.0.mixer.conv1d.weight"] == (12288, 1, 4)
    assert out["backbone.layers.7.mixer.q_proj.weight"] == (5120, 5120)
    assert (
        out["backbone.layers.7.mixer.k_proj.weight"]
        == out["backbone.layers.7.mixer.v_proj.weight"]
        == (1024, 5120)
    )
    assert out["backbone.layers.1.mixer.up_proj.weight"] == (20480, 5120)
    assert out["backbone.norm_f.weight"] == (5120,)
    assert (
        sum(
            out[k][0] * (out[k][1] if len(out[k]) > 1 else 1) * (out[k][2] if len(out[k]) > 2 else 1)
            for k in out
        )
        == 12310001152
    )


def test_older_names_of_layers():
    theirs = hugging_face_config(model_of("quickstart"), 256, 1, "float32")
    del theirs["hybrid_override_pattern"], theirs["head_dim"]
    theirs["layers_block_type"] = ["mamba", "attention", "mlp", "mamba", "mlp"]
    back = model_config(theirs, "name")
    assert (back.pattern, back.head_dim) == ("M*-M-", 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"use_bias": True}, "use_bias=True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hybrid_override_pattern": "ME*-"}, "no experts"),
        ({"time_step_limit": [0.001, 0.1]}, "clamps time steps to 0.001"),
        ({"vocab_size": None}, "lacks vocab_size"),
    ],
)
def test_another_model_is_refused(change, message):
    theirs = hugging_face_config(model_of("quickstart"), 256, 1, "float32") | change
    with pytest.raises(CheckpointError, match=message):
        model_config(theirs, "name")


def test_an_unreadable_or_foreign_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type='llama'"):
        read_config(tmp_path)
