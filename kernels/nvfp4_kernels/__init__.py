"""NVFP4 on any device: format, exact reference, fast kernels, emulated GEMM. Depends on torch alone (Triton on GPUs)."""

from nvfp4_kernels.format import BLOCK, QuantizedTensor, tensor_scale
from nvfp4_kernels.gemm import gemm
from nvfp4_kernels.hadamard import SIGNS, hadamard16
from nvfp4_kernels.health import quantization_sums
from nvfp4_kernels.quantize import amax, backend_report, expand_operand, quantize, quantize_rows_and_columns
from nvfp4_kernels.random_bits import ROLE_COLUMNS, ROLE_ROWS, CounterKey, philox4x32

__all__ = [
    "BLOCK",
    "ROLE_COLUMNS",
    "ROLE_ROWS",
    "SIGNS",
    "CounterKey",
    "QuantizedTensor",
    "amax",
    "backend_report",
    "expand_operand",
    "gemm",
    "hadamard16",
    "philox4x32",
    "quantization_sums",
    "quantize",
    "quantize_rows_and_columns",
    "tensor_scale",
]
