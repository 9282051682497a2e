"""Closed forms of a model's size and arithmetic, by block.

FLOPs are Megatron-LM's count for hybrid models, with d_inner = heads * head_dim instead of its 2 * hidden_size:
2 a multiply-add, backward twice the forward, causal attention half, the scan 7 d_inner N a token; convolution, norms,
embedding lookup and recomputation are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from nvfp4_train.config.schema import ModelConfig


def block_parameters(letter: str, cfg: ModelConfig) -> int:
    """Parameters of one block of the pattern, its norm included."""
    h = cfg.hidden_size
    if letter == "M":
        inner, bc = _inner(cfg), 2 * cfg.n_groups * cfg.ssm_state_size
        convolution = (inner + bc) * (cfg.conv_kernel + 1)
        return h + linear_parameters(letter, cfg) + convolution + 3 * cfg.mamba_num_heads + inner
    return h + linear_parameters(letter, cfg)


class LinearLayer(NamedTuple):
    """A quantizable linear layer: the module's name in the model, and its weight [out_features, in_features]."""

    name: str
    block: int
    out_features: int
    in_features: int


def linear_shapes(letter: str, cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """One block's linear layers: {name in the mixer: (out_features, in_features)}."""
    h = cfg.hidden_size
    if letter == "M":
        inner, bc = _inner(cfg), 2 * cfg.n_groups * cfg.ssm_state_size
        return {"in_proj": (2 * inner + bc + cfg.mamba_num_heads, h), "out_proj": (h, inner)}
    if letter == "*":
        q, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
        return {"qkv_proj": (q + 2 * kv, h), "o_proj": (h, q)}
    return {"up_proj": (cfg.intermediate_size, h), "down_proj": (h, cfg.intermediate_size)}


def linear_layers(cfg: ModelConfig) -> list[LinearLayer]:
    """All quantizable linear layers, in the model's order."""
    return [
        LinearLayer(f"layers.{block}.mixer.{name}", block, *shape)
        for block, letter in enumerate(cfg.pattern)
        for name, shape in linear_shapes(letter, cfg).items()
    ]


def linear_parameters(letter: str, cfg: ModelConfig) -> int:
    """Weights of one block's linear layers: those that can be quantized."""
    return sum(n_out * n_in for n_out, n_in in linear_shapes(letter, cfg).values())


def parameter_count(cfg: ModelConfig) -> int:
    """All parameters; embedding and head are two matrices."""
    blocks = sum(block_parameters(letter, cfg) for letter in cfg.pattern)
    return blocks + 2 * cfg.vocab_size * cfg.hidden_size + cfg.hidden_size


def block_flops_per_token(letter: str, cfg: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs of one block a token, averaged over a sequence of seq_len tokens."""
    mixing = 0
    if letter == "M":
        mixing = 7 * _inner(cfg) * cfg.ssm_state_size
    elif letter == "*":
        mixing = 2 * seq_len * cfg.num_attention_heads * cfg.head_dim
    return 2 * linear_parameters(letter, cfg) + mixing


def flops_per_token(cfg: ModelConfig, seq_len: int) -> int:
    """Forward and backward FLOPs of the whole model a token."""
    blocks = sum(block_flops_per_token(letter, cfg, seq_len) for letter in cfg.pattern)
    return 3 * (blocks + 2 * cfg.hidden_size * cfg.vocab_size)


def _inner(cfg: ModelConfig) -> int:
    return cfg.mamba_num_heads * cfg.mamba_head_dim
