"""torch.compile of the model's blocks."""

from __future__ import annotations

import shutil

import torch

from nvfp4_train.errors import ConfigError
from nvfp4_train.model.hybrid import HybridModel

# Versions of one block's code that the compiler may hold: kinds of block x plans of its layers in all phases x with and
# without gradients. Its default of 8 is less than a run of two phases needs, and it fails when there are more.
VERSIONS = 64
# Vectors of the compiled CPU code, on machines with AVX-512 too: GCC 12.2 builds the 512-bit code that transposes bf16
# wrongly (-O3's -ftree-slp-vectorize), and attention's keys became NaN.
CPU_VECTOR_BITS = 256


def compile_blocks(model: HybridModel, mode: str, device: torch.device, whole: bool = True) -> str:
    """Compile every block's forward as `training.compile` says, and return a line for the log.

    `whole`: each block is one graph, and it is an error when it cannot be.

    Blocks of one kind share their compiled code, so the time this takes (at the first step) doesn't grow with depth.
    "auto" compiles where a compiler for the device's code is found. Raises ConfigError for "on" where there is none.
    """
    missing = _missing_compiler(device)
    if mode == "off" or (mode == "auto" and missing):
        return "off" + (f": {missing}" if missing else "")
    if missing:
        raise ConfigError(f"training.compile=on, but {missing}: install it, or use training.compile=off.")
    torch._dynamo.config.recompile_limit = VERSIONS
    if device.type == "cpu":
        import torch._inductor.config as inductor

        inductor.cpp.simdlen = CPU_VECTOR_BITS
    for layer in model.layers:
        # The forward itself, not the call: hooks around it gather a sharded block's weights, and stay outside.
        layer.forward = torch.compile(layer.forward, fullgraph=whole, dynamic=False)
    if device.type == "cuda":  # where each of its operations is a pass over memory: of a 1B model 2 ms a step
        model.norm_f.forward = torch.compile(model.norm_f.forward, fullgraph=True, dynamic=False)
    return "torch.compile, block by block (the first step takes longer)"


def _missing_compiler(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None if shutil.which("g++") or shutil.which("clang++") else "no C++ compiler (g++) is found"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None
