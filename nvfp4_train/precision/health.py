"""How well each linear layer's operands survive quantization, measured while training runs.

While a `HealthRecorder` is active (`PrecisionRuntime.recording_health`) the quantized linears quantize their operands once
more, to codes, and add up what that did to them. The sums stay on the device; rounding draws the bits that training draws.
"""

from __future__ import annotations

import torch
from nvfp4_kernels import QuantizedTensor, quantization_sums
from nvfp4_kernels.health import FIELDS

from nvfp4_train.precision.recipe import OPERANDS

GEMMS = {
    "forward": "fprop",
    "dgrad": "dgrad",
    "wgrad": "wgrad",
}  # name in the metrics -> prefix of its operands


class HealthRecorder:
    """Sums over the operands of all linear layers; `sums`: fp32 [layers, 6 operands, 6 fields] on the device.

    Several micro-batches add up. Activation checkpointing records forward operands twice, which no ratio shows.
    """

    def __init__(self, layers: int, device: torch.device):
        self.sums = torch.zeros(layers, len(OPERANDS), len(FIELDS), device=device)

    def add(self, rng: torch.Tensor, operand: str, x: torch.Tensor, q: QuantizedTensor) -> None:
        """Add what quantizing x to q lost. rng: int64 [4], whose last entry is the layer's number."""
        self.sums[:, OPERANDS.index(operand)].index_add_(0, rng[3:], quantization_sums(x, q)[None])

    def metrics(self, names: list[str], quantized: list[frozenset[str]]) -> dict[str, torch.Tensor]:
        """`health/LAYER/GEMM/{sqnr_db,underflow,saturation}` as device scalars, for the GEMMs with a quantized operand.

        names, quantized: of every layer, its name and its quantized operands. sqnr_db: signal to noise of the product's
        operands, whose noise-to-signal ratios add; underflow: share of the non-zero elements that became zero;
        saturation: share of all elements that were clipped to their block's range (both operands together). An operand that
        was not recorded is left out; NaN where none was.
        """
        signal, noise, elements, nonzero, underflow, saturation = self.sums.unbind(-1)
        ratio = torch.where(elements > 0, noise / signal, 0.0)  # NaN where everything is zero
        result = {}
        for i, name in enumerate(names):
            for gemm, prefix in GEMMS.items():
                used = [j for j, o in enumerate(OPERANDS) if o.startswith(prefix) and o in quantized[i]]
                if not used:
                    continue
                stem = f"health/{name}/{gemm}/"
                recorded = elements[i, used].sum()
                sqnr = -10 * torch.log10(ratio[i, used].sum())
                result[stem + "sqnr_db"] = torch.where(recorded > 0, sqnr, torch.nan)
                result[stem + "underflow"] = underflow[i, used].sum() / nonzero[i, used].sum()
                result[stem + "saturation"] = saturation[i, used].sum() / recorded
        return result


active: HealthRecorder | None = None
"""The recorder that the operators write to; they run outside of compiled graphs, so that setting it recompiles nothing."""
