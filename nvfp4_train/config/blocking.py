"""What the block formats ask of shapes: multiples of 16 along rows, columns and tokens; for MXFP4's transform 32 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvfp4_train.config.checks import nearest
from nvfp4_train.config.schema import Config, ModelConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.model.flops import LinearLayer, linear_layers, linear_shapes
from nvfp4_train.precision import backends
from nvfp4_train.precision.recipe import LinearPlan, phases_of, plan_for

BLOCK = 16
# Where each mixer's widths come from; a remedy names the earlier key first.
_KEYS = {
    "M": ("hidden_size", "ssm_state_size", "mamba_num_heads", "mamba_head_dim"),
    "*": ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"),
    "-": ("hidden_size", "intermediate_size"),
}


def check_blocking(cfg: Config) -> None:
    """Raise ConfigError where a layer or micro-batch of a quantized run has no whole number of blocks, no layer is
    quantized, or the backend asked for cannot compute one."""
    layers, name = quantized_layers(cfg), cfg.precision.name
    if not layers:
        raise ConfigError(
            f"precision={name} leaves none of the {len(cfg.model.pattern)} blocks in {name.upper()}: lower "
            "precision.first_blocks_bf16 or last_blocks_bf16, change precision.rules, or use precision=bf16."
        )
    for layer in layers:
        for width, side in ((layer.in_features, "inputs"), (layer.out_features, "outputs")):
            if width % BLOCK:
                raise ConfigError(
                    f"{layer.name} has {width} {side}, not a multiple of {BLOCK} as {name.upper()} needs: "
                    f"{_remedy(cfg.model, layer, side)}use precision=bf16."
                )
    for layer, plan in plans(cfg):
        backends.check_plan(cfg.precision, layer.name, plan)
    batch, length = cfg.training.micro_batch_size, cfg.training.seq_len
    rotates = any(plan.rotates_wgrad for _, plan in plans(cfg))
    needed = 2 * BLOCK if name == "mxfp4" and rotates else BLOCK
    if batch * length % needed:
        lengths = nearest(length, lambda n: batch * n % needed == 0)
        raise ConfigError(
            f"training.micro_batch_size={batch} x training.seq_len={length} makes {batch * length} tokens, not a "
            f"multiple of {needed} as {name.upper()} needs: set training.seq_len to {lengths}, or use precision=bf16."
        )


def quantized_layers(cfg: Config) -> list[LinearLayer]:
    """The linear layers that have a quantized operand in some phase of the run."""
    return list(dict.fromkeys(layer for layer, plan in plans(cfg) if plan.quantized))


def plans(cfg: Config) -> Iterator[tuple[LinearLayer, LinearPlan]]:
    """Every linear layer with its plan in every phase."""
    n_blocks = len(cfg.model.pattern)
    for layer in linear_layers(cfg.model):
        for phase in phases_of(cfg.precision):
            yield layer, plan_for(cfg.precision, layer.name, layer.block, n_blocks, phase.name)


def _remedy(model: ModelConfig, layer: LinearLayer, side: str) -> str:
    """The nearest values of up to two keys, each of which alone makes the layer fit; "" where none does."""
    letter = model.pattern[layer.block]
    name = layer.name.rsplit(".", 1)[1]

    def fits(changed: ModelConfig) -> bool:
        outputs, inputs = linear_shapes(letter, changed)[name]
        divides = changed.mamba_num_heads % changed.n_groups == 0
        divides &= changed.num_attention_heads % changed.num_key_value_heads == 0
        return (inputs if side == "inputs" else outputs) % BLOCK == 0 and divides

    remedies = []
    for key in _KEYS[letter]:
        value = getattr(model, key)
        if found := nearest(value, lambda n, key=key: fits(replace(model, **{key: n}))):
            remedies.append(f"set model.{key}={value} to {found}, or ")
    return "".join(remedies[:2])
