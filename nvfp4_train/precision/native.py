"""The linear layer on FP4 tensor cores: the emulated layer's codes, scales and random bits, multiplied as they are.

Two custom operators, as in `ops.py`. Of a GEMM both operands are NVFP4, or none is (`backends.check_plan`).
"""

from __future__ import annotations

import torch
from nvfp4_kernels import ROLE_COLUMNS, ROLE_ROWS, SIGNS, amax
from nvfp4_kernels.format import BLOCK
from nvfp4_kernels.gemm import gemm
from nvfp4_kernels.native.quantize import quantize_rows_and_columns, quantize_square
from nvfp4_kernels.native.tensor import NativeTensor, aligned_codes
from nvfp4_kernels.swizzle import swizzled_bytes
from torch import nn

from nvfp4_train.precision.formats import key_of
from nvfp4_train.precision.operators import operator
from nvfp4_train.precision.recipe import LinearPlan


class PreparedOperands(nn.Module):
    """What an engine made of its weight, in buffers that are written in place: compiled code keeps them."""

    def __init__(self, *names: str):
        super().__init__()
        self._names = names
        self.release()

    def hold(self, *values: torch.Tensor) -> None:
        """Take these values, in the order of the names."""
        for name, value in zip(self._names, values, strict=True):
            if (there := getattr(self, name)) is None:
                self.register_buffer(name, value, persistent=False)
            else:
                there.copy_(value)

    def held(self) -> tuple[torch.Tensor, ...]:
        """The buffers, in the order of the names."""
        return tuple(getattr(self, name) for name in self._names)

    def release(self) -> None:
        """Give the memory back: the layer computes in bf16 from here on."""
        for name in self._names:
            self.register_buffer(name, None, persistent=False)


class NativeLinear(PreparedOperands):
    """Computes in place of a `Linear` with the GEMM `backend`; holds its weight's codes and scales, both ways."""

    takes_amax = True

    def __init__(self, backend: str):
        super().__init__("codes", "scales", "turned_codes", "turned_scales", "amax")
        self.backend = backend

    def prepare(self, weight: torch.Tensor, plan: LinearPlan) -> None:
        """Quantize the master weight [out, in] as it is now. In place after the first time."""
        w = weight.detach().to(torch.bfloat16)
        value = amax(w)[0].clone()
        if plan.square_weights:
            rows, columns = quantize_square(w, value)
        else:
            rows, columns = quantize_rows_and_columns(w, (value, None), (value, None))
        self.hold(*_bytes(rows), *_bytes(columns), value)

    def forward(
        self,
        x: torch.Tensor,
        x_amax: torch.Tensor | None,
        weight: torch.Tensor,
        plan: LinearPlan,
        rng: torch.Tensor,
    ) -> torch.Tensor:
        """x: bf16 [tokens, in] -> bf16 [tokens, out]."""
        training = torch.is_grad_enabled()
        return torch.ops.nvfp4_train.native_linear(
            x, x_amax, weight, *self.held(), rng, plan.spec, self.backend, training
        )[0]


def _bytes(q: NativeTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of uint8: what the operators take and return."""
    return q.codes, q.scales.view(torch.uint8)


def _tensor(codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> NativeTensor:
    return NativeTensor(codes, scales.view(torch.float8_e4m3fn), amax)


def _empty(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and amax that hold nothing."""
    return (
        x.new_empty(0, dtype=torch.uint8),
        x.new_empty(0, dtype=torch.uint8),
        x.new_zeros((), dtype=torch.float32),
    )


@operator("native_linear")
def native_linear(
    x: torch.Tensor, x_amax: torch.Tensor | None, weight: torch.Tensor,
    codes: torch.Tensor, scales: torch.Tensor, turned_codes: torch.Tensor, turned_scales: torch.Tensor,
    weight_amax: torch.Tensor, rng: torch.Tensor, spec: str, backend: str, training: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """y = x W^T. x: bf16 [T, in]; x_amax: from x's producer, or None; weight: fp32 [out, in], the master; codes, scales:
    of W [out, in], "turned": of W^T.

    Returns y bf16 [T, out], and x's column codes [in, T/2], scales and amax for wgrad (empty when that runs in bf16).
    """
    plan = LinearPlan.from_spec(spec)
    saves = training and "wgrad.input" in plan.quantized
    signs = SIGNS if saves and plan.rotates_wgrad else None
    rows = columns = None
    if saves or "fprop.input" in plan.quantized:
        both = amax(x, signs) if x_amax is None else x_amax
        column_amax = both[1 if signs else 0].clone()
        rows, columns = quantize_rows_and_columns(
            x,
            (both[0], None) if "fprop.input" in plan.quantized else None,
            (column_amax, None) if saves else None,
            signs,
        )
    if rows is None:
        y = nn.functional.linear(x, weight.to(x.dtype))
    else:
        y = gemm(rows, _tensor(codes, scales, weight_amax), torch.bfloat16, backend)
    return y, *(_empty(x) if columns is None else (*_bytes(columns), column_amax))


@native_linear.register_fake
def _(
    x, x_amax, weight, codes, scales, turned_codes, turned_scales, weight_amax, rng, spec, backend, training
):
    tokens, features = x.shape
    y = x.new_empty(tokens, weight.shape[0])
    if not (training and "wgrad.input" in LinearPlan.from_spec(spec).quantized):
        return y, *_empty(x)
    size = swizzled_bytes(features, tokens // BLOCK)
    scales = x.new_empty(size, dtype=torch.uint8)
    return y, aligned_codes(features, tokens, x.device), scales, x.new_empty((), dtype=torch.float32)


@operator("native_linear_backward")
def native_linear_backward(
    dy: torch.Tensor, x: torch.Tensor, x_codes: torch.Tensor, x_scales: torch.Tensor, x_amax: torch.Tensor,
    weight: torch.Tensor, turned_codes: torch.Tensor, turned_scales: torch.Tensor, weight_amax: torch.Tensor,
    rng: torch.Tensor, spec: str, backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx = dy W (bf16 [T, in]) and dW = dy^T x (fp32 [out, in]). x: bf16 [T, in], or empty when its codes were saved."""
    plan = LinearPlan.from_spec(spec)
    dy = dy.contiguous()
    for_dgrad, for_wgrad = "dgrad.grad" in plan.quantized, "wgrad.grad" in plan.quantized
    signs = SIGNS if plan.rotates_wgrad else None
    rows = columns = None
    if for_dgrad or for_wgrad:
        both = amax(dy, signs)
        row_key, column_key = None, None
        if plan.stochastic_gradients:
            row_key, column_key = key_of(rng, ROLE_ROWS), key_of(rng, ROLE_COLUMNS)
        rows, columns = quantize_rows_and_columns(
            dy,
            (both[0], row_key) if for_dgrad else None,
            (both[1 if signs else 0], column_key) if for_wgrad else None,
            signs,
            plan.hardware_rounding,
        )
    if rows is None:
        dx = dy @ weight.to(dy.dtype)
    else:
        dx = gemm(rows, _tensor(turned_codes, turned_scales, weight_amax), torch.bfloat16, backend)
    if columns is None:
        return dx, gemm(dy.t(), x.t(), torch.float32)
    return dx, gemm(columns, _tensor(x_codes, x_scales, x_amax), torch.float32, backend)


@native_linear_backward.register_fake
def _(dy, x, x_codes, x_scales, x_amax, weight, turned_codes, turned_scales, weight_amax, rng, spec, backend):
    return dy.new_empty(dy.shape[0], weight.shape[1]), torch.empty_like(weight, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, _, weight, _, _, turned_codes, turned_scales, weight_amax, rng, spec, backend, _ = inputs
    _, x_codes, x_scales, x_amax = output
    saved_x = x.new_empty(0) if x_codes.numel() else x
    ctx.save_for_backward(
        saved_x, x_codes, x_scales, x_amax, weight, turned_codes, turned_scales, weight_amax, rng
    )
    ctx.spec, ctx.backend = spec, backend
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 12
    dx, dw = torch.ops.nvfp4_train.native_linear_backward(dy, *ctx.saved_tensors, ctx.spec, ctx.backend)
    return dx, None, dw, *(None,) * 9


native_linear.register_autograd(_backward, setup_context=_setup_context)
