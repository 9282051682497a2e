"""The linear layer on Hopper's FP8 tensor cores: the emulated layer's codes and scales, multiplied as they are.

Two custom operators, as in `ops.py`. All operands run along their GEMM's inner dimension, in blocks of 1x128, the weight's
of 128x128; zeros fill the last block. Of a GEMM both operands are FP8, or none is (`backends.check_plan`).
"""

from __future__ import annotations

import torch
from nvfp4_kernels.gemm import gemm
from nvfp4_kernels.native import fp8
from nvfp4_kernels.native.fp8 import Fp8Tensor
from torch.nn import functional as F

from nvfp4_train.precision import health
from nvfp4_train.precision.native import PreparedOperands
from nvfp4_train.precision.operators import operator
from nvfp4_train.precision.ops import record
from nvfp4_train.precision.recipe import LinearPlan

TOKENS = 16  # the product takes multiples of it; training has no others, inference may


class Fp8Linear(PreparedOperands):
    """Computes in place of a `Linear` with `fp8.multiply`'s `backend`; holds its weight's codes and scales, both ways."""

    takes_amax = False  # there is no tensor scale

    def __init__(self, backend: str):
        super().__init__("codes", "scales", "turned_codes", "turned_scales")
        self.backend = backend

    def prepare(self, weight: torch.Tensor, plan: LinearPlan) -> None:
        """Quantize the master weight [out, in] as it is now. In place after the first time."""
        w = weight.detach().to(torch.bfloat16)
        rows, columns = (
            fp8.quantize_square(w) if plan.square_weights else fp8.quantize_rows_and_columns(w, True, True)
        )
        self.hold(*_parts(rows), *_parts(columns))

    def forward(
        self,
        x: torch.Tensor,
        x_amax: torch.Tensor | None,
        weight: torch.Tensor,
        plan: LinearPlan,
        rng: torch.Tensor,
    ) -> torch.Tensor:
        """x: bf16 [tokens, in] -> bf16 [tokens, out]."""
        return torch.ops.nvfp4_train.fp8_linear(
            x, weight, *self.held(), rng, plan.spec, self.backend, torch.is_grad_enabled()
        )[0]


def _parts(q: Fp8Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, scales as they lie in memory): what the operators take and return."""
    return q.codes.view(torch.uint8), q.scales.t()


def _tensor(codes: torch.Tensor, scales: torch.Tensor, square: bool = False) -> Fp8Tensor:
    return Fp8Tensor(codes.view(torch.float8_e4m3fn), scales.t(), square)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, ...] contiguous, with zeros up to a multiple of `TOKENS`."""
    missing = -x.shape[0] % TOKENS
    return F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()


@operator("fp8_linear")
def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor,
    codes: torch.Tensor, scales: torch.Tensor, turned_codes: torch.Tensor, turned_scales: torch.Tensor,
    rng: torch.Tensor, spec: str, backend: str, training: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """y = x W^T. x: bf16 [T, in]; weight: fp32 [out, in], the master; codes, scales: of W, "turned": of W^T.

    Returns y bf16 [T, out], and of x^T for wgrad the codes uint8 [in, T up to 128] and scales fp32 [T / 128 up, in] (empty
    when that runs in bf16).
    """
    plan = LinearPlan.from_spec(spec)
    quantizes, saves = "fprop.input" in plan.quantized, training and "wgrad.input" in plan.quantized
    rows = columns = None
    if quantizes or saves:
        rows, columns = fp8.quantize_rows_and_columns(_whole(x), quantizes, saves)
    if rows is None:
        y = F.linear(x, weight.to(x.dtype))
    else:
        w = _tensor(codes, scales, plan.square_weights)
        y = fp8.multiply(rows, w, torch.bfloat16, backend)[: x.shape[0]]
    if health.active is not None:
        backward = {"wgrad.input": x, "dgrad.weight": weight} if training else {}
        record(plan, rng, {"fprop.input": x, "fprop.weight": weight, **backward})
    return y, *(_nothing(x) if columns is None else _parts(columns))


def _nothing(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)


@fp8_linear.register_fake
def _(x, weight, codes, scales, turned_codes, turned_scales, rng, spec, backend, training):
    tokens, features = x.shape
    y = x.new_empty(tokens, weight.shape[0])
    if not (training and "wgrad.input" in LinearPlan.from_spec(spec).quantized):
        return y, *_nothing(x)
    blocks = (tokens + fp8.BLOCK - 1) // fp8.BLOCK
    saved = x.new_empty(features, blocks * fp8.BLOCK, dtype=torch.uint8)
    return y, saved, x.new_empty(blocks, features, dtype=torch.float32)


@operator("fp8_linear_backward")
def fp8_linear_backward(
    dy: torch.Tensor, x: torch.Tensor, x_codes: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor,
    turned_codes: torch.Tensor, turned_scales: torch.Tensor, rng: torch.Tensor, spec: str, backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx = dy W (bf16 [T, in]) and dW = dy^T x (fp32 [out, in]). x: bf16 [T, in], or empty when its codes were saved."""
    plan = LinearPlan.from_spec(spec)
    for_dgrad, for_wgrad = "dgrad.grad" in plan.quantized, "wgrad.grad" in plan.quantized
    rows = columns = None
    if for_dgrad or for_wgrad:
        rows, columns = fp8.quantize_rows_and_columns(_whole(dy), for_dgrad, for_wgrad)
    if rows is None:
        dx = dy @ weight.to(dy.dtype)
    else:
        w = _tensor(turned_codes, turned_scales, plan.square_weights)
        dx = fp8.multiply(rows, w, torch.bfloat16, backend)[: dy.shape[0]]
    if columns is None:
        dw = gemm(dy.t(), x.t(), torch.float32)
    else:
        dw = fp8.multiply(columns, _tensor(x_codes, x_scales), torch.float32, backend)
    if health.active is not None:
        record(plan, rng, {"dgrad.grad": dy, "wgrad.grad": dy})
    return dx, dw


@fp8_linear_backward.register_fake
def _(dy, x, x_codes, x_scales, weight, turned_codes, turned_scales, rng, spec, backend):
    return dy.new_empty(dy.shape[0], weight.shape[1]), torch.empty_like(weight, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, weight, _, _, turned_codes, turned_scales, rng, spec, backend, _ = inputs
    _, x_codes, x_scales = output
    saved_x = x.new_empty(0) if x_codes.numel() else x
    ctx.save_for_backward(saved_x, x_codes, x_scales, weight, turned_codes, turned_scales, rng)
    ctx.spec, ctx.backend = spec, backend
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 10
    dx, dw = torch.ops.nvfp4_train.fp8_linear_backward(dy, *ctx.saved_tensors, ctx.spec, ctx.backend)
    return dx, dw, *(None,) * 8


fp8_linear.register_autograd(_backward, setup_context=_setup_context)
