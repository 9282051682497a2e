"""Transformer Engine imported for real, without a GPU: each in a process of its own, since it stays loaded.

The first needs all three parts (docs/operations.md, "Transformer Engine"), the second the Python wheel alone, as `make test`
installs it.
"""

import os
import subprocess
import sys

import pytest

from nvfp4_train.precision.gpu import this_machine
from tests.precision import te_wheel

MACHINE = this_machine("cpu")
WHOLE = None not in (MACHINE.te, MACHINE.te_core, MACHINE.te_torch)
INTERFACE = """
import inspect
import torch
from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.precision.te import load, recipe_arguments
te = load()

def takes(call, *names):
    missing = set(names) - set(inspect.signature(call).parameters)
    assert not missing, (call, missing)

takes(te.autocast, "enabled", "recipe")
takes(te.Linear, "in_features", "out_features", "bias", "params_dtype", "device")
takes(te.Linear.init_fp8_metadata, "num_gemms")
for check in (te.is_fp8_available, te.is_nvfp4_available, te.is_fp8_block_scaling_available):
    takes(check, "return_reason")
manager = te.quantization.FP8GlobalStateManager
assert manager.is_fp8_enabled() is False
takes(manager.get_fp8_recipe)

from transformer_engine.common import recipe
configs = [PrecisionConfig(name="fp8", te_recipe=r) for r in ("delayed", "current", "block")]
for cfg in (PrecisionConfig(name="nvfp4"), *configs):
    for forward_only in (False, True)[: 1 if cfg.te_recipe == "delayed" else 2]:
        name, fields = recipe_arguments(cfg, forward_only)
        made = getattr(recipe, name)(**fields)
        assert all(getattr(made, field) == value for field, value in fields.items()), made
print("complete")
"""


def run(code):
    """(exit code, all output) of `code` where no GPU is visible."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(not WHOLE, reason="Transformer Engine's library and torch part are not installed")
def test_the_library_has_the_interface_that_we_call():
    code, text = run(INTERFACE)
    assert code == 0, text
    assert "complete" in text


@te_wheel.needs_wheel
@pytest.mark.skipif(WHOLE, reason="all of Transformer Engine is installed")
def test_what_importing_the_wheel_alone_lacks_is_said_with_the_remedy():
    code, text = run("from nvfp4_train.precision.te import load\nload()")
    assert code == 1
    last = text.strip().splitlines()[-1]
    assert "ConfigError: precision.backend=te: transformer_engine cannot be imported (" in last
    assert 'docs/operations.md, "Transformer Engine", says how' in last
