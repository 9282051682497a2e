"""NVFP4 on any device: format, exact reference, fast kernels, emulated GEMM. Depends on torch alone (Triton on GPUs)."""

from nvfp4_kernels.blockscaled import FP8, MXFP4, BlockScaledTensor, quantize_blocks
from nvfp4_kernels.format import BLOCK, QuantizedTensor, tensor_scale
from nvfp4_kernels.four_over_six import quantize_four_over_six
from nvfp4_kernels.gemm import gemm, gemm_report
from nvfp4_kernels.hadamard import SIGNS, hadamard16
from nvfp4_kernels.health import quantization_sums
from nvfp4_kernels.quantize import amax, backend_report, expand_operand, quantize, quantize_rows_and_columns
from nvfp4_kernels.random_bits import ROLE_COLUMNS, ROLE_ROWS, CounterKey, philox4x32

__all__ = [
    "BLOCK",
    "FP8",
    "MXFP4",
    "ROLE_COLUMNS",
    "ROLE_ROWS",
    "SIGNS",
    "BlockScaledTensor",
    "CounterKey",
    "QuantizedTensor",
    "amax",
    "backend_report",
    "expand_operand",
    "gemm",
    "gemm_report",
    "hadamard16",
    "philox4x32",
    "quantization_sums",
    "quantize",
    "quantize_blocks",
    "quantize_four_over_six",
    "quantize_rows_and_columns",
    "tensor_scale",
]
