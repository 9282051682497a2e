from __future__ import annotations

import pytest
import torch

from nvfp4_train.training.peaks import bf16_tflops, peak


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_names_as_torch_reports_them(name, tflops):
    assert bf16_tflops(name) == tflops


def test_what_is_given_wins_and_the_line_says_what_mfu_refers_to():
    assert peak(torch.device("cpu"), 2.5) == (2.5, "of 2.5 TFLOP/s (logging.peak_tflops)")
    value, line = peak(torch.device("cpu"), None)
    assert value is None
    assert line.startswith("not reported")
