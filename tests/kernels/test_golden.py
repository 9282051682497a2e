"""Bit equality with Transformer Engine's own quantizer output (tests/data/nvfp4_te.npz)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from nvfp4_kernels import SIGNS, quantize
from nvfp4_kernels.cpu import ops as cpu

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "nvfp4_te.npz")
NAMES = sorted({key.split("/")[0] for key in GOLDEN})
KINDS = {
    "1d": {},
    "2d": {"block": (16, 16)},
    "rht_col": {"transpose": True, "hadamard": SIGNS},
}


def test_the_golden_file_is_whole():
    assert len(NAMES) == 18
    assert sum(f"{n}/rht_col/codes" in GOLDEN for n in NAMES) == 9


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_matches_transformer_engine_bit_for_bit(name, backend):
    if backend == "cpu" and not cpu.available():
        pytest.skip("no C++ compiler on this machine")
    x = torch.from_numpy(GOLDEN[f"{name}/x"]).to(getattr(torch, name.split("_")[0]))
    for kind, options in KINDS.items():
        if f"{name}/{kind}/codes" not in GOLDEN:
            continue  # the transform takes bf16 only
        q = quantize(x, backend=backend, **options)
        for field, got in (("codes", q.codes), ("scales", q.scales.view(torch.uint8)), ("amax", q.amax)):
            expected = GOLDEN[f"{name}/{kind}/{field}"]
            np.testing.assert_array_equal(
                got.contiguous().numpy().reshape(expected.shape), expected, f"{kind}/{field}"
            )
