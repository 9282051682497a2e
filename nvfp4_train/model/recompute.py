"""Activation checkpointing: what the backward pass computes again instead of keeping it.

    none          what autograd keeps, or of compiled blocks what torch.compile's partitioner chose to keep
    squared_relu  the MLP's squared ReLU again: one of the two widest activations of its block, for two elementwise passes
    block         of each block its input alone; its forward pass runs once more
    budget        torch.compile keeps at most this share of the memory it would, and recomputes what costs least

Gradients are those without recomputation, bit for bit (compiled blocks under another budget may fuse, and so round,
otherwise): the forward pass draws no random bits, and the backward pass takes its own from the counters of its
micro-batch.
"""

from __future__ import annotations

from torch._functorch import config as functorch

from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.mlp import MLP

MODES = ("none", "squared_relu", "block", "budget")


def apply_recompute(model: HybridModel, mode: str, budget: float) -> str:
    """Have `model` recompute as `mode` says, and return a line for the log. `budget` is in [0, 1]; it acts on all that
    this process compiles from here on."""
    model.recompute_blocks = mode == "block"
    for module in model.modules():
        if isinstance(module, MLP):
            module.recompute_activation = mode == "squared_relu"
    functorch.activation_memory_budget = budget if mode == "budget" else 1.0
    return {
        "none": "nothing",
        "squared_relu": "the MLPs' squared ReLU",
        "block": "every block, from its input",
        "budget": f"what torch.compile chooses, to keep {budget:g} of the activations",
    }[mode]
