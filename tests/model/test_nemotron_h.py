"""Parity with Hugging Face's NemotronHForCausalLM: the same weights under its keys give the same logits and gradients."""

import pytest
import torch

from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_

transformers = pytest.importorskip("transformers", reason="parity needs transformers (the dev extra)")
if not hasattr(transformers, "NemotronHForCausalLM"):
    pytest.skip("this transformers has no NemotronHForCausalLM (5.3 is the first)", allow_module_level=True)


def hugging_face_weights(state, cfg):
    """Our state dict under Hugging Face's keys: a prefix, and q, k and v apart."""
    q, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    weights = {}
    for name, value in state.items():
        if name.endswith("qkv_proj.weight"):
            for letter, part in zip("qkv", value.split((q, kv, kv)), strict=True):
                weights["model." + name.replace("qkv", letter)] = part
        else:
            weights[name if name.startswith("lm_head") else "model." + name] = value
    return weights


def hugging_face_model(cfg):
    config = transformers.NemotronHConfig(
        hybrid_override_pattern=cfg.pattern,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        mamba_num_heads=cfg.mamba_num_heads,
        mamba_head_dim=cfg.mamba_head_dim,
        n_groups=cfg.n_groups,
        ssm_state_size=cfg.ssm_state_size,
        conv_kernel=cfg.conv_kernel,
        chunk_size=cfg.chunk_size,
        layer_norm_epsilon=cfg.norm_eps,
        attn_implementation="eager",
    )
    model = transformers.NemotronHForCausalLM(config)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            # Its default clamps dt from below at time_step_min; the released weights were trained without a clamp.
            layer.mixer.time_step_limit = (0.0, float("inf"))
    return model


def test_same_logits_and_gradients(tiny):
    ours = HybridModel(tiny, compute_dtype=torch.float32)
    initialize_(ours, seed=5)
    for name, p in ours.named_parameters():  # norms and D start at 1, which would hide a wrong order
        if p.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
            p.data += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    theirs = hugging_face_model(tiny)
    theirs.load_state_dict(hugging_face_weights(ours.state_dict(), tiny), strict=True)

    tokens = torch.randint(97, (2, 29), generator=torch.Generator().manual_seed(1))
    logits, expected = ours(tokens), theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)

    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    logits.backward(upstream)
    expected.backward(upstream)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, got in hugging_face_weights(gradients, tiny).items():
        assert (got - wanted[name]).norm() < 1e-4 * wanted[name].norm(), name
