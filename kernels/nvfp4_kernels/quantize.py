"""The quantizer's public face: one signature, several backends, the same bits from each.

Backends: `reference` (plain PyTorch, any device), `cpu` (C++, compiled on first use) and `triton` (CUDA). `auto`
takes the fastest that accepts the tensor; `backend_report` says which and why.
"""

from __future__ import annotations

import torch

from nvfp4_kernels import reference
from nvfp4_kernels.cpu import build as cpu_build
from nvfp4_kernels.cpu import ops as cpu
from nvfp4_kernels.format import BLOCK, E2M1_VALUES, QuantizedTensor, pack, unpack
from nvfp4_kernels.hadamard import hadamard16
from nvfp4_kernels.random_bits import CounterKey
from nvfp4_kernels.triton import ops as gpu

BACKENDS = ("auto", "reference", "cpu", "triton")
ROW_BLOCK, SQUARE_BLOCK = (1, BLOCK), (BLOCK, BLOCK)


def backend_report(device: torch.device | str = "cpu") -> str:
    """Which quantize kernels `auto` takes on `device`, and why: one line for the log."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return "reference (plain PyTorch)"
    fast, text = _availability(kind)
    return (
        f"{'cpu' if kind == 'cpu' else 'triton'} ({text})" if fast else f"reference (plain PyTorch: {text})"
    )


def _availability(device_type: str) -> tuple[bool, str]:
    if device_type == "cuda":
        return gpu.report()
    library, text = cpu_build.load()
    return library is not None, text


def _choose(x: torch.Tensor, backend: str) -> str:
    """The backend that quantizes x. Raises ValueError when the one asked for cannot."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown quantize backend {backend!r}; there are {', '.join(BACKENDS)}")
    able = {"cpu": cpu.supports(x), "triton": gpu.supports(x)}
    if backend == "auto":
        return next((name for name in able if able[name]), "reference")
    if not able.get(backend, True):
        kind = {"cpu": "cpu", "triton": "cuda"}[backend]
        fast, text = _availability(kind)
        reason = (
            f"it takes bf16 and fp32 {kind.upper()} tensors, not {x.dtype} on {x.device}" if fast else text
        )
        raise ValueError(f"the {backend} quantize backend cannot run: {reason}")
    return backend


def _check(x: torch.Tensor, *, rows_too: bool, hadamard: tuple[int, ...] | None = None) -> None:
    if x.ndim != 2:
        raise ValueError(f"expected a matrix, got shape {tuple(x.shape)}")
    for name, size, needed in (("rows", x.shape[0], rows_too), ("columns", x.shape[1], True)):
        if needed and (size % BLOCK or size == 0):
            raise ValueError(f"NVFP4 needs {name} in multiples of 16, got {size} (shape {tuple(x.shape)})")
    if hadamard is not None and x.dtype != torch.bfloat16:
        raise ValueError(f"the Hadamard transform takes bfloat16, not {x.dtype}")


def amax(x: torch.Tensor, hadamard: tuple[int, ...] | None = None, backend: str = "auto") -> torch.Tensor:
    """fp32 [2] on x's device: max |x|, and max |RHT(x^T)| (0 without `hadamard`), in one pass. NaN and Inf propagate.

    x: [rows, cols], multiples of 16 (rows only with `hadamard`). No host sync.
    """
    _check(x, rows_too=hadamard is not None, hadamard=hadamard)
    chosen = _choose(x, backend)
    if chosen == "triton":
        return gpu.amax_pair(x, hadamard)
    if chosen == "cpu":
        return cpu.amax_pair(x.contiguous(), hadamard)
    raw = reference.tensor_amax(x)
    if hadamard is None:
        return torch.stack((raw, torch.zeros_like(raw)))
    return torch.stack((raw, reference.tensor_amax(hadamard16(x.t().contiguous(), hadamard))))


def quantize(
    x: torch.Tensor,
    block: tuple[int, int] = ROW_BLOCK,
    rounding: str = "nearest",
    hadamard: tuple[int, ...] | None = None,
    transpose: bool = False,
    amax: torch.Tensor | None = None,
    key: CounterKey | None = None,
    output: str = "codes",
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantize a matrix to NVFP4.

    x: bf16 or fp32 [rows, cols]; `transpose` quantizes x^T ([cols, rows], 1x16 blocks along x's rows), after the
    16-point Hadamard transform when its signs are given (transposed bf16 only). `amax`: fp32 scalar of what is
    quantized (after the transform); computed when not given. `rounding` stochastic needs a `key`. `output`:
    "codes", or "operand" for the bf16 operand alone. Raises ValueError for sizes that are not multiples of 16
    and for combinations that do not exist.
    """
    if block not in (ROW_BLOCK, SQUARE_BLOCK):
        raise ValueError(f"block must be (1, 16) or (16, 16), not {block}")
    if output not in ("codes", "operand"):
        raise ValueError(f"output must be 'codes' or 'operand', not {output!r}")
    if hadamard is not None and not transpose:
        raise ValueError(
            "the Hadamard transform belongs to transposed quantization (along the token dimension)"
        )
    words = _key_words(rounding, key, x.device)
    if block == SQUARE_BLOCK:
        if words is not None or transpose:
            raise ValueError("16x16 blocks are rounded to nearest and serve both orientations as they are")
        return _quantize_square(x, amax, output, backend)
    request = (amax, key, output)
    if transpose:
        return quantize_rows_and_columns(x, None, request, hadamard, backend)[1]
    return quantize_rows_and_columns(x, request, None, None, backend)[0]


Request = tuple[torch.Tensor | None, CounterKey | None, str]
OPERAND_DTYPES = {"operand": torch.bfloat16, "operand_fp32": torch.float32}


def quantize_rows_and_columns(
    x: torch.Tensor,
    rows: Request | None,
    columns: Request | None,
    hadamard: tuple[int, ...] | None = None,
    backend: str = "auto",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Both orientations in 1x16 blocks from one read of x [rows, cols].

    Each request is (amax or None, key or None for nearest, "codes" | "operand" | "operand_fp32"); None leaves that
    half out. The column result is the matrix [cols, rows] (x^T, transformed when `hadamard` is given), channels contiguous.
    """
    _check(x, rows_too=columns is not None, hadamard=hadamard if columns else None)
    if (rows and rows[0] is None) or (columns and columns[0] is None):
        both = _amax_of(x, hadamard if columns else None, backend)
        raw, transformed = both[0], both[1] if hadamard is not None else both[0]
        rows = rows and (raw if rows[0] is None else rows[0], *rows[1:])
        columns = columns and (transformed if columns[0] is None else columns[0], *columns[1:])
    chosen = _choose(x, backend)
    if chosen == "reference":
        return (
            rows and _reference_rows(x, *rows),
            columns and _reference_rows(_transposed(x, hadamard), *columns, lay_out_columns=True),
        )
    if chosen == "triton":
        r, c = gpu.quantize(x, rows, columns, hadamard)
    else:
        r, c = cpu.quantize(x.contiguous(), _cpu_request(rows), _cpu_request(columns), hadamard)
    return (
        rows and _wrap(r, rows[0], ROW_BLOCK, rows[2], transposed=False),
        columns and _wrap(c, columns[0], ROW_BLOCK, columns[2], transposed=True),
    )


_amax_of = amax  # `quantize` has a parameter of that name


def _key_words(rounding: str, key: CounterKey | None, device: torch.device) -> CounterKey | None:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', not {rounding!r}")
    if (rounding == "stochastic") != (key is not None):
        raise ValueError("stochastic rounding needs a CounterKey, nearest rounding takes none")
    return key


def _cpu_request(request: Request | None):
    if request is None:
        return None
    amax_, key, output = request
    return amax_, None if key is None else key.words("cpu"), OPERAND_DTYPES.get(output)


def _wrap(
    out: tuple[torch.Tensor, ...], amax_: torch.Tensor, block, output: str, transposed: bool
) -> QuantizedTensor:
    if transposed:
        out = tuple(t.t() for t in out)
    if len(out) == 1:
        return QuantizedTensor(None, None, amax_, block, out[0].to(OPERAND_DTYPES[output]))
    return QuantizedTensor(out[0], out[1].view(torch.float8_e4m3fn), amax_, block)


def _transposed(x: torch.Tensor, hadamard: tuple[int, ...] | None) -> torch.Tensor:
    xt = x.t().contiguous()
    return xt if hadamard is None else hadamard16(xt, hadamard)


def _reference_rows(x, amax_, key, output, lay_out_columns: bool = False) -> QuantizedTensor:
    codes, scales = reference.quantize_matrix(x.float(), amax_, ROW_BLOCK, key)
    q = QuantizedTensor(pack(codes), scales, amax_, ROW_BLOCK)
    if output in OPERAND_DTYPES:
        operand = q.operand(OPERAND_DTYPES[output])
        return QuantizedTensor(
            None, None, amax_, ROW_BLOCK, operand.t().contiguous().t() if lay_out_columns else operand
        )
    return q


def _quantize_square(
    x: torch.Tensor, amax_: torch.Tensor | None, output: str, backend: str
) -> QuantizedTensor:
    _check(x, rows_too=True)
    if amax_ is None:
        amax_ = _amax_of(x, None, backend)[0]
    chosen = _choose(x, backend)
    if chosen == "triton":
        return _wrap(gpu.quantize_square(x, amax_, output), amax_, SQUARE_BLOCK, output, transposed=False)
    if chosen == "cpu":
        out = cpu.quantize_square(x.contiguous(), amax_, OPERAND_DTYPES.get(output))
        return _wrap(out, amax_, SQUARE_BLOCK, output, transposed=False)
    codes, scales = reference.quantize_matrix(x.float(), amax_, SQUARE_BLOCK, None)
    q = QuantizedTensor(pack(codes), scales, amax_, SQUARE_BLOCK)
    return q if output == "codes" else QuantizedTensor(None, None, amax_, SQUARE_BLOCK, q.operand())


def expand_operand(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """e2m1 * scale, exact, as [rows, cols] in `dtype`. codes: uint8 [rows, cols/2], scales: E4M3 [rows, cols/16]."""
    bytes_ = scales.view(torch.uint8)
    if gpu.supports(codes.new_empty(0, dtype=dtype)):
        if codes.is_contiguous() and bytes_.is_contiguous():
            return gpu.expand_rows(codes, bytes_).to(dtype)
        if _lies_in_columns(codes, bytes_):
            return gpu.expand_columns(codes.t(), bytes_.t()).t().to(dtype)
    if (
        cpu.supports(codes.new_empty(0, dtype=dtype))
        and _lies_in_columns(codes, bytes_)
        and not codes.is_contiguous()
    ):
        return cpu.expand_columns(codes.t(), bytes_.t(), dtype).t()
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)[unpack(codes).int()]
    return (values.unflatten(-1, (-1, BLOCK)) * scales.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _lies_in_columns(codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether codes and scales are column results as the kernels write them: channels contiguous, whole tiles."""
    return codes.shape[0] % BLOCK == 0 and codes.t().is_contiguous() and scales.t().is_contiguous()
