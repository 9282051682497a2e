"""What a quantization did to a matrix: error, underflow and saturation, as sums on the device."""

from __future__ import annotations

import torch

from nvfp4_kernels.format import QuantizedTensor

FIELDS = ("signal", "noise", "elements", "nonzero", "underflow", "saturation")
_SLICE = 1 << 24  # elements looked at together, for the size of temporaries


def quantization_sums(x: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    """fp32 [6] on x's device, `FIELDS`: sum x^2, sum (x - q)^2, and counts of elements: all; not zero; of these the
    ones that became zero; and the ones beyond their block's range, which were clipped.

    x: [rows, cols], what q (with codes) was quantized from, after the transform where there is one. Counts above 2^24 are
    rounded. No host sync.
    """
    total = torch.zeros(len(FIELDS), dtype=torch.float32, device=x.device)
    step = max(1, _SLICE // x.shape[1])
    for start in range(0, x.shape[0], step):
        value, part = x[start : start + step].float(), q.rows(slice(start, start + step))
        rounded, nonzero = part.dequantize(), value != 0
        total += torch.stack(
            (
                value.square().sum(),
                (value - rounded).square().sum(),
                total.new_full((), value.numel()),
                nonzero.sum(),
                (nonzero & (rounded == 0)).sum(),
                (value.abs() > part.limit()).sum(),
            )
        )
    return total
