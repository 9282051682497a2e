"""The quantized linear's three GEMMs as two custom operators, opaque to torch.compile (no graph breaks).

Forward saves for the backward pass only x's column-wise codes and scales, quantized from the
high-precision x; the weight's 16x16 codes serve fprop and, transposed, dgrad.
"""

from __future__ import annotations

import torch
from nvfp4_kernels import (
    BLOCK,
    ROLE_COLUMNS,
    ROLE_ROWS,
    SIGNS,
    CounterKey,
    QuantizedTensor,
    amax,
    hadamard16,
    quantize,
    quantize_rows_and_columns,
)
from nvfp4_kernels.gemm import scale_product, scaled_matmul

from nvfp4_train.precision import health
from nvfp4_train.precision.recipe import LinearPlan

# Where fp32 results are wanted, CPUs multiply fp32 operands (gemm.py): the kernels write those directly.
_WGRAD_OPERAND = {"cpu": "operand_fp32"}


def _key(rng: torch.Tensor, role: int) -> CounterKey:
    """rng: int64 [4] = seed, step, micro-batch, tensor."""
    return CounterKey(rng[0], rng[1], rng[2], rng[3], role)


def _record(plan: LinearPlan, rng: torch.Tensor, operands: dict[str, torch.Tensor]) -> None:
    """Tell the active health recorder what quantizing loses. operands: {name: x, dy or the master weight}."""
    for operand, x in operands.items():
        # Where a model is sharded its master weights are not here whole: their operands are what is gathered.
        if operand not in plan.quantized or not x.untyped_storage().nbytes():
            continue
        x = x.to(torch.bfloat16)
        turned = operand.startswith("wgrad") or operand == "dgrad.weight"
        matrix = x.t().contiguous() if turned else x
        if operand.startswith("wgrad") and plan.rotates_wgrad:
            matrix = hadamard16(matrix)
        key = None
        if operand.endswith("grad") and plan.stochastic_gradients:
            key = _key(rng, ROLE_COLUMNS if turned else ROLE_ROWS)
        square = operand.endswith("weight") and plan.square_weights
        q = quantize(
            matrix, (BLOCK, BLOCK) if square else (1, BLOCK), "stochastic" if key else "nearest", key=key
        )
        health.active.add(rng, operand, matrix, q)


@torch.library.custom_op("nvfp4_train::linear", mutates_args=())
def linear(
    x: torch.Tensor,
    x_amax: torch.Tensor | None,
    weight: torch.Tensor,
    fprop_weight: torch.Tensor,
    dgrad_weight: torch.Tensor,
    weight_amax: torch.Tensor,
    rng: torch.Tensor,
    spec: str,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = x W^T. x: bf16 [T, in]; weight: fp32 [out, in], the master, which only receives the gradient.

    x_amax: fp32 [2] from x's producer (`kernels.amax` of x and its transform), or None: measured here.
    fprop_weight, dgrad_weight: bf16 [out, in], operands prepared once a step (`Linear.prepare_weight`).
    Returns y bf16 [T, out], and x's column codes [in, T/2], scales [in, T/16] and amax for wgrad (empty when
    wgrad.input stays in bf16 or nothing is trained).
    """
    plan = LinearPlan.from_spec(spec)
    saves = training and "wgrad.input" in plan.quantized
    quantizes = "fprop.input" in plan.quantized
    signs = SIGNS if saves and plan.rotates_wgrad else None
    rows, column_amax = None, x.new_zeros((), dtype=torch.float32)
    codes, scales = x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8)
    if saves or quantizes:
        both = amax(x, signs) if x_amax is None else x_amax
        column_amax = both[1] if signs else both[0]
        rows, columns = quantize_rows_and_columns(
            x,
            (both[0], None, "operand") if quantizes else None,
            (column_amax, None, "codes") if saves else None,
            signs,
        )
        column_amax = column_amax.clone()
        if saves:
            codes, scales = columns.codes, columns.scales.view(torch.uint8)
    alpha = _alpha(plan, {"fprop.input": rows.amax if quantizes else None, "fprop.weight": weight_amax})
    y = scaled_matmul(rows.operand() if quantizes else x, fprop_weight, alpha, torch.bfloat16)
    if health.active is not None:
        backward = {"wgrad.input": x, "dgrad.weight": weight} if training else {}
        _record(plan, rng, {"fprop.input": x, "fprop.weight": weight, **backward})
    return y, codes, scales, column_amax


@linear.register_fake
def _(x, x_amax, weight, fprop_weight, dgrad_weight, weight_amax, rng, spec, training):
    tokens, features = x.shape
    y = x.new_empty(tokens, weight.shape[0])
    amax_ = x.new_empty((), dtype=torch.float32)
    if not (training and "wgrad.input" in LinearPlan.from_spec(spec).quantized):
        return y, x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8), amax_
    codes = x.new_empty(tokens // 2, features, dtype=torch.uint8).t()
    return y, codes, x.new_empty(tokens // BLOCK, features, dtype=torch.uint8).t(), amax_


@torch.library.custom_op("nvfp4_train::linear_backward", mutates_args=())
def linear_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    x_amax: torch.Tensor,
    dgrad_weight: torch.Tensor,
    weight_amax: torch.Tensor,
    rng: torch.Tensor,
    spec: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx = dy W (bf16 [T, in]) and dW = dy^T x (fp32 [out, in]). dy: bf16 [T, out]; x: bf16 [T, in], or empty
    when its column codes were saved."""
    plan = LinearPlan.from_spec(spec)
    dy = dy.contiguous()
    for_dgrad, for_wgrad = "dgrad.grad" in plan.quantized, "wgrad.grad" in plan.quantized
    signs = SIGNS if plan.rotates_wgrad else None
    wgrad_operand = _WGRAD_OPERAND.get(dy.device.type, "operand")
    rows = columns = None
    if for_dgrad or for_wgrad:
        both = amax(dy, signs)
        stochastic = plan.stochastic_gradients
        rows, columns = quantize_rows_and_columns(
            dy,
            (both[0], _key(rng, ROLE_ROWS) if stochastic else None, "operand") if for_dgrad else None,
            (both[1] if signs else both[0], _key(rng, ROLE_COLUMNS) if stochastic else None, wgrad_operand)
            if for_wgrad
            else None,
            signs,
        )
    alpha = _alpha(plan, {"dgrad.grad": rows.amax if for_dgrad else None, "dgrad.weight": weight_amax})
    dx = scaled_matmul(rows.operand() if for_dgrad else dy, dgrad_weight.t(), alpha, torch.bfloat16)
    x_columns = None
    if codes.numel():
        x_columns = QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), x_amax, (1, BLOCK))
    alpha = _alpha(
        plan,
        {
            "wgrad.grad": columns.amax if for_wgrad else None,
            "wgrad.input": x_amax if x_columns is not None else None,
        },
    )
    dtype = torch.float32 if wgrad_operand == "operand_fp32" else torch.bfloat16
    dw = scaled_matmul(
        columns.operand(dtype) if for_wgrad else dy.t(),
        x_columns.operand(dtype) if x_columns is not None else x.t(),
        alpha,
        torch.float32,
    )
    if health.active is not None:
        _record(plan, rng, {"dgrad.grad": dy, "wgrad.grad": dy})
    return dx, dw


@linear_backward.register_fake
def _(dy, x, codes, scales, x_amax, dgrad_weight, weight_amax, rng, spec):
    n, k = dgrad_weight.shape
    return dy.new_empty(dy.shape[0], k), dy.new_empty(n, k, dtype=torch.float32)


def _alpha(plan: LinearPlan, amaxes: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    """Product of the tensor scales of those operands that are quantized; None when none is."""
    return scale_product([v for operand, v in amaxes.items() if operand in plan.quantized and v is not None])


def _setup_context(ctx, inputs, output):
    x, _, _, _, dgrad_weight, weight_amax, rng, spec, _ = inputs
    _, codes, scales, x_amax = output
    saved_x = x.new_empty(0) if codes.numel() else x
    ctx.save_for_backward(saved_x, codes, scales, x_amax, dgrad_weight, weight_amax, rng)
    ctx.spec = spec
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 9
    dx, dw = torch.ops.nvfp4_train.linear_backward(dy, *ctx.saved_tensors, ctx.spec)
    return dx, None, dw, None, None, None, None, None, None


linear.register_autograd(_backward, setup_context=_setup_context)


def prepare_weight(weight: torch.Tensor, plan: LinearPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(fprop operand, dgrad operand, amax) of a master weight fp32 [out, in], both bf16 [out, in].

    The codes are those of the weight rounded to bf16, which is what sharded training gathers.
    """

    w = weight.detach().to(torch.bfloat16)
    value = amax(w)[0]
    names = {"fprop.weight", "dgrad.weight"} & plan.quantized
    square = (
        quantize(w, (BLOCK, BLOCK), amax=value, output="operand").operand()
        if plan.square_weights and names
        else None
    )
    fprop = dgrad = w
    if "fprop.weight" in names:
        fprop = square if plan.square_weights else quantize(w, amax=value, output="operand").operand()
    if "dgrad.weight" in names:
        dgrad = (
            square
            if plan.square_weights
            else quantize(w, transpose=True, amax=value, output="operand").operand().t()
        )
    return fprop, dgrad, value.clone()
