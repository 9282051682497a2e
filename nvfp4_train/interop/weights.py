"""Where weights come from: one function of a parameter's name, whatever holds them. Each call reads one parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from nvfp4_kernels import QuantizedTensor
from torch import Tensor

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.checkpoint import Checkpoint
from nvfp4_train.errors import CheckpointError
from nvfp4_train.interop.nemotron_h import tensor_keys
from nvfp4_train.interop.tensor_files import TensorFolder
from nvfp4_train.model.hybrid import HybridModel

WeightSource = Callable[[str], Tensor]  # a parameter's name -> its whole value, fp32 on the CPU


def parameter_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every parameter, in the model's order."""
    return {name: tuple(p.shape) for name, p in HybridModel(cfg, "meta").named_parameters()}


def checkpoint_weights(found: Checkpoint, cfg: ModelConfig) -> WeightSource:
    """The fp32 master weights in a checkpoint of ours. Raises CheckpointError for one of another model."""
    shapes = parameter_shapes(cfg)

    def read(name: str) -> Tensor:
        tensor = torch.empty(shapes[name], dtype=torch.float32)
        checkpoint.load(found, {"model": {name: tensor}})
        return tensor

    return read


def hugging_face_weights(folder: Path, cfg: ModelConfig) -> WeightSource:
    """The weights in a Hugging Face folder, NVFP4 ones as the numbers they stand for. Raises CheckpointError.

    Keys may begin with `backbone.` (as published) or `model.` (as modules are called in transformers 5).
    """
    tensors, shapes = TensorFolder(folder), parameter_shapes(cfg)
    renamed = not any(key.startswith("backbone.") for key in tensors.keys())  # noqa: SIM118 - not a dict

    def read(name: str) -> Tensor:
        keys = [key for key, _ in tensor_keys(name, cfg)]
        if renamed:
            keys = [key.replace("backbone.", "model.", 1) for key in keys]
        value = torch.cat([_read(tensors, key) for key in keys])
        if value.shape != shapes[name]:
            raise CheckpointError(
                f"{', '.join(keys)} in {folder} give {list(value.shape)} for {name} where its config.json says "
                f"{list(shapes[name])}: restore the folder."
            )
        return value

    return read


def _read(tensors: TensorFolder, key: str) -> Tensor:
    stem = key.removesuffix(".weight")
    if f"{stem}.weight_packed" not in tensors:
        return tensors.read(key).float()
    codes, scales = tensors.read(f"{stem}.weight_packed"), tensors.read(f"{stem}.weight_scale")
    operand = QuantizedTensor(codes, scales, torch.ones(()), (1, 16)).operand(torch.float32)
    return operand / tensors.read(f"{stem}.weight_global_scale")
