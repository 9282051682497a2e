"""Dense BF16 peaks of devices: what model FLOPs utilisation (MFU) is a share of.

NVIDIA's data sheets, without sparsity (they print twice as much), fp32 accumulation. NVFP4 runs are measured against
the BF16 peak too, so their MFU can exceed 1 on hardware with FP4 units and compares with that of BF16 runs.
"""

from __future__ import annotations

import re

import torch

# (pattern on torch's device name, TFLOP/s): the first that matches.
BF16_TFLOPS = (
    (r"\bGB300\b", 2500.0),
    (r"\bB300\b", 2250.0),
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bGH200\b", 989.4),
    (r"\bH200 NVL\b", 835.5),
    (r"\bH200\b", 989.4),
    (r"\bH100 PCIe\b", 756.5),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100\b", 989.4),
    (r"\bA100\b", 312.0),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 5090\b", 209.5),
    (r"\bRTX 4090\b", 165.2),
)


def bf16_tflops(device_name: str) -> float | None:
    """The peak of a device called so, in TFLOP/s; None when unknown (a slice of a GPU, too)."""
    if "MIG" in device_name:
        return None
    return next((peak for pattern, peak in BF16_TFLOPS if re.search(pattern, device_name)), None)


def peak(device: torch.device, given: float | None) -> tuple[float | None, str]:
    """The peak in TFLOP/s that MFU refers to, and a line for the log. `given`: `logging.peak_tflops`."""
    if given is not None:
        return given, f"of {given:g} TFLOP/s (logging.peak_tflops)"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    known = bf16_tflops(name)
    if known is None:
        return None, f"not reported: no peak of {name} is known (set logging.peak_tflops)"
    return known, f"of {known:g} TFLOP/s, {name}'s dense BF16 peak"
