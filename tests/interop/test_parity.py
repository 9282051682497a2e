"""Ten drawn models, exported and loaded by transformers: the same logits, gradients and greedy text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# Before 5.15 its PyTorch scan adds up states across chunks along a wrong axis.
transformers = pytest.importorskip("transformers", minversion="5.15", reason="parity needs transformers 5.15")

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_with_transformers.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_with_transformers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(10))
def test_same_logits_gradients_and_text(script, tiny_run, tmp_path, seed):
    difference = script.compare(seed, tmp_path / "out", tiny_run.dataset.tokenizer)
    assert difference.logits <= 2e-5
    assert difference.gradients <= 1e-4
    assert difference.same_text
    assert difference.kinds_of_tokens > 4


def test_time_steps_are_not_clamped(script, tiny_run, tmp_path):
    """transformers' default would clamp them, as training does not."""
    script.compare(0, tmp_path / "out", tiny_run.dataset.tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    limits = [m.time_step_limit for m in model.modules() if hasattr(m, "time_step_limit")]
    assert limits
    assert all(low < 1e-20 and high == float("inf") for low, high in limits)
