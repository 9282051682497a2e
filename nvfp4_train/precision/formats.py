"""The operands of a linear layer's GEMMs in each format, under one interface: what `ops.py` multiplies.

A quantized operand has `.operand(dtype)`, exact, and `.amax`, whose tensor scale belongs to the product (None: it has none).
"""

from __future__ import annotations

import torch
from nvfp4_kernels import (
    BLOCK,
    FP8,
    MXFP4,
    ROLE_COLUMNS,
    ROLE_ROWS,
    SIGNS,
    BlockScaledTensor,
    CounterKey,
    QuantizedTensor,
    amax,
    hadamard16,
    quantize,
    quantize_blocks,
    quantize_four_over_six,
    quantize_rows_and_columns,
)
from nvfp4_kernels.blockscaled import SIGNS32, expand_columns
from nvfp4_kernels.hadamard import hadamard
from nvfp4_kernels.ms_eden import quantize_ms_eden, rotation_signs, rotation_size
from torch import Tensor

from nvfp4_train.precision.recipe import LinearPlan

Quantized = QuantizedTensor | BlockScaledTensor
BLOCK_FORMATS = {"mxfp4": MXFP4, "fp8": FP8}
# MS-EDEN's draws beside those of the gradients: the scales of the GEMMs' other operands.
ROLE_DGRAD_WEIGHT, ROLE_WGRAD_INPUT = 2, 3


def key_of(rng: Tensor, role: int) -> CounterKey:
    """rng: int64 [4] = seed, step, micro-batch, tensor."""
    return CounterKey(rng[0], rng[1], rng[2], rng[3], role)


def forward_operands(
    plan: LinearPlan, x: Tensor, x_amax: Tensor | None, quantizes: bool, saves: bool
) -> tuple[Quantized | None, Quantized | None]:
    """(x for fprop: an operand, x for the backward pass: codes) of x bf16 [T, in], each where it is wanted.

    x_amax: fp32 [2] from x's producer, or None.
    """
    if plan.format != "nvfp4":
        fmt = BLOCK_FORMATS[plan.format]
        rows = quantize_blocks(x, fmt, output="operand") if quantizes else None
        columns = quantize_blocks(x, fmt, transpose=True, rotate=plan.rotates_wgrad) if saves else None
        return rows, columns
    signs = SIGNS if saves and plan.rotates_wgrad and not plan.ms_eden else None
    both = amax(x, signs) if x_amax is None else x_amax
    if plan.four_over_six in ("activations", "all") and quantizes:
        rows = quantize_four_over_six(x, (1, BLOCK), both[0])
        if plan.ms_eden:
            return rows, rows
        columns = (both[1 if signs else 0], None, "codes") if saves else None
        return rows, columns and quantize_rows_and_columns(x, None, columns, signs)[1]
    if plan.ms_eden:
        rows = quantize(x, amax=both[0])
        return rows, rows
    return quantize_rows_and_columns(
        x,
        (both[0], None, "operand") if quantizes else None,
        (both[1 if signs else 0], None, "codes") if saves else None,
        signs,
    )


def gradient_operands(
    plan: LinearPlan, dy: Tensor, rng: Tensor, for_dgrad: bool, for_wgrad: bool, wgrad_output: str
) -> tuple[Quantized | None, Quantized | None]:
    """(dy for dgrad, dy^T for wgrad), operands of dy bf16 [T, out]. wgrad_output: "operand" or "operand_fp32"."""
    keys = [key_of(rng, role) if plan.stochastic else None for role in (ROLE_ROWS, ROLE_COLUMNS)]
    if plan.format != "nvfp4":
        fmt = BLOCK_FORMATS[plan.format]
        rows = quantize_blocks(dy, fmt, key=keys[0], output="operand") if for_dgrad else None
        columns = (
            quantize_blocks(
                dy, fmt, key=keys[1], transpose=True, rotate=plan.rotates_wgrad, output=wgrad_output
            )
            if for_wgrad
            else None
        )
        return rows, columns
    signs = SIGNS if plan.rotates_wgrad else None
    both = amax(dy, signs)
    return quantize_rows_and_columns(
        dy,
        (both[0], keys[0], "operand") if for_dgrad else None,
        (both[1 if signs else 0], keys[1], wgrad_output) if for_wgrad else None,
        signs,
    )


def eden_operands(
    plan: LinearPlan, dy: Tensor, x: Quantized, weight: Tensor, weight_amax: Tensor, rng: Tensor
) -> tuple[tuple[Quantized, Quantized], tuple[Quantized, Quantized]]:
    """MS-EDEN's ((dy, W^T) for dgrad, (dy^T, x^T) for wgrad), of the x and W that the forward pass quantized.

    weight: fprop's operand bf16 [out, in]. The second operand's amax carries the tensor scale of x or W along.
    """
    pairs = []
    for grad, other, other_amax, roles in (
        (dy, weight.t(), weight_amax, (ROLE_ROWS, ROLE_DGRAD_WEIGHT)),
        (dy.t(), x.operand().t(), x.amax, (ROLE_COLUMNS, ROLE_WGRAD_INPUT)),
    ):
        key = key_of(rng, roles[0])
        signs = rotation_signs(key, rotation_size(grad.shape[1]), grad.device)
        a = quantize_ms_eden(grad.contiguous(), signs, key)
        b = quantize_ms_eden(other.contiguous(), signs, key_of(rng, roles[1]))
        scaled = b.amax * (other_amax / torch.full_like(other_amax, 2688.0))
        pairs.append((a, QuantizedTensor(b.codes, b.scales, scaled, b.block)))
    return tuple(pairs)


def weight_operands(plan: LinearPlan, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(fprop operand, dgrad operand, amax) of a master weight fp32 [out, in]: bf16 [out, in] twice, fp32 scalar.

    The codes are those of the weight rounded to bf16, which is what sharded training gathers. The amax is the one that the
    product's scale is computed from (without meaning where the format has no tensor scale).
    """
    w = weight.detach().to(torch.bfloat16)
    value = amax(w)[0] if plan.has_tensor_scale else torch.ones((), device=w.device)
    names = {"fprop.weight", "dgrad.weight"} & plan.quantized
    fprop = dgrad = w
    scaled = value
    if names and (plan.square_weights or plan.ms_eden):
        q = quantized_weight(plan, w, value)
        scaled = value if q.amax is None else q.amax
        fprop = q.operand() if "fprop.weight" in names else w
        dgrad = q.operand() if "dgrad.weight" in names else w
        return fprop, fprop if len(names) == 2 else dgrad, scaled.clone()
    for name in sorted(names):
        q = quantized_weight(plan, w, value, transpose=name == "dgrad.weight")
        scaled = value if q.amax is None else q.amax
        if name == "fprop.weight":
            fprop = q.operand()
        else:
            dgrad = q.operand().t()
    return fprop, dgrad, scaled.clone()


def quantized_weight(
    plan: LinearPlan, w: Tensor, value: Tensor, transpose: bool = False, output: str = "operand"
) -> Quantized:
    """A weight bf16 [out, in] (`transpose`: its transpose) with amax `value` as training's GEMMs take it.

    `output`: "codes" or "operand" (bf16).
    """
    if plan.format != "nvfp4":
        fmt, square = BLOCK_FORMATS[plan.format], plan.square_weights
        return quantize_blocks(w, fmt, square, transpose=transpose and not square, output=output)
    block = (BLOCK, BLOCK) if plan.square_weights else (1, BLOCK)
    if plan.four_over_six in ("weights", "all"):
        return quantize_four_over_six(w.t().contiguous() if transpose else w, block, value, output)
    return quantize(w, block, transpose=transpose, amax=value, output=output)


def saved_shapes(plan: LinearPlan, tokens: int, features: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes in memory of the codes and scales that the forward pass saves of x [tokens, features], both uint8."""
    if plan.ms_eden:
        return (tokens, features // 2), (tokens, features // BLOCK)
    block = {"nvfp4": BLOCK, "mxfp4": MXFP4.block, "fp8": FP8.block}[plan.format]
    return (tokens if plan.format == "fp8" else tokens // 2, features), (-(-tokens // block), features)


def saved_codes(plan: LinearPlan, q: Quantized) -> tuple[Tensor, Tensor]:
    """q's codes and scales as uint8 tensors of `saved_shapes`."""
    codes, scales = q.codes.view(torch.uint8), q.scales.view(torch.uint8)
    return (codes, scales) if plan.ms_eden else (codes.t(), scales.t())


def saved_operand(
    plan: LinearPlan, codes: Tensor, scales: Tensor, x_amax: Tensor, dtype: torch.dtype
) -> Quantized:
    """What `saved_codes` returned, as an operand in `dtype`: x^T for wgrad, or (MS-EDEN) x."""
    if plan.format in BLOCK_FORMATS:
        fmt = BLOCK_FORMATS[plan.format]
        operand = expand_columns(codes.t(), scales.t(), fmt, dtype)
        return BlockScaledTensor(fmt, (1, fmt.block), None, None, operand)
    if not plan.ms_eden:
        codes, scales = codes.t(), scales.t()
    return QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), x_amax, (1, BLOCK))


def operand_codes(plan: LinearPlan, operand: str, x: Tensor, rng: Tensor) -> tuple[Tensor, Quantized]:
    """(the matrix that the GEMM's `operand` stands for, its codes) of x, dy or the master weight x, for `health.py`."""
    x = x.to(torch.bfloat16)
    turned = operand.startswith("wgrad") or operand == "dgrad.weight"
    matrix = x.t().contiguous() if turned else x
    weight, gradient = operand.endswith("weight"), operand.endswith("grad")
    role = ROLE_COLUMNS if turned else ROLE_ROWS
    if plan.ms_eden and not operand.startswith("fprop"):
        gradient_role = ROLE_COLUMNS if operand.startswith("wgrad") else ROLE_ROWS
        role = gradient_role if gradient else ROLE_DGRAD_WEIGHT if weight else ROLE_WGRAD_INPUT
        size = rotation_size(matrix.shape[1])
        signs = rotation_signs(key_of(rng, gradient_role), size, matrix.device)
        return hadamard(matrix, signs), quantize_ms_eden(matrix, signs, key_of(rng, role))
    rotates = operand.startswith("wgrad") and plan.rotates_wgrad
    key = key_of(rng, role) if gradient and plan.stochastic else None
    square = weight and plan.square_weights
    if plan.format in BLOCK_FORMATS:
        rotated = hadamard(matrix, SIGNS32) if rotates else matrix
        return rotated, quantize_blocks(rotated, BLOCK_FORMATS[plan.format], square, key)
    rotated = hadamard16(matrix) if rotates else matrix
    block = (BLOCK, BLOCK) if square else (1, BLOCK)
    if plan.four_over_six in (("weights", "all") if weight else ("activations", "all")) and (
        weight or operand == "fprop.input"
    ):
        return rotated, quantize_four_over_six(rotated, block, amax(rotated)[0])
    return rotated, quantize(rotated, block, "stochastic" if key else "nearest", key=key)
