"""Ten drawn models, exported and loaded by transformers: the same logits, gradients and greedy text."""

from __future__ import annotations

import random

import pytest
import torch

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.interop.export import export
from nvfp4_train.interop.nemotron_h import tensor_keys
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.training.sampling import sample_tokens

transformers = pytest.importorskip("transformers", reason="parity needs transformers (the dev extra)")
if not hasattr(transformers, "NemotronHForCausalLM"):
    pytest.skip("this transformers has no NemotronHForCausalLM (5.3 is the first)", allow_module_level=True)

VOCAB = 384  # the tiny run's tokenizer


def draw(seed: int) -> ModelConfig:
    """Every kind of block, groups and head counts of every kind, ragged chunks."""
    rng = random.Random(seed)
    blocks = [*"M*-", *rng.choices("MM*-", k=rng.randint(0, 2))]
    rng.shuffle(blocks)
    kv, groups = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    return ModelConfig(
        pattern="".join(blocks),
        hidden_size=rng.choice([24, 32, 40]),
        intermediate_size=rng.choice([40, 64]),
        num_attention_heads=kv * rng.choice([1, 2, 3]),
        num_key_value_heads=kv,
        head_dim=rng.choice([8, 12, 16]),
        mamba_num_heads=groups * rng.choice([1, 2]),
        mamba_head_dim=rng.choice([8, 12, 16]),
        n_groups=groups,
        ssm_state_size=rng.choice([5, 8, 16]),
        conv_kernel=rng.choice([2, 3, 4]),
        chunk_size=rng.choice([8, 16, 64]),
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize("seed", range(10))
def test_same_logits_gradients_and_text(tiny_run, tmp_path, seed):
    cfg = draw(seed)
    ours = HybridModel(cfg, compute_dtype=torch.float32)
    initialize_(ours, seed)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            gen = torch.Generator().manual_seed(len(name) + seed)
            if p.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
                p += 0.3 * torch.randn(
                    p.shape, generator=gen
                )  # norms and D start at 1, which hides a wrong order
            elif name.startswith(("embeddings", "lm_head")):
                p *= 4  # text that varies
    weights = dict(ours.named_parameters())
    export(tmp_path / "out", cfg, lambda name: weights[name].detach(), tiny_run.dataset.tokenizer, 64, "fp32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert isinstance(theirs, transformers.NemotronHForCausalLM)
    assert theirs.dtype == torch.float32
    for layer in theirs.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            assert layer.mixer.time_step_limit[0] < 1e-20  # its default would clamp dt, as training does not

    tokens = torch.randint(VOCAB, (2, 37), generator=torch.Generator().manual_seed(seed))
    logits, expected = ours(tokens), theirs(tokens, use_cache=False).logits
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()

    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    logits.backward(upstream)
    expected.backward(upstream)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        for key, rows in tensor_keys(name, cfg):
            want = wanted[key.replace("backbone.", "model.", 1)]
            assert (p.grad[rows] - want).norm() <= 1e-4 * want.norm(), name

    prompt = tokens[0, :11].tolist()
    written = list(sample_tokens(ours, prompt, 64, 0.0, 1.0, 0, "cpu"))
    generated = theirs.eval().generate(
        tokens[:1, :11],
        attention_mask=torch.ones(1, 11),  # else tokens of the prompt could pass for padding
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
    )
    assert generated[0, 11:].tolist() == written
    assert len(set(written)) > 4
