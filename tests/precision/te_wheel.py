"""Transformer Engine's pure-Python parts, taken from its 1.2 MB wheel: no library of it is needed, and none is imported.

pip install --no-deps transformer-engine==2.20.2
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

_SPEC = importlib.util.find_spec("transformer_engine")
needs_wheel = pytest.mark.skipif(
    _SPEC is None,
    reason="Transformer Engine's Python wheel is not installed (pip install --no-deps transformer-engine==2.20.2)",
)


def load(module: str, **stubs: object) -> types.ModuleType:
    """Execute transformer_engine.<module> from its file; `stubs`: names of modules that it imports ("." as "__")."""
    name = f"transformer_engine.{module}"
    before = dict(sys.modules)
    parts = name.split(".")
    packages = {".".join(parts[:n]): types.ModuleType(".".join(parts[:n])) for n in range(1, len(parts))}
    for stub, content in stubs.items():
        packages[f"transformer_engine.{stub.replace('__', '.')}"] = content
    sys.modules.update(packages)
    try:
        file = Path(_SPEC.origin).parent / f"{module.replace('.', '/')}.py"
        file = file if file.is_file() else file.with_suffix("") / "__init__.py"
        spec = importlib.util.spec_from_file_location(name, file)
        loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded
    finally:
        for added in sys.modules.keys() - before.keys():
            if added.startswith("transformer_engine"):
                del sys.modules[added]
        sys.modules.update(before)


def module_of(**names: object) -> types.ModuleType:
    """A module that holds `names`."""
    module = types.ModuleType("stub")
    vars(module).update(names)
    return module


def reference() -> types.ModuleType:
    """custom_recipes.reference_nvfp4; its base classes hold nothing that the arithmetic uses."""

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    bases = module_of(Quantizer=Quantizer, QuantizedTensorStorage=type("QuantizedTensorStorage", (), {}))
    utils = load("pytorch.custom_recipes.reference_utils")
    gemm = load(
        "pytorch.custom_recipes.gemm",
        pytorch__quantized_tensor=bases,
        pytorch__tensor=module_of(),
        pytorch__tensor__utils=module_of(is_custom=None),
    )
    return load(
        "pytorch.custom_recipes.reference_nvfp4",
        pytorch__quantized_tensor=bases,
        pytorch__custom_recipes=module_of(gemm=gemm, reference_utils=utils),
    )
