"""Functions that PyTorch and torch.compile take whole, as operators of their own: `torch.ops.nvfp4_train.NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import library

NAMESPACE = "nvfp4_train"


def operator(name: str) -> Callable[[Callable[..., Any]], library.CustomOpDef]:
    """Decorator: the function, whose annotations are its schema and which changes none of its arguments, as an operator."""
    return library.custom_op("::".join((NAMESPACE, name)), mutates_args=())
