from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.config.blocking import BLOCK, quantized_layers
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.schema import Config, ModelConfig
from nvfp4_train.config.validate import validate
from nvfp4_train.errors import ConfigError
from nvfp4_train.model.flops import linear_layers
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.precision import Linear, apply_recipe

BASE = compose_config(["+experiment=quickstart"])


@st.composite
def models(draw, **fixed) -> ModelConfig:
    groups, kv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {
        "pattern": draw(st.text("M*-", min_size=2, max_size=5)),
        "hidden_size": draw(st.sampled_from([32, 48, 50])),
        "intermediate_size": draw(st.sampled_from([64, 72, 80])),
        "num_key_value_heads": kv,
        "num_attention_heads": kv * draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from([8, 16])),
        "n_groups": groups,
        "mamba_num_heads": groups * draw(st.integers(1, 6)),
        "mamba_head_dim": draw(st.sampled_from([8, 12, 16])),
        "ssm_state_size": draw(st.integers(1, 24)),
        "vocab_size": 64,
        "chunk_size": 8,
    }
    return replace(BASE.model, **sizes | fixed)


def config(model: ModelConfig, batch: int = 2, seq_len: int = 16) -> Config:
    training = replace(BASE.training, seq_len=seq_len, micro_batch_size=batch, global_batch_size=batch)
    precision = replace(BASE.precision, first_blocks_bf16=0, last_blocks_bf16=1)
    return replace(BASE, model=model, training=training, precision=precision)


@given(models())
@settings(max_examples=40, deadline=None)
def test_linear_layers_are_those_of_the_model(model):
    modules = HybridModel(model, "meta").named_modules()
    built = [(name, m.out_features, m.in_features) for name, m in modules if isinstance(m, Linear)]
    assert [(layer.name, layer.out_features, layer.in_features) for layer in linear_layers(model)] == built


@given(models(), st.integers(1, 3), st.integers(8, 33))
@settings(max_examples=60, deadline=None)
def test_accepts_exactly_whole_blocks(model, batch, seq_len):
    cfg = config(model, batch, seq_len)
    widths = [n for layer in quantized_layers(cfg) for n in (layer.in_features, layer.out_features)]
    whole = all(n % BLOCK == 0 for n in (*widths, batch * seq_len))
    if whole:
        validate(cfg)
    else:
        with pytest.raises(ConfigError, match=f"multiple of {BLOCK}"):
            validate(cfg)


@given(models())
@settings(max_examples=60, deadline=None)
def test_each_suggested_value_mends_the_layer(model):
    cfg = config(model)
    try:
        validate(cfg)
        return
    except ConfigError as error:
        message = str(error)
    wrong = re.match(r"(\S+) has \d+ (\w+)", message)
    suggestions = re.findall(r"set model\.(\w+)=\d+ to (\d+)(?: or (\d+))?", message)
    for key, *values in suggestions:
        for value in filter(None, values):
            mended = config(replace(model, **{key: int(value)}))
            try:
                validate(mended)
            except ConfigError as error:
                other = re.match(r"(\S+) has \d+ (\w+)", str(error))
                assert other.groups() != wrong.groups()


# The widths of blocks in BF16 are free, and so is everything in precision=bf16.
@pytest.mark.parametrize(
    "overrides", [{"pattern": "-M", "ssm_state_size": 3}, {"pattern": "--*", "head_dim": 9}]
)
def test_layers_in_bf16_need_no_blocks(overrides):
    cfg = config(replace(BASE.model, **overrides))
    validate(cfg)
    with pytest.raises(ConfigError, match=f"multiple of {BLOCK}"):
        validate(replace(cfg, model=replace(cfg.model, pattern=cfg.model.pattern + "-")))
    validate(replace(cfg, precision=replace(cfg.precision, name="bf16")))


@given(models(hidden_size=32, intermediate_size=64), st.integers(1, 2), st.sampled_from([8, 16, 24, 32]))
@settings(max_examples=25, deadline=None)
def test_what_is_accepted_trains(model, batch, seq_len):
    cfg = config(model, batch, seq_len)
    try:
        validate(cfg)
    except ConfigError:
        return
    built = HybridModel(model)
    initialize_(built, 1)
    runtime = apply_recipe(built, cfg.precision, len(model.pattern), 1)
    runtime.prepare_weights()
    tokens = torch.randint(0, model.vocab_size, (batch, seq_len))
    nll, count = built.loss(tokens, tokens)
    (nll / count).backward()
    assert all(p.grad.isfinite().all() for p in built.parameters())
