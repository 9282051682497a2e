"""The quantized linear's three GEMMs as two custom operators, opaque to torch.compile (no graph breaks).

Forward saves for the backward pass only x's codes and scales (column-wise ones, quantized from the high-precision x; MS-EDEN
takes the forward's own); the weight's square codes serve fprop and, transposed, dgrad.
"""

from __future__ import annotations

import torch
from nvfp4_kernels.gemm import scale_product, scaled_matmul

from nvfp4_train.precision import formats, health
from nvfp4_train.precision.formats import Quantized
from nvfp4_train.precision.operators import operator
from nvfp4_train.precision.recipe import LinearPlan

# Where fp32 results are wanted, CPUs multiply fp32 operands (gemm.py): the kernels write those directly.
_WGRAD_OPERAND = {"cpu": "operand_fp32"}


@operator("linear")
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
    Returns y bf16 [T, out], and x's codes and scales (`formats.saved_shapes`) and amax for the backward pass (empty when
    wgrad.input stays in bf16 or nothing is trained).
    """
    plan = LinearPlan.from_spec(spec)
    quantizes, saves = "fprop.input" in plan.quantized, training and "wgrad.input" in plan.quantized
    rows = saved = None
    if quantizes or saves:
        rows, saved = formats.forward_operands(plan, x, x_amax, quantizes, saves)
    y = _product(plan, rows or x, (fprop_weight, "fprop.weight", weight_amax), torch.bfloat16)
    if health.active is not None:
        backward = {"wgrad.input": x, "dgrad.weight": weight} if training else {}
        seen = {"fprop.input": x, "fprop.weight": weight, **backward}
        # The whole master weight of a sharded layer has no memory: what arrives are its operands.
        record(plan, rng, {name: t for name, t in seen.items() if t.untyped_storage().size()})
    if not saves:
        return (
            y,
            x.new_empty(0, dtype=torch.uint8),
            x.new_empty(0, dtype=torch.uint8),
            x.new_zeros((), dtype=torch.float32),
        )
    amax = x.new_ones((), dtype=torch.float32) if saved.amax is None else saved.amax.clone()
    return y, *formats.saved_codes(plan, saved), amax


@linear.register_fake
def _(x, x_amax, weight, fprop_weight, dgrad_weight, weight_amax, rng, spec, training):
    plan = LinearPlan.from_spec(spec)
    y, amax = x.new_empty(x.shape[0], weight.shape[0]), x.new_empty((), dtype=torch.float32)
    shapes = (0,), (0,)
    if training and "wgrad.input" in plan.quantized:
        shapes = formats.saved_shapes(plan, *x.shape)
    return y, *(x.new_empty(shape, dtype=torch.uint8) for shape in shapes), amax


@operator("linear_backward")
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
    when its codes were saved."""
    plan = LinearPlan.from_spec(spec)
    dy = dy.contiguous()
    output = _WGRAD_OPERAND.get(dy.device.type, "operand")
    dtype = torch.float32 if output == "operand_fp32" else torch.bfloat16
    if plan.ms_eden:
        saved = formats.saved_operand(plan, codes, scales, x_amax, torch.bfloat16)
        dgrad, wgrad = formats.eden_operands(plan, dy, saved, dgrad_weight, weight_amax, rng)
        dx = _multiply(*dgrad, torch.bfloat16)
        dw = _multiply(*wgrad, torch.float32, dtype)
    else:
        for_dgrad, for_wgrad = "dgrad.grad" in plan.quantized, "wgrad.grad" in plan.quantized
        rows = columns = None
        if for_dgrad or for_wgrad:
            rows, columns = formats.gradient_operands(plan, dy, rng, for_dgrad, for_wgrad, output)
        dx = _product(plan, rows or dy, (dgrad_weight.t(), "dgrad.weight", weight_amax), torch.bfloat16)
        right = formats.saved_operand(plan, codes, scales, x_amax, dtype) if codes.numel() else x.t()
        dw = _multiply(columns or dy.t(), right, torch.float32, dtype)
    if health.active is not None:
        record(plan, rng, {"dgrad.grad": dy, "wgrad.grad": dy})
    return dx, dw


@linear_backward.register_fake
def _(dy, x, codes, scales, x_amax, dgrad_weight, weight_amax, rng, spec):
    n, k = dgrad_weight.shape
    return dy.new_empty(dy.shape[0], k), dy.new_empty(n, k, dtype=torch.float32)


def _multiply(
    a: Quantized | torch.Tensor,
    b: Quantized | torch.Tensor,
    out_dtype: torch.dtype,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """a b^T with the tensor scales of those that have one; `dtype`: in which quantized operands are multiplied."""
    amaxes = [q.amax for q in (a, b) if not isinstance(q, torch.Tensor) and q.amax is not None]
    left, right = (q if isinstance(q, torch.Tensor) else q.operand(dtype) for q in (a, b))
    return scaled_matmul(left, right, scale_product(amaxes), out_dtype)


def _product(
    plan: LinearPlan,
    a: Quantized | torch.Tensor,
    weight: tuple[torch.Tensor, str, torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a times a prepared weight, transposed: (operand, its name in the plan, amax)."""
    operand, name, amax = weight
    amaxes = [a.amax] if not isinstance(a, torch.Tensor) and a.amax is not None else []
    if name in plan.quantized and plan.has_tensor_scale:
        amaxes.append(amax)
    left = a if isinstance(a, torch.Tensor) else a.operand()
    return scaled_matmul(left, operand, scale_product(amaxes), out_dtype)


def record(plan: LinearPlan, rng: torch.Tensor, operands: dict[str, torch.Tensor]) -> None:
    """Tell the active health recorder what quantizing loses. operands: {name: x, dy or the master weight}."""
    for operand, x in operands.items():
        # Where a model is sharded its master weights are not here whole: their operands are what is gathered.
        if operand in plan.quantized and x.untyped_storage().nbytes():
            health.active.add(rng, operand, *formats.operand_codes(plan, operand, x, rng))


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
