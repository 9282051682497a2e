"""Which operand of which GEMM runs in which format, and the linear layer that does it.

What needs torch is imported on first use: `recipe` alone serves the check of a configuration, within its first second.
"""

from __future__ import annotations

import importlib
from typing import Any

from nvfp4_train.precision.recipe import LinearPlan, plan_for

_MODULES = {"Linear": "linear", "PrecisionRuntime": "runtime", "apply_recipe": "runtime"}

__all__ = ["LinearPlan", "plan_for", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
