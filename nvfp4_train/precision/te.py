"""Linear layers by Transformer Engine: whole layers through `te.Linear` under its recipes, chosen by our rules.

A layer whose operands are quantized runs inside TE's autocast; the others never enter TE. Weights stay ours: TE sees
the master weight and casts it itself. Written for transformer_engine 2.20, whose interface it names.
"""

from __future__ import annotations

import contextlib
import ctypes
from contextlib import AbstractContextManager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision.backends import FORWARD_OPERANDS
from nvfp4_train.precision.recipe import LinearPlan

STATE = ("scale", "amax_history")  # of delayed scaling, for the forward and the backward tensors


def load() -> Any:
    """The module transformer_engine.pytorch. Raises ConfigError, with what is missing, when it cannot be imported."""
    try:
        # torch first: it brings the NCCL that Transformer Engine's library is linked against.
        _load_cudnn_of_torch()
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"precision.backend=te: transformer_engine cannot be imported ({str(error).splitlines()[0]}); "
            'docs/operations.md, "Transformer Engine", says how to install it, and precision.backend=emulated needs none.'
        ) from error
    return te


def _load_cudnn_of_torch() -> None:
    """Load every part of the cuDNN that came with torch's wheel; nothing where torch uses the system's.

    Transformer Engine's library asks for cuDNN's parts by name, and the loader looks for those not yet loaded in the
    system's folders. Where torch has used its own cuDNN before, parts of two versions meet, and the import fails (seen
    with torch 2.11 beside the system's cuDNN: "libcudnn_cnn.so.9: undefined symbol").
    """
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or () if spec else ():
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def check_support(te: Any, cfg: PrecisionConfig) -> None:
    """Raise ConfigError with Transformer Engine's own reason when this GPU cannot run the recipe.

    Before any layer runs: leaving its autocast through that error leaves layers in a broken state.
    """
    checks = {"nvfp4": te.is_nvfp4_available, "block": te.is_fp8_block_scaling_available}
    check = checks.get(cfg.name if cfg.name == "nvfp4" else cfg.te_recipe, te.is_fp8_available)
    available, reason = check(return_reason=True)
    if not available:
        raise ConfigError(
            f"precision.backend=te can't run precision={cfg.name} here: {reason} Use precision.backend=emulated."
        )


def recipe_arguments(cfg: PrecisionConfig, forward_only: bool = False) -> tuple[str, dict[str, Any]]:
    """(class in transformer_engine.common.recipe, its fields) of our keys. All fields are given, so that no environment
    variable decides. forward_only: the backward GEMMs multiply the unquantized operands."""
    override = {"backward_override": "high_precision" if forward_only else None}
    if cfg.name == "nvfp4":
        return "NVFP4BlockScaling", {
            "disable_rht": not cfg.hadamard,
            "disable_stochastic_rounding": not cfg.stochastic_gradients,
            "disable_2d_quantization": not cfg.weight_blocks_2d,
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
            **override,
        }
    classes = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
    return classes[cfg.te_recipe], override


class TransformerEngine:
    """The library, ready for `cfg`, with one recipe for all layers. Raises ConfigError when it cannot run here."""

    def __init__(self, cfg: PrecisionConfig):
        self.te, self.version = load(), version("transformer_engine")
        check_support(self.te, cfg)
        from transformer_engine.common import recipe

        name, fields = recipe_arguments(cfg)
        self.recipe = getattr(recipe, name)(**fields)
        # Delayed scaling has no such mode.
        self.forward_only = None
        if name != "DelayedScaling":
            self.forward_only = getattr(recipe, name)(**recipe_arguments(cfg, forward_only=True)[1])

    def linear(self, in_features: int, out_features: int) -> TELinear:
        """A layer to compute in place of a `Linear`."""
        return TELinear(self, in_features, out_features)

    def forward_pass(self) -> AbstractContextManager:
        """Around one training forward pass: delayed scaling takes its new maxima over when it ends."""
        return self.te.autocast(enabled=True, recipe=self.recipe)

    def quantizing(self, recipe: Any) -> AbstractContextManager:
        """TE's autocast, unless `forward_pass` is on with this recipe: nested ones would each count as the first layer of a
        step, and delayed scaling would take its maxima over once a layer."""
        manager = self.te.quantization.FP8GlobalStateManager
        if manager.is_fp8_enabled() and manager.get_fp8_recipe() is recipe:
            return contextlib.nullcontext()
        return self.te.autocast(enabled=True, recipe=recipe)


class TELinear:
    """Computes in place of a `Linear`. Not an nn.Module: its te.Linear must not add parameters to the model."""

    takes_amax = False

    def __init__(self, engine: TransformerEngine, in_features: int, out_features: int):
        self.engine = engine
        # On "meta" it allocates nothing: the weight is handed over at each call.
        self.layer = engine.te.Linear(
            in_features, out_features, bias=False, params_dtype=torch.float32, device="meta"
        )
        with engine.quantizing(engine.recipe):
            self.layer.init_fp8_metadata(
                num_gemms=1
            )  # so that a checkpoint finds its state before the first step

    def prepare(self, weight: torch.Tensor, plan: LinearPlan) -> None:
        """Nothing: Transformer Engine quantizes the weight in each forward pass."""

    def release(self) -> None:
        """Nothing is held."""

    @torch.compiler.disable
    def __call__(
        self,
        x: torch.Tensor,
        amax: torch.Tensor | None,
        weight: torch.Tensor,
        plan: LinearPlan,
        rng: torch.Tensor,
    ) -> torch.Tensor:
        """x: bf16 [tokens, in] -> bf16 [tokens, out]. TE draws its own random bits, not those of `rng`."""
        forward_only = plan.quantized == FORWARD_OPERANDS
        # Sharded training swaps the parameter, so it is given each time. An unquantized dgrad multiplies it uncast with dy,
        # and cuBLAS has no product of fp32 and bf16: there it is given in bf16.
        self.layer._parameters["weight"] = weight.to(x.dtype) if forward_only else weight
        recipe = self.engine.forward_only if forward_only else self.engine.recipe
        # torch.autocast is TE's way of taking fp32 weights with bf16 inputs.
        with torch.autocast(x.device.type, torch.bfloat16), self.engine.quantizing(recipe):
            return self.layer(x)

    def state(self) -> dict[str, torch.Tensor]:
        """Delayed scaling's scales and histories of maxima, the tensors in use; empty for the other recipes."""
        meta = self.layer.fp8_meta
        return {
            f"{side}.{name}": value
            for side in ("scaling_fwd", "scaling_bwd")
            for name in STATE
            if isinstance(value := getattr(meta.get(side), name, None), torch.Tensor)
        }
