"""This program's model and Hugging Face's NemotronHForCausalLM: one's configuration and tensor names for the other's.

No torch here: a configuration that does not fit is told within the first second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.errors import CheckpointError

# Ours -> theirs, where the value is the same.
_FIELDS = {
    "pattern": "hybrid_override_pattern",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "n_groups": "n_groups",
    "ssm_state_size": "ssm_state_size",
    "conv_kernel": "conv_kernel",
    "chunk_size": "chunk_size",
    "vocab_size": "vocab_size",
    "norm_eps": "layer_norm_epsilon",
}
# What their class can be and this model is not: {key: the value that this model has}.
_FIXED = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "mamba_proj_bias": False,
    "sliding_window": None,
    "tie_word_embeddings": False,  # their class never ties, whatever this says
    "residual_in_fp32": False,
}
_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
# Their class (up to 5.24) clamps dt from below at time_step_min, which training does not; 0 would break its initialisation.
_NO_CLAMP = 1e-30


def hugging_face_config(cfg: ModelConfig, seq_len: int, eos_id: int, dtype: str) -> dict[str, Any]:
    """config.json of `cfg`, for transformers (docs/results/hugging_face.md: which versions) and what reads the same files.

    `seq_len` is the length that training saw (there is no position embedding: longer texts work), `dtype` "bfloat16"
    or "float32". `hybrid_override_pattern` is what all of them understand: names of layer types have changed.
    """
    theirs = {name: getattr(cfg, ours) for ours, name in _FIELDS.items()}
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": dtype,
        **theirs,
        "num_hidden_layers": len(cfg.pattern),
        "attention_head_dim": cfg.head_dim,  # the name before transformers 5
        "rms_norm_eps": cfg.norm_eps,
        "norm_eps": cfg.norm_eps,
        **{key: value for key, value in _FIXED.items() if value is not None},
        "time_step_min": _NO_CLAMP,
        "max_position_embeddings": seq_len,
        "initializer_range": 0.02,
        "rescale_prenorm_residual": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": eos_id,  # the eos before a document is its first input
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
    }


def is_hugging_face(folder: Path) -> bool:
    """Whether `folder` holds a model in Hugging Face's layout."""
    return (folder / "config.json").is_file() and not (folder / "config.yaml").exists()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises CheckpointError when it is unreadable or of another model."""
    path = folder / "config.json"
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} can't be read ({error}): give a folder with a Hugging Face model."
        ) from error
    kind = theirs.get("model_type") if isinstance(theirs, dict) else None
    if kind != "nemotron_h":
        raise CheckpointError(f"{path} has model_type={kind!r}: only nemotron_h is this model.")
    return theirs


def model_config(theirs: dict[str, Any], name: str) -> ModelConfig:
    """The model that a Hugging Face configuration describes. Raises CheckpointError for what this model cannot be."""
    for key, ours in _FIXED.items():
        # Of the type's own default: what a configuration leaves out is as it is here.
        if theirs.get(key, ours) != ours:
            raise CheckpointError(
                f"{name} has {key}={theirs[key]!r}: this model has {ours!r} there and nothing else."
            )
    low, high = theirs.get("time_step_limit") or (0.0, float("inf"))
    high = float("inf") if isinstance(high, dict) else high  # transformers 5 writes {"__float__": "Infinity"}
    if low > 0 or high < float("inf"):
        raise CheckpointError(f"{name} clamps time steps to {low} ... {high}: this model has no such clamp.")
    values = {ours: theirs.get(key) for ours, key in _FIELDS.items()}
    values["pattern"] = values["pattern"] or _pattern(theirs)
    values["head_dim"] = values["head_dim"] or theirs.get("attention_head_dim")
    if "E" in values["pattern"]:
        raise CheckpointError(f"{name} has the pattern {values['pattern']}: this model has no experts (E).")
    missing = [_FIELDS[ours] for ours, value in values.items() if value is None]
    if missing:
        raise CheckpointError(f"{name} lacks {', '.join(missing)}: restore its config.json.")
    return ModelConfig(name=name, **values)


def _pattern(theirs: dict[str, Any]) -> str:
    kinds = theirs.get("layers_block_type") or theirs.get("layer_types") or []
    return "".join(_LETTERS.get(kind, "E") for kind in kinds)


def differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The keys of `model` in which two models differ so that weights of one do not serve the other: {key: (ours, theirs)}.

    The scan's chunks change its rounding alone.
    """
    keys = [key for key in _FIELDS if key != "chunk_size"]
    pairs = {key: (getattr(ours, key), getattr(theirs, key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def tensor_keys(name: str, cfg: ModelConfig) -> list[tuple[str, slice]]:
    """The Hugging Face tensors that the parameter `name` is written as: [(key, its rows of the parameter)].

    `backbone.` is the published prefix (transformers 5 renames it); q, k and v, one parameter here, are three there.
    """
    key = name if name.startswith("lm_head.") else f"backbone.{name}"
    if ".qkv_proj." not in name:
        return [(key, slice(None))]
    q, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    return [(key.replace("qkv_proj", f"{letter}_proj"), part) for letter, part in rows.items()]
