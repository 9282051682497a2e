"""A folder that other programs load: NemotronHForCausalLM in safetensors, in BF16 or FP32, or with NVFP4 weights.

Tensors are read from the source, converted and written one after the other, so memory holds one parameter at a time
however large the model is.

NVFP4: compressed-tensors' `nvfp4-pack-quantized` layout. A quantized layer's weight is written as the codes and block
scales that training's forward pass multiplies with, not rounded a second time, and `weight_global_scale` = 2688 / amax
(four over six: 1536 / amax). q, k and v come from one linear, so their global scales are one number, as engines that
fuse them expect. The layers that training keeps in BF16 are listed as ignored. Activations stay in 16 bits: an engine
would need a fixed scale for each layer's input, and training has none (each micro-batch has its own).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nvfp4_kernels import BLOCK, QuantizedTensor, amax
from nvfp4_kernels.format import TENSOR_RANGE
from torch import Tensor

from nvfp4_train.atomic import fsync_dir
from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.errors import CheckpointError, SaveError
from nvfp4_train.interop.nemotron_h import hugging_face_config, tensor_keys
from nvfp4_train.interop.tensor_files import Entry, write_sharded
from nvfp4_train.interop.tokenizer_files import tokenizer_files
from nvfp4_train.interop.weights import WeightSource, parameter_shapes
from nvfp4_train.precision import formats
from nvfp4_train.precision.recipe import LinearPlan

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Exported:
    """What was written: the weight files, their bytes, and the linear layers in NVFP4 (by our names)."""

    files: list[Path]
    n_bytes: int
    nvfp4: list[str]


def export(
    out: Path,
    cfg: ModelConfig,
    source: WeightSource,
    tokenizer: Tokenizer,
    seq_len: int,
    dtype: str,
    plans: dict[str, LinearPlan] | None = None,
    shard_bytes: int = 5 << 30,
    progress: Callable[[str], None] = lambda name: None,
) -> Exported:
    """Write the folder `out`, whole or not at all.

    `dtype` "bf16": the matrices, which the forward pass rounds to BF16 anyway, in BF16 and all else as trained, in fp32;
    "fp32": everything as trained. `plans` {linear layer: plan} makes the layers whose weight the forward pass has in
    NVFP4 NVFP4. Raises CheckpointError when `out` is there already, SaveError when it can't be written.
    """
    if out.exists():
        raise CheckpointError(f"out={out} is there already: give a folder that is not, or remove it.")
    quantized = {name: plan for name, plan in (plans or {}).items() if "fprop.weight" in plan.quantized}
    entries = list(_entries(cfg, source, DTYPES[dtype], quantized, progress))
    config = hugging_face_config(
        cfg, seq_len, tokenizer.eos_id, {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    )
    if quantized:
        config["quantization_config"] = _quantization_config(cfg, list(plans), quantized)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
    texts = {"config.json": _json(config), "generation_config.json": _json(ids)} | tokenizer_files(tokenizer)
    tmp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        tmp.mkdir(parents=True)
        files = write_sharded(tmp, entries, shard_bytes)
        for name, content in texts.items():
            (tmp / name).write_bytes(content)
        os.rename(tmp, out)
        fsync_dir(out.parent)
    except OSError as error:
        raise SaveError(
            f"out={out} can't be written ({error.strerror}): free space there, or give another."
        ) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return Exported([out / path.name for path in files], sum(e.nbytes for e in entries), sorted(quantized))


def quantized_weight(weight: Tensor, plan: LinearPlan) -> QuantizedTensor:
    """A master weight fp32 [out, in] in the codes and scales of training's forward pass (`formats.weight_operands`)."""
    w = weight.to(torch.bfloat16)
    return formats.quantized_weight(plan, w, amax(w)[0], output="codes")


def _entries(
    cfg: ModelConfig,
    source: WeightSource,
    matrices: torch.dtype,
    quantized: dict[str, LinearPlan],
    progress: Callable[[str], None],
) -> Iterator[Entry]:
    """Every tensor of the files, in the model's order; the values are made when they are written."""

    @functools.lru_cache(maxsize=1)  # a parameter's parts follow each other
    def read(name: str) -> Tensor:
        progress(name)
        return source(name)

    @functools.lru_cache(maxsize=1)
    def codes(name: str) -> QuantizedTensor:
        return quantized_weight(read(name), quantized[name.removesuffix(".weight")])

    for name, shape in parameter_shapes(cfg).items():
        for key, rows in tensor_keys(name, cfg):
            part = (len(range(shape[0])[rows]), *shape[1:])
            if name.removesuffix(".weight") in quantized:
                yield from _nvfp4_entries(key.removesuffix(".weight"), name, part, rows, codes)
                continue
            # A convolution's kernel stays in fp32 in the forward pass, as vectors do.
            dtype = matrices if len(shape) == 2 else torch.float32
            yield Entry(
                key, part, dtype, lambda name=name, rows=rows, dtype=dtype: read(name)[rows].to(dtype)
            )


def _nvfp4_entries(
    stem: str, name: str, shape: tuple[int, ...], rows: slice, codes: Callable[[str], QuantizedTensor]
) -> Iterator[Entry]:
    n, k = shape
    yield Entry(f"{stem}.weight_packed", (n, k // 2), torch.uint8, lambda: codes(name).codes[rows])
    yield Entry(
        f"{stem}.weight_scale", (n, k // BLOCK), torch.float8_e4m3fn, lambda: codes(name).scales[rows]
    )
    yield Entry(f"{stem}.weight_global_scale", (1,), torch.float32, lambda: _global_scale(codes(name).amax))


def _global_scale(amax: Tensor) -> Tensor:
    """2688 / amax, fp32 [1]: what compressed-tensors divides by. 1 for a weight of zeros alone."""
    scale = torch.full((1,), TENSOR_RANGE) / amax.reshape(1)
    return torch.where(amax > 0, scale, torch.ones(1))


def _quantization_config(
    cfg: ModelConfig, linears: list[str], quantized: dict[str, LinearPlan]
) -> dict[str, Any]:
    """compressed-tensors' description: weights in NVFP4, 16-bit activations (its preset NVFP4A16)."""
    kept = [
        key.removesuffix(".weight")
        for name in linears
        if name not in quantized
        for key, _ in tensor_keys(f"{name}.weight", cfg)
    ]
    # By pattern: a module that files call backbone.layers.0 is model.layers.0 in transformers 5 and in vLLM.
    ignore = ["re:.*" + key.removeprefix("backbone").replace(".", r"\.") + "$" for key in kept]
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": [*ignore, "lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": BLOCK,
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
