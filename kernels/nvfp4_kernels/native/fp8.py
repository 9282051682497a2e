"""Blockwise FP8 on Hopper's tensor cores: the codes and scales of `blockscaled.FP8`, multiplied as they are by cuBLAS.

cuBLAS (12.9 and newer, compute capability 9.0) multiplies E4M3 operands in blocks of 1x128 by operands in blocks of 1x128 or
128x128, through torch's scaled matrix product. Both run along K in memory. The product's sums have fewer bits than the
emulated one's: docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from nvfp4_kernels.blockscaled import FP8, BlockScaledTensor, _check, quantize_blocks, scale_values
from nvfp4_kernels.gemm import scaled_matmul
from nvfp4_kernels.triton.ops import OPTIONS, _words
from nvfp4_kernels.triton.ops import supports as gpu_supports

CHIP = (9, 0)  # the only one for which cuBLAS has these products
CUDA = (12, 9)  # the first cuBLAS that has them
BLOCK = FP8.block
SQUARE_BLOCK = (BLOCK, BLOCK)


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix [rows, cols] whose products run along cols, in blocks of 1x128 or 128x128.

    `codes`  float8_e4m3fn [rows, cols rounded up to 128], contiguous, zero beyond cols: a ragged last block needs no care
    `scales` float32, first dimension contiguous: [rows, blocks], or (square) [blocks along cols rounded up to 4, blocks
             along rows], the padding 0
    """

    codes: torch.Tensor
    scales: torch.Tensor
    square: bool = False

    @staticmethod
    def of(q: BlockScaledTensor) -> Fp8Tensor:
        """The same numbers in this layout. q: codes and scales of `blockscaled.FP8`."""
        square = q.block == SQUARE_BLOCK
        codes = F.pad(q.codes.view(torch.uint8), (0, -q.codes.shape[1] % BLOCK)).contiguous()
        values = scale_values(q.scales)
        # [blocks along rows, blocks along cols, padded] in memory, or [blocks, rows].
        memory = F.pad(values, (0, -values.shape[1] % 4)) if square else values.t()
        return Fp8Tensor(codes.view(torch.float8_e4m3fn), memory.contiguous().t(), square)

    def plain(self) -> BlockScaledTensor:
        """Inverse of `of`, but for the columns that are padded with zeros."""
        blocks = self.codes.shape[1] // BLOCK
        exponents = (self.scales.view(torch.int32) >> 23).to(torch.uint8)
        exponents = exponents[:blocks].t() if self.square else exponents
        return BlockScaledTensor(FP8, SQUARE_BLOCK if self.square else (1, BLOCK), self.codes, exponents)


def problem(device: torch.device) -> str | None:
    """Why these products cannot run on `device`; None when they can."""
    if device.type != "cuda":
        return f"block-scaled FP8 products are Hopper's, not a {device.type.upper()}'s"
    if (capability := torch.cuda.get_device_capability(device)) != CHIP:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"cuBLAS has block-scaled FP8 products for compute capability 9.0, not for {name} ({major}.{minor})"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if tuple(map(int, torch.version.cuda.split(".")[:2])) < CUDA:
        return f"cuBLAS has block-scaled FP8 products from CUDA 12.9 on, and this torch brings {torch.version.cuda}"
    return None


def multiply(a: Fp8Tensor, b: Fp8Tensor, out_dtype: torch.dtype, backend: str = "cublas") -> torch.Tensor:
    """a [M, K] x b [N, K]^T -> [M, N] in `out_dtype` (bf16 or fp32). a: 1x128 blocks; M, N: multiples of 16.

    `backend`: cublas, or emulated: exact bf16 operands. Raises ValueError where cublas cannot run.
    """
    if a.square:
        raise ValueError("the left operand of an FP8 product is in blocks of 1x128")
    if backend == "emulated":
        return scaled_matmul(a.plain().operand(), b.plain().operand(), None, out_dtype)
    if reason := problem(a.codes.device):
        raise ValueError(f"the cublas GEMM cannot run: {reason}")
    return F.scaled_mm(*arguments(a, b), output_dtype=out_dtype)


def arguments(a: Fp8Tensor, b: Fp8Tensor) -> tuple:
    """What `torch.nn.functional.scaled_mm` is called with."""
    rows, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return a.codes, b.codes.t(), a.scales, rows, b.scales, square if b.square else rows


def quantize_rows_and_columns(
    x: torch.Tensor, rows: bool, columns: bool, backend: str = "auto"
) -> tuple[Fp8Tensor | None, Fp8Tensor | None]:
    """x [rows, cols] and x^T in blocks of 1x128, nearest, each where it is wanted, from one read of x.

    x: bf16 or fp32, multiples of 16 (rows only with `columns`). `backend`: auto takes the kernel on GPUs, else "portable":
    the quantizer of `blockscaled.py`, laid out anew.
    """
    _check(x, FP8, False, None, columns, False)
    if not _takes_kernel(x, backend):
        return (
            Fp8Tensor.of(quantize_blocks(x, FP8)) if rows else None,
            Fp8Tensor.of(quantize_blocks(x, FP8, transpose=True)) if columns else None,
        )
    m, n = x.shape
    wanted = _empty(x, m, n) if rows else None, _empty(x, n, m) if columns else None
    _run(x, *wanted, square=False)
    return wanted


def quantize_square(x: torch.Tensor, backend: str = "auto") -> tuple[Fp8Tensor, Fp8Tensor]:
    """Blocks of 128x128 of x [rows, cols], nearest: the matrix and its transpose, the same numbers."""
    _check(x, FP8, True, None, False, False)
    if not _takes_kernel(x, backend):
        q = quantize_blocks(x, FP8, square=True)
        turned = BlockScaledTensor(FP8, q.block, q.codes.t(), q.scales.t())
        return Fp8Tensor.of(q), Fp8Tensor.of(turned)
    m, n = x.shape
    both = _empty(x, m, n, square=True), _empty(x, n, m, square=True)
    _run(x, *both, square=True)
    return both


def _takes_kernel(x: torch.Tensor, backend: str) -> bool:
    if backend not in ("auto", "portable", "triton"):
        raise ValueError(f"unknown FP8 quantize backend {backend!r}; there are auto, portable, triton")
    return backend == "triton" or (backend == "auto" and gpu_supports(x))


def _empty(x: torch.Tensor, rows: int, cols: int, square: bool = False) -> Fp8Tensor:
    """Room for a matrix [rows, cols]; the scales' padding is zero."""
    blocks = -(-cols // BLOCK)
    codes = torch.empty(rows, blocks * BLOCK, dtype=torch.float8_e4m3fn, device=x.device)
    if square:
        scales = torch.zeros(-(-rows // BLOCK), -(-blocks // 4) * 4, device=x.device)
    else:
        scales = torch.empty(blocks, rows, device=x.device)
    return Fp8Tensor(codes, scales.t(), square)


def _run(x: torch.Tensor, rows: Fp8Tensor | None, columns: Fp8Tensor | None, square: bool) -> None:
    from nvfp4_kernels.native.fp8_kernels import quantize_kernel

    halves = []
    for q, words in ((rows, torch.int32), (columns, torch.int64)):
        halves += [None, None] if q is None else [q.codes.view(words), q.scales.t()]
    (m, n), grid = x.shape, (-(-x.shape[0] // BLOCK) * -(-x.shape[1] // BLOCK),)
    hardware = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
    # 128 registers let two programs share a processor: Triton 3.6 takes them, 3.9 would take 162, and neither spills.
    quantize_kernel[grid](
        _words(x, x.dtype), m, n // 16, *halves,
        SQUARE=square, HARDWARE=hardware, num_warps=8, maxnreg=128, **OPTIONS,
    )  # fmt: skip
