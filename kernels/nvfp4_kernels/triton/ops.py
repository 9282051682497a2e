"""PyTorch tensors in and out of the Triton kernels. Shapes and layouts as in `kernels.py`."""

from __future__ import annotations

import functools
import importlib.util

import torch

from nvfp4_kernels.format import BLOCK
from nvfp4_kernels.random_bits import CounterKey

DTYPES = (torch.bfloat16, torch.float32)
# No contraction of multiply and add: bits are a contract.
OPTIONS = {"enable_fp_fusion": False}
NORM_LANES = 256  # at most: registers for two programs on a processor, whose tiles of 16 x 2048 channels its L1 cache holds
NORM_CHUNK = 64  # rows of a program of the norm's backward pass
LANES = 64  # a program; the fastest of 32, 64, 128 and 256 on an H200

Request = tuple[torch.Tensor, CounterKey | None, str]  # amax, key or None for nearest, output


def scale_product(amaxes: list[torch.Tensor]) -> torch.Tensor:
    """Product of one or two tensor scales, amax / 2688 each, as fp32 scalar tensor on their device."""
    out = torch.empty((), dtype=torch.float32, device=amaxes[0].device)
    _kernels().scale_product_kernel[(1,)](*amaxes, *[None] * (2 - len(amaxes)), out, num_warps=1)
    return out


@functools.cache
def report() -> tuple[bool, str]:
    """(whether the kernels can run here, what to tell the user)."""
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed (pip install triton)"
    import triton

    return True, f"Triton {triton.__version__}"


def supports(x: torch.Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return x.device.type == "cuda" and x.dtype in DTYPES and report()[0]


def _kernels():
    from nvfp4_kernels.triton import kernels

    return kernels


def _words(t: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """t seen as words that may be read 16 bytes at a time."""
    t = t.contiguous()
    return (t if t.data_ptr() % 16 == 0 else t.clone()).view(dtype)


def _sign_bits(hadamard: tuple[int, ...] | None) -> int | None:
    return None if hadamard is None else sum(1 << i for i, s in enumerate(hadamard) if s < 0)


def _tiles(shape: tuple[int, int]) -> int:
    rows, cols = shape
    return -(-rows // BLOCK) * -(-cols // (4 * LANES))


def _key(key: CounterKey | None, device: torch.device):
    """The key as kernel arguments: ints, or tensors read on the device."""
    if key is None:
        return None
    fields = (
        key.seed,
        key.step,
        key.microbatch,
        key.tensor,
        key.role,
        key.row_offset,
        key.col_offset // BLOCK,
    )
    return tuple(_field(f, device) for f in fields)


def _field(value: int | torch.Tensor, device: torch.device):
    if isinstance(value, torch.Tensor) and value.device == device:
        return value
    value = int(value) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value  # as int32, so that one compilation serves all values


def amax_pair(x: torch.Tensor, hadamard: tuple[int, ...] | None) -> torch.Tensor:
    """fp32 [2]: amax of x [rows, cols], and of its transform along rows (0 without `hadamard`)."""
    out = torch.zeros(2, dtype=torch.int32, device=x.device)
    tiles = _tiles(x.shape)
    grid = min(tiles, 8 * _processors(x.device))
    _kernels().amax_kernel[(grid,)](
        _words(x),
        out,
        *x.shape,
        x.dtype == torch.bfloat16,
        _sign_bits(hadamard),
        LANES,
        num_warps=LANES // 32,
        **OPTIONS,
    )
    return out.view(torch.float32)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _allocate(x: torch.Tensor, columns: bool, output: str) -> tuple[torch.Tensor, ...]:
    rows, cols = x.shape
    if output != "codes":
        return (torch.empty(rows, cols, dtype=torch.bfloat16, device=x.device),)
    shapes = (
        ((rows // 2, cols), (rows // BLOCK, cols)) if columns else ((rows, cols // 2), (rows, cols // BLOCK))
    )
    return tuple(torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes)


def quantize(
    x: torch.Tensor, rows: Request | None, columns: Request | None, hadamard: tuple[int, ...] | None = None
) -> tuple[tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
    """Row-wise and column-wise 1x16 results from one read of x [rows, cols].

    Each result is (operand bf16,) or (codes, scales) in memory layout: column results keep channels contiguous.
    """
    halves, results = [], []
    for request, is_column in ((rows, False), (columns, True)):
        if request is None:
            halves += [None] * 4
            results.append(None)
            continue
        amax, key, output = request
        out = _allocate(x, is_column, output)
        results.append(out)
        if output == "codes":
            views = (
                (out[0].view(torch.int32), out[1].view(torch.int32))
                if is_column
                else (out[0].view(torch.int64), out[1])
            )
        else:
            views = out[0].view(torch.int64), None
        halves += [amax, _key(key, x.device), *views]
    _kernels().quantize_kernel[(_tiles(x.shape),)](
        _words(x), *x.shape, *halves,
        BF16=x.dtype == torch.bfloat16,
        ROW=_kind(rows), ROW_STOCHASTIC=bool(rows and rows[1]),
        COLUMN=_kind(columns), COLUMN_STOCHASTIC=bool(columns and columns[1]), SIGNS=_sign_bits(hadamard),
        LANES=LANES, num_warps=LANES // 32, **OPTIONS,
    )  # fmt: skip
    return tuple(results)


def _kind(request: Request | None) -> str | None:
    return None if request is None else "codes" if request[2] == "codes" else "operand"


def quantize_square(x: torch.Tensor, amax: torch.Tensor, output: str) -> tuple[torch.Tensor, ...]:
    """16x16 blocks, nearest. x: [rows, cols] -> (operand,) or (codes, scales)."""
    out = _allocate(x, False, output)
    views = (out[0].view(torch.int64), None) if output == "operand" else (out[0].view(torch.int16), out[1])
    _kernels().quantize_square_kernel[(_tiles(x.shape),)](
        _words(x),
        *x.shape,
        amax,
        *views,
        x.dtype == torch.bfloat16,
        output,
        LANES,
        num_warps=LANES // 32,
        **OPTIONS,
    )
    return out


def expand_columns(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Column codes uint8 [rows/2, cols] and scales [rows/16, cols], contiguous -> operand bf16 [rows, cols]."""
    rows, cols = codes.shape[0] * 2, codes.shape[1]
    out = torch.empty(rows, cols, dtype=torch.bfloat16, device=codes.device)
    _kernels().expand_columns_kernel[(_tiles(out.shape),)](
        _words(codes, torch.int32), _words(scales, torch.int32), out.view(torch.int64), rows, cols, LANES,
        num_warps=LANES // 32, **OPTIONS,
    )  # fmt: skip
    return out


def expand_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Row codes uint8 [rows, cols/2] and scales [rows, cols/16], contiguous -> operand bf16 [rows, cols]."""
    rows, cols = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(rows, cols, dtype=torch.bfloat16, device=codes.device)
    blocks = rows * cols // BLOCK
    _kernels().expand_rows_kernel[(-(-blocks // LANES),)](
        _words(codes), _words(scales, torch.uint8), out.view(torch.int64), blocks, LANES,
        num_warps=LANES // 32, **OPTIONS,
    )  # fmt: skip
    return out


def rms_norm(x, gate, weight, eps: float, groups: int, hadamard, measured: bool):
    """As `producers.rms_norm`, in one kernel."""
    from nvfp4_kernels.triton.producers import norm_kernel

    rows, cols = x.shape
    y = torch.empty(rows, cols, dtype=torch.bfloat16, device=x.device)
    rstd = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    amax = torch.zeros(2 if measured else 0, dtype=torch.int32, device=x.device)
    bf16, group = x.dtype == torch.bfloat16, cols // groups
    lanes = max(32, min(NORM_LANES, 1 << (group // 4 - 1).bit_length()))
    gates, stride = (None, None) if gate is None else _word_rows(gate)
    grid = min(-(-rows // BLOCK) * groups, _processors(x.device) * 1024 // lanes)
    norm_kernel[(grid,)](
        _words(x), gates, weight, y.view(torch.int64), rstd, amax, rows, eps,
        COLS=cols, GATE_STRIDE=stride, GROUP=group, BF16=bf16, MEASURED=measured, SIGNS=_sign_bits(hadamard),
        WHOLE=rows % BLOCK == 0, LANES=lanes, num_warps=lanes // 32,
    )  # fmt: skip
    return y, rstd, amax.view(torch.float32)


def _word_rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """t [rows, cols] as words, and the words from row to row: in place where rows start at whole words."""
    if t.stride(-1) != 1 or t.stride(0) % 4 or t.data_ptr() % 8:
        t = t.contiguous()
    return t.view(torch.int64), t.stride(0) // 4


def rms_norm_backward(dy, x, gate, rstd, weight):
    """As `producers.rms_norm_backward`, in one kernel and the sum of its chunks' shares of the weight's gradient."""
    from nvfp4_kernels.triton.producers import norm_backward_kernel

    (rows, cols), groups = x.shape, rstd.shape[1]
    chunks, width = -(-rows // NORM_CHUNK), 1 << (cols // groups - 1).bit_length()
    x, dy = x.contiguous(), dy.contiguous()
    if gate is not None and gate.stride(1) != 1:
        gate = gate.contiguous()
    dx, dgate = (
        torch.empty_like(x),
        None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device),
    )
    sums = torch.empty(chunks, cols, dtype=torch.float32, device=x.device)
    norm_backward_kernel[(chunks * groups,)](
        dy, x, gate, rstd, weight, dx, dgate, sums, rows, cols, 0 if gate is None else gate.stride(0),
        GATED=gate is not None, GROUP=cols // groups, CHUNK=NORM_CHUNK, WIDTH=width,
        num_warps=1 if width <= 512 else min(width // 256, 16),
    )  # fmt: skip
    return dx, dgate, sums.sum(0)


def squared_relu(x: torch.Tensor, hadamard) -> tuple[torch.Tensor, torch.Tensor]:
    """As `producers.squared_relu`, in one kernel."""
    from nvfp4_kernels.triton.producers import squared_relu_kernel

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    amax = torch.zeros(2, dtype=torch.int32, device=x.device)
    grid = min(_tiles(x.shape), 8 * _processors(x.device))
    squared_relu_kernel[(grid,)](
        _words(x), y.view(torch.int64), amax, *x.shape, _sign_bits(hadamard), LANES, num_warps=LANES // 32, **OPTIONS
    )  # fmt: skip
    return y, amax.view(torch.float32)
